// What snake_ops.cpp knows of the Snake kernels: plain pointers, and one table of functions per instruction set.
//
// A row is C channels, C a multiple of 16 in a unit. Everything is fp32 and contiguous.
#pragma once

#include <cstdint>

namespace motet {

constexpr int64_t kUnitRows = 8;  // that are multiplied together

// A residual unit: x + bias + matrix . snake(taps_bias + taps * snake(x)); see kernels/snake.py.
struct SnakeUnit {
  const float *taps, *taps_bias;         // [K, C], [C]
  const float *alpha, *inverse;          // of the second Snake: [C], and 1 / alpha
  const float *matrix, *bias;            // [C in, C out], [C]
  int64_t channels, num_taps, dilation;
};

struct SnakeTable {
  const char* name;
  // out[r, c] = x + inverse[c] * sin(alpha[c] * x)^2
  void (*snake)(int64_t rows, int64_t channels, const float* x, const float* alpha, const float* inverse, float* out);
  // Output rows begin..end: `active` is row 0's first tap; row t adds held[t] of the first `delay` rows, then x[t - delay].
  // `scratch` has room for kUnitRows * C.
  void (*unit)(const SnakeUnit&, int64_t begin, int64_t end, const float* active, const float* held, const float* x,
               float* out, float* scratch);
};

const SnakeTable* snake_plain();
#if defined(__x86_64__)
const SnakeTable* snake_avx2();
const SnakeTable* snake_avx512();
const SnakeTable* snake_avx512bf16();
#endif

}  // namespace motet
