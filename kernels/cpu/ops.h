// What the operators share: types, raw bytes, the chosen table, and work shared among torch's threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "gemm.h"
#include "kernels.h"

// Functions that need what only some processors have, in files that are compiled once.
#define MOTET_BF16_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c,avx2,fma")))
#define MOTET_BF16_INLINE MOTET_BF16_TARGET __attribute__((always_inline)) inline

namespace motet {
const Table& table();  // of the best instruction set that this CPU has

// Layout rows16 (linear.cpp): a weight as plain pointers, and x bf16 [rows, in] times it, without tensors in between.
Weight describe(const at::Tensor& quants, const std::optional<at::Tensor>& scale, const std::optional<at::Tensor>& minimum,
                int64_t bits, int64_t zero, int64_t out);
void multiply(const Weight& w, const uint16_t* x, int64_t rows, const Output& to);

// Weights of 16 bits: y = x bf16 [rows, in] times all tiles (bf16.cpp).
void multiply_bf16(const Weight&, const uint16_t* x, int64_t rows, Output to);
// What does that: "avx512bf16", "avx2" or "plain", which is not worth it.
const char* bf16_instruction_set();
// $MOTET_CPU_ISA: "plain", "avx2" or "avxvnni" stays below what the processor has, for tests; empty: all it has.
const std::string& forced_isa();

// The functions behind the operators of these names, for layers.cpp.
at::Tensor rows16_linear(const at::Tensor& x, const at::Tensor& quants, const std::optional<at::Tensor>& scale,
                         const std::optional<at::Tensor>& minimum, const std::optional<at::Tensor>& bias, int64_t bits,
                         int64_t zero, int64_t out, bool fp32 = false);
std::tuple<at::Tensor, at::Tensor> paged_attention(const at::Tensor& q, const at::Tensor& kv, const at::Tensor& tables,
                                                   const at::Tensor& position, const at::Tensor& num_visible,
                                                   const at::Tensor& row_starts, const std::optional<at::Tensor>& ancestors,
                                                   const std::optional<at::Tensor>& tree_starts,
                                                   const std::optional<at::Tensor>& sinks, double scale, int64_t window,
                                                   double soft_cap, bool want_lse);
void rotate_store_kv(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cos,
                     const at::Tensor& sin, const at::Tensor& kv, const at::Tensor& slots, bool interleaved);
}  // namespace motet

namespace {

using at::Tensor;
using motet::table;
using motet::Type;

inline uint16_t bf16_of(float value) { return c10::BFloat16(value).x; }
inline float float_of(uint16_t bits) { return c10::detail::f32_from_bits(bits); }

inline Type type_of(const Tensor& x) {
  if (x.scalar_type() == at::kFloat) return Type::fp32;
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "expected float32 or bfloat16, got ", x.scalar_type());
  return Type::bf16;
}
inline Type cache_type_of(const Tensor& kv) { return kv.scalar_type() == at::kChar ? Type::int8 : type_of(kv); }
inline int64_t size_of(Type type) { return type == Type::bf16 ? 2 : type == Type::int8 ? 1 : 4; }
// Elements of a cache's row for heads of `dim`: an int8 row ends with its scale.
inline int64_t cache_width(Type type, int64_t dim) { return type == Type::int8 ? dim + motet::kScaleBytes : dim; }
inline const char* bytes(const Tensor& x) { return static_cast<const char*>(x.const_data_ptr()); }
inline char* mutable_bytes(const Tensor& x) { return static_cast<char*>(x.mutable_data_ptr()); }

// Calls work(i) for i in 0..count, each exactly once; threads take the next i when they are free.
template <class Work>
void share(int64_t count, bool parallel, const Work& work) {
  if (!parallel || count == 1 || at::get_num_threads() == 1 || at::in_parallel_region()) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(count, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
  });
}

// The same, work(i, following): following() takes the i that this thread does next, `count` or more where none is left.
template <class Work>
void share_ahead(int64_t count, bool parallel, const Work& work) {
  std::atomic<int64_t> next{0};
  const auto take = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
  const auto work_all = [&](int64_t, int64_t) {
    for (int64_t i = take(), then; i < count; i = then) {
      then = -1;
      const auto following = [&] { return then < 0 ? then = take() : then; };
      work(i, following);
      following();
    }
  };
  const int64_t threads = std::min<int64_t>(count, at::get_num_threads());
  if (!parallel || threads < 2 || at::in_parallel_region()) return work_all(0, 1);
  at::parallel_for(0, threads, 1, work_all);
}

// Even pieces of rows; `cost` is the work in elements. Waking a sleeping thread costs more than 10 us.
template <class Work>
void share_rows(int64_t rows, int64_t cost, const Work& work) {
  const int64_t grain = 32768;
  int64_t pieces =
      std::min<int64_t>(std::min<int64_t>(rows, at::get_num_threads()), std::max<int64_t>(1, cost / grain));
  share(pieces, pieces > 1, [&](int64_t piece) {
    for (int64_t row = rows * piece / pieces; row < rows * (piece + 1) / pieces; ++row) work(row);
  });
}

// Floats of this thread's own, on a cache line: vectors that straddle two lines load at half speed.
inline float* scratch(size_t which, size_t count) {
  thread_local std::vector<float> pools[2];
  if (pools[which].size() < count + 16) pools[which].resize(count + 16);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(pools[which].data()) + 63) & ~uintptr_t{63});
}

}  // namespace
