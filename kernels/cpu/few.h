// Attention of few queries over a cache whose rows of a head lie one behind the other in each block: what decoding does over
// a long context. The same numbers as pairs.h gives, without a pointer per row.
//
// The cache is met cold, and a step reads each of its bytes once. So memory never rests: while keys are multiplied the values
// of the same chunk are asked for, and while these are mixed, the keys of the next chunk.
#pragma once

#include "pairs.h"

#if defined(MOTET_PAIRS)

namespace {

constexpr int64_t kGroups = kChunk / 16;

// Asks for rows `first`, `first` + 1, .. of a group of 16: kCount of them.
template <class T, int S, int kCount>
inline void ask_rows(const T* group, int64_t first) {
  const char* from = (const char*)(group + first * S);
#pragma GCC unroll 8
  for (int64_t byte = 0; byte < kCount * S * (int64_t)sizeof(T); byte += 64) _mm_prefetch(from + byte, _MM_HINT_T0);
}

// scores[n][16] of N queries against a group of 16 rows; `spread` as score_rows takes it. Asks for another group meanwhile.
template <class P, int D, int N>
inline void score_group(const uint32_t* spread, const typename P::Stored* rows, const typename P::Stored* next,
                        const float* factor, float* scores) {
  typedef typename P::Stored T;
  typedef typename P::Sum Sum;
  constexpr int S = D + (P::scaled ? motet::kScaleBytes : 0);
  Sum sum[4][N];
#pragma GCC unroll 2
  for (int half = 0; half < 4; half += 2) {
    for (int n = 0; n < N; ++n) sum[half][n] = sum[half + 1][n] = P::zero();
#pragma GCC unroll 4
    for (int d = 0; d < D; d += 32) {
      __m512i k[2][4];
#pragma GCC unroll 2
      for (int g = 0; g < 2; ++g) {
        const T* row = rows + (half + g) * 4 * S + d;
        const __m512i x0 = P::load(row), x1 = P::load(row + S), x2 = P::load(row + 2 * S), x3 = P::load(row + 3 * S);
        const __m512i a0 = _mm512_unpacklo_epi32(x0, x1), a1 = _mm512_unpackhi_epi32(x0, x1);
        const __m512i a2 = _mm512_unpacklo_epi32(x2, x3), a3 = _mm512_unpackhi_epi32(x2, x3);
        k[g][0] = _mm512_unpacklo_epi64(a0, a2), k[g][1] = _mm512_unpackhi_epi64(a0, a2);
        k[g][2] = _mm512_unpacklo_epi64(a1, a3), k[g][3] = _mm512_unpackhi_epi64(a1, a3);
      }
      if (next) ask_rows<T, S, 8 * 32 / D>(next, half * 4 + d * 8 / D);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          const __m512i q = _mm512_loadu_si512(spread + n * D * 2 + d * 2 + j * 16);
          sum[half][n] = P::dot(sum[half][n], k[0][j], q);
          sum[half + 1][n] = P::dot(sum[half + 1][n], k[1][j], q);
        }
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    const __m512i s0 = (__m512i)sum[0][n], s1 = (__m512i)sum[1][n], s2 = (__m512i)sum[2][n], s3 = (__m512i)sum[3][n];
    const __m512i low01 = _mm512_shuffle_i32x4(s0, s1, 0x44), high01 = _mm512_shuffle_i32x4(s0, s1, 0xee);
    const __m512i low23 = _mm512_shuffle_i32x4(s2, s3, 0x44), high23 = _mm512_shuffle_i32x4(s2, s3, 0xee);
    const Sum part[4] = {(Sum)_mm512_shuffle_i32x4(low01, low23, 0x88), (Sum)_mm512_shuffle_i32x4(low01, low23, 0xdd),
                         (Sum)_mm512_shuffle_i32x4(high01, high23, 0x88),
                         (Sum)_mm512_shuffle_i32x4(high01, high23, 0xdd)};
    store(scores + n * kChunk, P::value(P::add(P::add(P::add(part[0], part[1]), part[2]), part[3])) * factor[n]);
  }
}

// mix[n][64 dims] of N queries from groups of 16 rows. Asks for the same rows of other groups meanwhile.
template <class P, int D, int N>
inline void mix_groups(const uint32_t* weights, const typename P::Stored* const* group, int64_t num_groups, int64_t d,
                       const typename P::Stored* const* next, int64_t num_next, const float* factor, float* mix) {
  typedef typename P::Stored T;
  constexpr int S = D + (P::scaled ? motet::kScaleBytes : 0);
  typename P::Sum acc[N][4];
  for (int n = 0; n < N; ++n)
    for (int c = 0; c < 4; ++c) acc[n][c] = P::zero();
  for (int64_t g = 0; g < num_groups; ++g) {
    const T* row = group[g] + d;
    const T* ask = g < num_next ? next[g] : nullptr;
    const uint32_t* word = weights + g * 8;
#pragma GCC unroll 2
    for (int t = 0; t < 16; t += 2, row += 2 * S) {
      if (ask) ask_rows<T, S, 2>(ask, t);
      __m512i v[4];
      interleave(P::load(row), P::load(row + S), &v[0], &v[1]);
      interleave(P::load(row + 32), P::load(row + S + 32), &v[2], &v[3]);
#pragma GCC unroll 3
      for (int n = 0; n < N; ++n) {
        const __m512i w = _mm512_set1_epi32((int32_t)word[n * kChunk + t / 2]);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) acc[n][c] = P::dot(acc[n][c], v[c], w);
      }
    }
  }
  for (int n = 0; n < N; ++n)
    for (int c = 0; c < 2; ++c)
      store_in_order(mix + n * D + d + 32 * c, P::value(acc[n][2 * c]) * factor[n],
                     P::value(acc[n][2 * c + 1]) * factor[n]);
}

template <class P, int D, int N>
inline void score_groups(const uint32_t* spread, const typename P::Stored* const* key,
                         const typename P::Stored* const* value, int64_t num_groups, const float* factor, float* scores) {
  for (int64_t g = 0; g < num_groups; ++g)
    score_group<P, D, N>(spread, key[g], value ? value[g] : nullptr, factor, scores + g * 16);
}

}  // namespace

#endif
