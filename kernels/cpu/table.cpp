// One instruction set's table. build.py compiles this file once per set: -DMOTET_TABLE=table_avx2 -mavx2 ...
#include "attend.h"
#include "rows.h"

namespace motet {

const Table* MOTET_TABLE() {
  static const Table table = {MOTET_NAME, attend,  merge,  finish,       rms_norm, gated,
                              rotate,     convert, argmax, noisy_argmax, sum_exp,  at_least};
  return &table;
}

}  // namespace motet
