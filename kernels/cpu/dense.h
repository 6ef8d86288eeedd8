// Attention of every row over every row of a window, without a cache: tiles of rows against tiles of keys, in bf16 dot
// products. Only for CPUs that have them: the set avx512bf16.
//
// K and V are first laid out so that both products are one small kernel: sums over pairs of bf16, one fp32 lane per
// column. Packed K [blocks of 64 keys][width / 2][64]: pairs of dims. Packed V [pairs of keys][width]. What pads them
// is 0. A row's numbers come in an order of their own: pairs rising, tiles of kDenseKeys keys rising.
#pragma once

#include "attend.h"

#if defined(__AVX512BF16__)

namespace {

using motet::Dense;
using motet::kDenseBlock;
using motet::kDenseKeys;
using motet::kDenseRows;

// c[M][16 V] = factor[m] * c + sum over p of a[m][p] . b[p][16 V]; a null factor starts at 0. Strides in words.
template <int M, int V>
inline void multiply(const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int64_t pairs,
                     const float* factor, float* c, int64_t c_row) {
  __m512 sum[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
      sum[m][v] = factor ? _mm512_mul_ps(_mm512_loadu_ps(c + m * c_row + v * 16), _mm512_set1_ps(factor[m]))
                         : _mm512_setzero_ps();
  for (int64_t p = 0; p < pairs; ++p, b += b_row) {
    __m512i columns[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) columns[v] = _mm512_loadu_si512(b + v * 16);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512bh row = (__m512bh)_mm512_set1_epi32((int32_t)a[m * a_row + p]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[m][v] = _mm512_dpbf16_ps(sum[m][v], row, (__m512bh)columns[v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(c + m * c_row + v * 16, sum[m][v]);
}
template <int V>
inline void multiply_rows(int64_t rows, const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row,
                          int64_t pairs, const float* factor, float* c, int64_t c_row) {
  for (; rows > 0; rows -= 6, a += 6 * a_row, c += 6 * c_row, factor += factor ? 6 : 0) switch (rows) {
      case 1: multiply<1, V>(a, a_row, b, b_row, pairs, factor, c, c_row); break;
      case 2: multiply<2, V>(a, a_row, b, b_row, pairs, factor, c, c_row); break;
      case 3: multiply<3, V>(a, a_row, b, b_row, pairs, factor, c, c_row); break;
      case 4: multiply<4, V>(a, a_row, b, b_row, pairs, factor, c, c_row); break;
      case 5: multiply<5, V>(a, a_row, b, b_row, pairs, factor, c, c_row); break;
      default: multiply<6, V>(a, a_row, b, b_row, pairs, factor, c, c_row);
    }
}

// Row `index` of a [.., dim], or zeros; from `buffer` [width] where it must be padded.
inline const uint16_t* padded_row(const void* rows, int64_t stride, int64_t index, int64_t count, int64_t dim,
                                  int64_t width, uint16_t* buffer) {
  const uint16_t* row = (const uint16_t*)rows + index * stride;
  if (index < count && dim == width) return row;
  memset(buffer, 0, width * 2);
  if (index < count) memcpy(buffer, row, dim * 2);
  return buffer;
}

// Lays out one block of 64 keys of one head, and the values beside it.
void dense_pack(const Dense& a, int64_t window, int64_t head, int64_t block, float* scratch) {
  const int64_t width = motet::padded_dim(a.dim), padded = (a.rows + kDenseBlock - 1) / kDenseBlock * kDenseBlock;
  const int64_t item = (window * a.num_heads + head) * padded * (width / 2);
  uint32_t* keys = a.packed_k + item + block * kDenseBlock * (width / 2);
  uint32_t* values = a.packed_v + item + block * kDenseBlock / 2 * width;
  const uint16_t* k = (const uint16_t*)a.k + window * a.k_window + head * a.k_head;
  const uint16_t* v = (const uint16_t*)a.v + window * a.v_window + head * a.v_head;
  uint16_t* buffers = (uint16_t*)scratch;  // [16, width]
  const uint16_t* row[16];
  for (int64_t first = 0; first < kDenseBlock; first += 16) {
    for (int64_t i = 0; i < 16; ++i)
      row[i] = padded_row(k, a.k_row, block * kDenseBlock + first + i, a.rows, a.dim, width, buffers + i * width);
    for (int64_t d = 0; d < width; d += 32) {
      vu words[16];
      for (int i = 0; i < 16; ++i) words[i] = *(const vu_any*)(row[i] + d);
      transpose(words);
      for (int i = 0; i < 16; ++i) *(vu_any*)(keys + (d / 2 + i) * kDenseBlock + first) = words[i];
    }
  }
  for (int64_t pair = 0; pair < kDenseBlock / 2; ++pair) {
    for (int64_t i = 0; i < 2; ++i)
      row[i] = padded_row(v, a.v_row, block * kDenseBlock + 2 * pair + i, a.rows, a.dim, width, buffers + i * width);
    for (int64_t d = 0; d < width; d += 16)
      *(vu_any*)(values + pair * width + d) =
          widen_lanes(*(const vh_any*)(row[0] + d)) | widen_lanes(*(const vh_any*)(row[1] + d)) << 16;
  }
}

// Rows begin..end (kDenseRows at most) of one head into out.
void dense(const Dense& a, int64_t window, int64_t head, int64_t begin, int64_t end, float* scratch) {
  const int64_t width = motet::padded_dim(a.dim), pairs = width / 2, n = end - begin;
  const int64_t padded = (a.rows + kDenseBlock - 1) / kDenseBlock * kDenseBlock;
  const uint32_t* keys = a.packed_k + (window * a.num_heads + head) * padded * pairs;
  const uint32_t* values = a.packed_v + (window * a.num_heads + head) * padded * pairs;
  float* scores = scratch;                              // [n, kDenseKeys]; then the weights as bf16, at the same stride
  float* mix = scores + kDenseRows * kDenseKeys;        // [n, width]
  float* totals = mix + kDenseRows * width;             // [n, 16]
  uint32_t* q = (uint32_t*)(totals + kDenseRows * 16);  // [n, pairs]
  float top[kDenseRows], factor[kDenseRows];
  memset(mix, 0, n * width * 4);
  memset(totals, 0, n * 16 * 4);
  memset(q, 0, n * width * 2);
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t* row = (const uint16_t*)a.q + window * a.q_window + (begin + i) * a.q_row + head * a.q_head;
    memcpy(q + i * pairs, row, a.dim * 2);
    top[i] = -__FLT_MAX__;
  }
  const float scale = a.scale * 1.44269504088896341f;  // e^x = 2^(x log2 e)
  for (int64_t from = 0; from < a.rows; from += kDenseKeys) {
    const int64_t count = a.rows - from < kDenseKeys ? a.rows - from : kDenseKeys;
    const int64_t whole = (count + kDenseBlock - 1) / kDenseBlock * kDenseBlock;
    for (int64_t block = 0; block < whole; block += kDenseBlock)
      multiply_rows<4>(n, q, pairs, keys + (from + block) * pairs, kDenseBlock, pairs, nullptr, scores + block,
                       kDenseKeys);
    for (int64_t i = 0; i < n; ++i) {
      float* s = scores + i * kDenseKeys;
      for (int64_t t = count; t < whole; ++t) s[t] = -__FLT_MAX__;  // gives a weight of 0
      __m512 best = _mm512_set1_ps(top[i]);
      for (int64_t t = 0; t < whole; t += 16) best = _mm512_max_ps(best, _mm512_loadu_ps(s + t));
      const float now = _mm512_reduce_max_ps(best), shift = -now * scale;
      factor[i] = (top[i] - now) * scale;
      top[i] = now;
      __m512 total = _mm512_setzero_ps();
      for (int64_t t = 0; t < whole; t += 32) {
        const __m512 x = exp2_lanes(
            _mm512_fmadd_ps(_mm512_loadu_ps(s + t), _mm512_set1_ps(scale), _mm512_set1_ps(shift)));
        const __m512 y = exp2_lanes(
            _mm512_fmadd_ps(_mm512_loadu_ps(s + t + 16), _mm512_set1_ps(scale), _mm512_set1_ps(shift)));
        total = _mm512_add_ps(total, _mm512_add_ps(x, y));
        _mm512_storeu_si512(s + t / 2, (__m512i)_mm512_cvtne2ps_pbh(y, x));
      }
      _mm512_storeu_ps(scores + i * kDenseKeys + kDenseKeys - 16, total);  // above the weights; added below
    }
    for (int64_t i = 0; i < n; i += 16)
      _mm512_storeu_ps(factor + i, exp2_lanes(_mm512_loadu_ps(factor + i)));
    for (int64_t i = 0; i < n; ++i)
      _mm512_storeu_ps(totals + i * 16, _mm512_fmadd_ps(_mm512_loadu_ps(totals + i * 16), _mm512_set1_ps(factor[i]),
                                                        _mm512_loadu_ps(scores + i * kDenseKeys + kDenseKeys - 16)));
    const uint32_t *weights = (const uint32_t*)scores, *tile = values + from / 2 * width;
    int64_t d = 0;
    for (; d + 64 <= width; d += 64)
      multiply_rows<4>(n, weights, kDenseKeys, tile + d, width, whole / 2, factor, mix + d, width);
    if (d < width) multiply_rows<2>(n, weights, kDenseKeys, tile + d, width, whole / 2, factor, mix + d, width);
  }
  for (int64_t i = 0; i < n; ++i) {
    bf16* out = (bf16*)a.out + ((window * a.rows + begin + i) * a.num_heads + head) * a.dim;
    finish(motet::Type::bf16, a.dim, mix + i * width, 1.0f / sum_lanes((vf)_mm512_loadu_ps(totals + i * 16)), out);
  }
}

}  // namespace

#endif
