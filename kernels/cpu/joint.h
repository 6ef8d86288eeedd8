// Blocks of a picture's transformer: products over packed weights, norms with a row's own shift and scale, attention of all tokens
// over all tokens. fp32 on every instruction set; bf16 (products of bf16, sums in fp32) on avx512bf16 only.
//
// A weight [out, in] is packed as words [out / 64][in / P][64], a word being P = 1 fp32 or 2 bf16 neighbours along `in`: one lane per
// column, no sum across lanes. Sums run over rising inputs, whatever other rows there are: a row's numbers depend on it alone.
#pragma once

#include "dense.h"
#include "rows.h"

namespace {

using motet::After;
using motet::kColumns;
using motet::Product;

template <class A>
constexpr int64_t per_word = 4 / sizeof(A);

// c[M][W V] = sum over p of a[m][p] * b[p][W V], fp32. Strides in numbers.
template <int M, int V>
inline void multiply_floats(const float* a, int64_t a_row, const float* b, int64_t b_row, int64_t depth, float* c, int64_t c_row) {
  vf sum[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[m][v] = vf{};
  for (int64_t p = 0; p < depth; ++p, b += b_row) {
    vf columns[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) columns[v] = load(b + v * W);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const vf row = splat(a[m * a_row + p]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[m][v] += row * columns[v];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(c + m * c_row + v * W, sum[m][v]);
}
// Rows taken together and vectors of columns, so that the sums fit the registers: 32 of them, else 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectors = 4, kMost = 6;
#else
constexpr int kVectors = 2, kMost = W == 8 ? 6 : 3;
#endif
template <int V>
inline void multiply_some(int64_t rows, const float* a, int64_t a_row, const float* b, int64_t b_row, int64_t depth, float* c,
                          int64_t c_row) {
  constexpr int M = kMost;
  for (; rows >= M; rows -= M, a += M * a_row, c += M * c_row) multiply_floats<M, V>(a, a_row, b, b_row, depth, c, c_row);
  for (; rows >= 2; rows -= 2, a += 2 * a_row, c += 2 * c_row) multiply_floats<2, V>(a, a_row, b, b_row, depth, c, c_row);
  if (rows) multiply_floats<1, V>(a, a_row, b, b_row, depth, c, c_row);
}

// c[rows][columns] = a[rows][depth] . b[depth][columns]; columns a multiple of 16; strides and depth in words.
inline void multiply_words(int64_t rows, int64_t columns, const float* a, int64_t a_row, const float* b, int64_t b_row,
                           int64_t depth, float* c, int64_t c_row) {
  constexpr int V = kVectors;
  int64_t at = 0;
  for (; at + V * W <= columns; at += V * W) multiply_some<V>(rows, a, a_row, b + at, b_row, depth, c + at, c_row);
  for (; at < columns; at += W) multiply_some<1>(rows, a, a_row, b + at, b_row, depth, c + at, c_row);
}
#if defined(__AVX512BF16__)
inline void multiply_words(int64_t rows, int64_t columns, const bf16* a, int64_t a_row, const bf16* b, int64_t b_row,
                           int64_t depth, float* c, int64_t c_row) {
  const uint32_t *x = (const uint32_t*)a, *y = (const uint32_t*)b;
  int64_t at = 0;
  for (; at + 64 <= columns; at += 64) multiply_rows<4>(rows, x, a_row, y + at, b_row, depth, nullptr, c + at, c_row);
  switch ((columns - at) / 16) {
    case 1: multiply_rows<1>(rows, x, a_row, y + at, b_row, depth, nullptr, c + at, c_row); break;
    case 2: multiply_rows<2>(rows, x, a_row, y + at, b_row, depth, nullptr, c + at, c_row); break;
    case 3: multiply_rows<3>(rows, x, a_row, y + at, b_row, depth, nullptr, c + at, c_row); break;
  }
}
#endif

inline vf gelu_lanes(vf x) { return x * activate(x, 1); }

// Rows begin..end of x times tiles tile_begin..tile_end of 64 columns.
template <class A>
void product_of(const Product& p, const A* x, int64_t x_row, int64_t begin, int64_t end, int64_t tile_begin, int64_t tile_end,
                After after, void* y, int64_t y_row, const float* gate) {
  constexpr int64_t P = per_word<A>, kRows = 48;
  alignas(64) float sums[kRows * kColumns];
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const A* weight = (const A*)p.weight + tile * kColumns * p.in;
    const float* bias = p.bias + tile * kColumns;
    for (int64_t from = begin; from < end; from += kRows) {
      const int64_t rows = end - from < kRows ? end - from : kRows;
      multiply_words(rows, kColumns, x + from * x_row, x_row / P, weight, kColumns, p.in / P, sums, kColumns);
      for (int64_t m = 0; m < rows; ++m) {
        const float* sum = sums + m * kColumns;
        const int64_t at = (from + m) * y_row + tile * kColumns;
        if (after == After::add) {
          float* to = (float*)y + at;
          for (int64_t i = 0; i < kColumns; i += W)
            store(to + i, load(to + i) + load(gate + tile * kColumns + i) * (load(sum + i) + load(bias + i)));
        } else if (after == After::gelu) {
          for (int64_t i = 0; i < kColumns; i += W) store((A*)y + at + i, gelu_lanes(load(sum + i) + load(bias + i)));
        } else {
          for (int64_t i = 0; i < kColumns; i += W) store((A*)y + at + i, load(sum + i) + load(bias + i));
        }
      }
    }
  }
}

// One token: layer norm without weights, then times (1 + scale) plus shift. features a multiple of 16.
template <class A>
void modulate_of(int64_t features, const float* x, const float* shift, const float* scale, float eps, A* out) {
  vf total[2] = {}, square[2] = {};
  for (int64_t i = 0; i < features; i += 2 * W)
    for (int j = 0; j < 2; ++j) total[j] += load(x + i + j * W);
  const float mean = sum_lanes(total[0] + total[1]) / (float)features;
  for (int64_t i = 0; i < features; i += 2 * W)
    for (int j = 0; j < 2; ++j) {
      const vf d = load(x + i + j * W) - mean;
      square[j] += d * d;
    }
  const float factor = 1.0f / __builtin_sqrtf(sum_lanes(square[0] + square[1]) / (float)features + eps);
  for (int64_t i = 0; i < features; i += W)
    store(out + i, (load(x + i) - mean) * factor * (1.0f + load(scale + i)) + load(shift + i));
}

inline vf swap_pairs(vf x) {
#if defined(__AVX512F__)
  return (vf)_mm512_permute_ps((__m512)x, 0xB1);
#elif defined(__AVX2__)
  return (vf)_mm256_permute_ps((__m256)x, 0xB1);
#else
  return vf{x[1], x[0], x[3], x[2]};
#endif
}

// One head of one token, in place: rms norm, then neighbours turned: x * cos + swapped(x) * sin (sin negative at even places).
// cos null: not turned. dim a multiple of 16.
template <class A>
void norm_turn_of(int64_t dim, const float* weight, float eps, const float* cos, const float* sin, A* x) {
  vf part = {};
  for (int64_t i = 0; i < dim; i += W) {
    const vf v = load(x + i);
    part += v * v;
  }
  const float factor = 1.0f / __builtin_sqrtf(sum_lanes(part) / (float)dim + eps);
  for (int64_t i = 0; i < dim; i += W) {
    vf v = load(x + i) * factor * load(weight + i);
    if (cos) v = v * load(cos + i) + swap_pairs(v) * load(sin + i);
    store(x + i, v);
  }
}

// Two neighbours of a pair of rows in one word, or one number.
inline uint32_t joined(const bf16* low, const bf16* high) { return low->bits | (uint32_t)high->bits << 16; }

// One head of one picture: softmax(q k^T scale) v. Rows `row` numbers apart; out rows `out_row` apart. dim a multiple of 16.
template <class A>
void attend_of(const motet::Joint& a, int64_t head, float* scratch) {
  constexpr int64_t P = per_word<A>, kQueries = 48;
  const int64_t count = a.tokens, dim = a.dim, padded = (count + 15) / 16 * 16;
  const A *q = (const A*)a.q + head * dim, *k = (const A*)a.k + head * dim, *v = (const A*)a.v + head * dim;
  float* keys = scratch;                           // words [dim / P][padded]
  float* values = keys + dim / P * padded;         // words [padded / P][dim]
  float* scores = values + padded / P * dim;       // [kQueries][padded]; then weights as A, at the same stride
  float* mixed = scores + kQueries * padded;       // [kQueries][dim]
  for (int64_t p = 0; p < dim / P; ++p) {
    uint32_t* to = (uint32_t*)keys + p * padded;
    const uint32_t* from = (const uint32_t*)k + p;
    for (int64_t t = 0; t < count; ++t) to[t] = from[t * (a.row / P)];
    for (int64_t t = count; t < padded; ++t) to[t] = 0;
  }
  for (int64_t p = 0; p < padded / P; ++p) {
    uint32_t* to = (uint32_t*)values + p * dim;
    const A *low = v + p * P * a.row, *high = low + a.row;
    if (p * P >= count)
      memset(to, 0, dim * 4);
    else if (P == 1)
      memcpy(to, low, dim * 4);
    else
      for (int64_t d = 0; d < dim; ++d)
        to[d] = ((const bf16*)low)[d].bits | (p * P + 1 < count ? (uint32_t)((const bf16*)high)[d].bits << 16 : 0);
  }
  for (int64_t from = 0; from < count; from += kQueries) {
    const int64_t rows = count - from < kQueries ? count - from : kQueries;
    float over[kQueries];
    multiply_words(rows, padded, q + from * a.row, a.row / P, (const A*)keys, padded, dim / P, scores, padded);
    for (int64_t m = 0; m < rows; ++m) {
      float* s = scores + m * padded;
      for (int64_t t = count; t < padded; ++t) s[t] = -__builtin_inff();
      vf best = load(s);
      for (int64_t t = W; t < padded; t += W) best = larger(load(s + t), best);
      const float top = max_lanes(best);
      vf total = {};
      for (int64_t t = 0; t < padded; t += W) {
        const vf weight = exp_lanes((load(s + t) - top) * a.scale);
        total += weight;
        store((A*)s + t, weight);
      }
      over[m] = 1.0f / sum_lanes(total);
    }
    multiply_words(rows, dim, (const A*)scores, padded, (const A*)values, dim, padded / P, mixed, dim);
    for (int64_t m = 0; m < rows; ++m) {
      A* to = (A*)a.out + (from + m) * a.out_row + head * dim;
      for (int64_t d = 0; d < dim; d += W) store(to + d, load(mixed + m * dim + d) * over[m]);
    }
  }
}

#if defined(__AVX512BF16__)
#define MOTET_OF(type, call_bf16, call_fp32) (type == Type::bf16 ? call_bf16 : call_fp32)
#else
#define MOTET_OF(type, call_bf16, call_fp32) call_fp32
#endif

void product(Type type, const Product& p, const void* x, int64_t x_row, int64_t begin, int64_t end, int64_t tile_begin,
             int64_t tile_end, After after, void* y, int64_t y_row, const float* gate) {
  MOTET_OF(type, product_of(p, (const bf16*)x, x_row, begin, end, tile_begin, tile_end, after, y, y_row, gate),
           product_of(p, (const float*)x, x_row, begin, end, tile_begin, tile_end, after, y, y_row, gate));
}
void modulate(Type type, int64_t features, const float* x, const float* shift, const float* scale, float eps, void* out) {
  MOTET_OF(type, modulate_of(features, x, shift, scale, eps, (bf16*)out), modulate_of(features, x, shift, scale, eps, (float*)out));
}
void norm_turn(Type type, int64_t dim, const float* weight, float eps, const float* cos, const float* sin, void* x) {
  MOTET_OF(type, norm_turn_of(dim, weight, eps, cos, sin, (bf16*)x), norm_turn_of(dim, weight, eps, cos, sin, (float*)x));
}
void attend_joint(Type type, const motet::Joint& a, int64_t head, float* scratch) {
  MOTET_OF(type, attend_of<bf16>(a, head, scratch), attend_of<float>(a, head, scratch));
}

}  // namespace
