// One instruction set's table. build.py compiles this file once per set: -DMOTET_TABLE=table_avx2 -mavx2 ...
#include "attend.h"
#include "dense.h"
#include "joint.h"
#include "rows.h"

namespace motet {

#if !defined(__AVX512BF16__)
constexpr decltype(Table::dense_pack) dense_pack = nullptr;
constexpr decltype(Table::dense) dense = nullptr;
#endif

const Table* MOTET_TABLE() {
  static const Table table = {MOTET_NAME, attend,  merge,  finish,       rms_norm, gated,
                              rotate,     convert, quantize, argmax, noisy_argmax, sum_exp,  at_least,
                              dense_pack, dense, product, modulate, norm_turn, attend_joint};
  return &table;
}

}  // namespace motet
