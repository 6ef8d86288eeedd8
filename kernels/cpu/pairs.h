// Products over pairs of 16-bit words, for queries in bf16: scores and mixes straight from the rows of a cache.
//
// A cache of bf16 is multiplied as it is. Of an int8 cache the rows widen to 16 bits, exactly; the query and the
// weights then become 16-bit integers with a factor of their own (an error of 2^-16 of the largest, far below the 2^-9
// of bf16), all sums are integers, and no order of adding changes them. Sums of bf16 keep one order: a score is four sums
// over the words that lie in the same quarter of their 16, added first to last; the mix adds pairs of kv indices in
// rising order. Only for CPUs with both instructions: the set avx512bf16.
#pragma once

#include "kernels.h"
#include "turn.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define MOTET_PAIRS 1

namespace {

using motet::kChunk;

struct Bf16Pairs {
  typedef bf16 Stored;
  typedef __m512 Sum;
  static constexpr bool scaled = false;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum dot(Sum s, __m512i a, __m512i b) { return _mm512_dpbf16_ps(s, (__m512bh)a, (__m512bh)b); }
  static Sum add(Sum a, Sum b) { return _mm512_add_ps(a, b); }
  static vf value(Sum s) { return (vf)s; }
  static __m512i load(const bf16* row) { return _mm512_loadu_si512(row); }  // 32 dims as 16 words
  static __m512i load_first(const bf16* row, int64_t n) {
    return _mm512_maskz_loadu_epi16(n >= 32 ? ~0u : (1u << n) - 1, row);
  }
  // The query's words; what pads them is 0. Returns the factor of a score.
  static float query(const bf16* from, int64_t dim, int64_t pairs, float scale, uint32_t* words) {
    memset(words, 0, pairs * 4);
    memcpy(words, from, dim * 2);
    return scale;
  }
  // Weights [count] in place into words [count / 2]. Returns the factor of the mix.
  static float weights(float* from, int64_t count, const float*) {
    for (int64_t t = 0; t < count; t += 16)
      _mm256_storeu_si256((__m256i*)(from + t / 2), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + t)));
    return 1.0f;
  }
};

struct Int8Pairs {
  typedef int8_t Stored;
  typedef __m512i Sum;
  static constexpr bool scaled = true;
  static Sum zero() { return _mm512_setzero_si512(); }
  static Sum dot(Sum s, __m512i a, __m512i b) { return _mm512_dpwssd_epi32(s, a, b); }
  static Sum add(Sum a, Sum b) { return _mm512_add_epi32(a, b); }
  static vf value(Sum s) { return (vf)_mm512_cvtepi32_ps(s); }
  static __m512i load(const int8_t* row) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)row)); }
  static __m512i load_first(const int8_t* row, int64_t n) {
    return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(n >= 32 ? ~0u : (1u << n) - 1, row));
  }
  static vf some_dims(const bf16* from, int64_t d, int64_t dim) {
    return d + 16 <= dim ? ::load(from + d) : ::load_first(from + d, dim - d);
  }
  static float query(const bf16* from, int64_t dim, int64_t pairs, float scale, uint32_t* words) {
    int16_t* to = (int16_t*)words;
    memset(words, 0, pairs * 4);
    __m512 largest = _mm512_setzero_ps();
    __mmask16 broken = 0;
    for (int64_t d = 0; d < dim; d += 16) {
      const __m512 a = _mm512_abs_ps((__m512)some_dims(from, d, dim));
      broken |= _mm512_cmp_ps_mask(a, _mm512_set1_ps(__FLT_MAX__), _CMP_NLE_UQ);
      largest = _mm512_max_ps(largest, a);
    }
    const float top = _mm512_reduce_max_ps(largest);
    if (broken) return __builtin_nanf("");
    if (top < 1e-30f) return 0.0f;
    const __m512 inverse = _mm512_set1_ps(32767.0f / top);
    for (int64_t d = 0; d < dim; d += 16)
      _mm256_storeu_si256((__m256i*)(to + d), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(
                                                  _mm512_mul_ps((__m512)some_dims(from, d, dim), inverse))));
    return top / 32767.0f * scale;
  }
  // The values' scales join the weights: a kv index that weighs nothing may have any scale, even NaN.
  static float weights(float* from, int64_t count, const float* scales) {
    __m512 top = _mm512_setzero_ps(), sum = _mm512_setzero_ps();
    for (int64_t t = 0; t < count; t += 16) {
      const __m512 w = _mm512_loadu_ps(from + t);
      const __mmask16 some = _mm512_cmp_ps_mask(w, _mm512_setzero_ps(), _CMP_NEQ_UQ);
      const __m512 x = _mm512_maskz_mul_ps(some, w, _mm512_loadu_ps(scales + t));
      _mm512_storeu_ps(from + t, x);
      top = _mm512_max_ps(top, x), sum = _mm512_add_ps(sum, x);
    }
    const float largest = _mm512_reduce_max_ps(top), probe = _mm512_reduce_add_ps(sum);
    if (!(probe <= __FLT_MAX__)) {  // NaN or inf
      memset(from, 0, count * 2);
      return __builtin_nanf("");
    }
    const float inverse = largest > 1e-30f ? 32767.0f / largest : 0.0f;
    for (int64_t t = 0; t < count; t += 16)
      _mm256_storeu_si256((__m256i*)(from + t / 2),
                          _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(
                              _mm512_mul_ps(_mm512_loadu_ps(from + t), _mm512_set1_ps(inverse)))));
    return largest / 32767.0f;
  }
};

template <class T>
struct Pairs;
template <>
struct Pairs<bf16> {
  typedef Bf16Pairs type;
};
template <>
struct Pairs<int8_t> {
  typedef Int8Pairs type;
};

template <class P>
inline __m512i load_dims(const typename P::Stored* row, int64_t d, int64_t dim) {
  return d + 32 <= dim ? P::load(row + d) : P::load_first(row + d, dim - d);
}

// words[pair][16] of 16 rows.
template <class P>
inline void turn_pairs(const typename P::Stored* const* row, int64_t dim, uint32_t* words) {
  for (int64_t d = 0; d < dim; d += 32, words += 256) {
    vu block[16];
    for (int i = 0; i < 16; ++i) block[i] = (vu)load_dims<P>(row[i], d, dim);
    transpose(block);
    for (int i = 0; i < 16; ++i) *(vu_any*)(words + i * 16) = block[i];
  }
}

// scores[n][16] of N queries against 16 turned keys.
template <class P, int N>
inline void score_turned(const uint32_t* q, int64_t pairs, const uint32_t* turned, const float* factor, float* scores) {
  typename P::Sum total[N];
#pragma GCC unroll 4
  for (int quarter = 0; quarter < 4; ++quarter) {
    typename P::Sum sum[N];
    for (int n = 0; n < N; ++n) sum[n] = P::zero();
    for (int64_t block = quarter * 4; block < pairs; block += 16)
#pragma GCC unroll 4
      for (int64_t p = block; p < block + 4; ++p) {
        const __m512i k = _mm512_loadu_si512(turned + p * 16);
        for (int n = 0; n < N; ++n) sum[n] = P::dot(sum[n], k, _mm512_set1_epi32((int32_t)q[n * pairs + p]));
      }
    for (int n = 0; n < N; ++n) total[n] = quarter ? P::add(total[n], sum[n]) : sum[n];
  }
  for (int n = 0; n < N; ++n) store(scores + n * kChunk, P::value(total[n]) * factor[n]);
}

// The same against 32 turned keys, the second 16 behind the first.
template <class P, int N>
inline void score_turned_twice(const uint32_t* q, int64_t pairs, const uint32_t* turned, const float* factor,
                               float* scores) {
  typename P::Sum total[2][N];
#pragma GCC unroll 4
  for (int quarter = 0; quarter < 4; ++quarter) {
    typename P::Sum sum[2][N];
    for (int n = 0; n < N; ++n) sum[0][n] = sum[1][n] = P::zero();
    for (int64_t block = quarter * 4; block < pairs; block += 16)
#pragma GCC unroll 4
      for (int64_t p = block; p < block + 4; ++p) {
        const __m512i k0 = _mm512_loadu_si512(turned + p * 16), k1 = _mm512_loadu_si512(turned + (pairs + p) * 16);
        for (int n = 0; n < N; ++n) {
          const __m512i words = _mm512_set1_epi32((int32_t)q[n * pairs + p]);
          sum[0][n] = P::dot(sum[0][n], k0, words), sum[1][n] = P::dot(sum[1][n], k1, words);
        }
      }
    for (int n = 0; n < N; ++n)
      for (int i = 0; i < 2; ++i) total[i][n] = quarter ? P::add(total[i][n], sum[i][n]) : sum[i][n];
  }
  for (int n = 0; n < N; ++n) {
    store(scores + n * kChunk, P::value(total[0][n]) * factor[n]);
    store(scores + n * kChunk + 16, P::value(total[1][n]) * factor[n]);
  }
}

// The same for few queries: only 4 x 4 squares of words are turned, so that a vector holds four words of each of four
// keys; `spread` [n][block][4][16] has the query's words in that order. Sixteen keys from `row`.
template <class P, int N>
inline void score_rows(const uint32_t* spread, const typename P::Stored* const* row, int64_t dim, int64_t pairs,
                       const float* factor, float* scores) {
  typename P::Sum sum[4][N];
#pragma GCC unroll 4
  for (int four = 0; four < 4; ++four) {
    for (int n = 0; n < N; ++n) sum[four][n] = P::zero();
    const uint32_t* q = spread;
    for (int64_t d = 0; d < dim; d += 32, q += 64) {
      const __m512i x0 = load_dims<P>(row[four * 4], d, dim), x1 = load_dims<P>(row[four * 4 + 1], d, dim);
      const __m512i x2 = load_dims<P>(row[four * 4 + 2], d, dim), x3 = load_dims<P>(row[four * 4 + 3], d, dim);
      const __m512i a0 = _mm512_unpacklo_epi32(x0, x1), a1 = _mm512_unpackhi_epi32(x0, x1);
      const __m512i a2 = _mm512_unpacklo_epi32(x2, x3), a3 = _mm512_unpackhi_epi32(x2, x3);
      const __m512i k[4] = {_mm512_unpacklo_epi64(a0, a2), _mm512_unpackhi_epi64(a0, a2),
                            _mm512_unpacklo_epi64(a1, a3), _mm512_unpackhi_epi64(a1, a3)};
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
        for (int n = 0; n < N; ++n)
          sum[four][n] = P::dot(sum[four][n], k[j], _mm512_loadu_si512(q + n * pairs * 4 + j * 16));
    }
  }
  for (int n = 0; n < N; ++n) {
    const __m512i s0 = (__m512i)sum[0][n], s1 = (__m512i)sum[1][n], s2 = (__m512i)sum[2][n], s3 = (__m512i)sum[3][n];
    const __m512i low01 = _mm512_shuffle_i32x4(s0, s1, 0x44), high01 = _mm512_shuffle_i32x4(s0, s1, 0xee);
    const __m512i low23 = _mm512_shuffle_i32x4(s2, s3, 0x44), high23 = _mm512_shuffle_i32x4(s2, s3, 0xee);
    typedef typename P::Sum Sum;
    const Sum part[4] = {(Sum)_mm512_shuffle_i32x4(low01, low23, 0x88), (Sum)_mm512_shuffle_i32x4(low01, low23, 0xdd),
                         (Sum)_mm512_shuffle_i32x4(high01, high23, 0x88),
                         (Sum)_mm512_shuffle_i32x4(high01, high23, 0xdd)};
    store(scores + n * kChunk, P::value(P::add(P::add(P::add(part[0], part[1]), part[2]), part[3])) * factor[n]);
  }
}

// Asks for the dims of 16 rows. A cache is met cold, in runs too short for the CPU's own prefetcher: without this, half of
// a step over a long context is spent waiting.
template <class T>
inline void prefetch_rows(const T* const* row, int64_t dim) {
  for (int i = 0; i < 16; ++i)
    for (int64_t byte = 0; byte < dim * (int64_t)sizeof(T); byte += 64)
      _mm_prefetch((const char*)row[i] + byte, _MM_HINT_T0);
}

constexpr int64_t kAhead = 64;  // keys that are asked for before they are needed
constexpr int64_t kFew = 8;  // queries up to which rows are not turned whole
constexpr int64_t kAskAgain = 96;  // queries up to which a chunk may not have come yet when it is laid out
constexpr int64_t kTogetherMany = 12;  // queries whose scores stay in the nearest cache beside keys and values

template <class P, int N>
inline void score_rows_all(const uint32_t* spread, const typename P::Stored* const* key,
                           const typename P::Stored* const* value, int64_t padded, int64_t dim, int64_t pairs,
                           const float* factor, float* scores) {
  if (value)
    for (int64_t t = 0; t < padded && t < kAhead; t += 16) prefetch_rows(key + t, dim);
  for (int64_t t = 0; t < padded; t += 16) {
    if (value) {
      if (t + kAhead < padded) prefetch_rows(key + t + kAhead, dim);
      prefetch_rows(value + t, dim);
    }
    score_rows<P, N>(spread, key + t, dim, pairs, factor, scores + t);
  }
}

// Rows of keys (values lie `part` beyond) that are asked for while others are multiplied: a few at a time, since a core waits
// for a few only. `few` rows go with 96 vectors of products, about.
template <class T>
struct Ahead {
  const T* row[kChunk];
  int64_t part, dim, done, count, few;
  void ask(int64_t times) {
    for (const int64_t end = done + times * few < count ? done + times * few : count; done < end; ++done)
      for (int64_t byte = 0; byte < dim * (int64_t)sizeof(T); byte += 64) {
        _mm_prefetch((const char*)row[done] + byte, _MM_HINT_T1);
        _mm_prefetch((const char*)(row[done] + part) + byte, _MM_HINT_T1);
      }
  }
};

// scores[n][kChunk] of all queries (words [n][pairs]) against `count` turned keys.
template <class P>
void score_many(const uint32_t* q, int64_t num_queries, const uint32_t* turned, int64_t count, int64_t pairs,
                const float* factor, Ahead<typename P::Stored>& next, float* scores) {
  int64_t t = 0;
  for (; t + 32 <= count; t += 32) {
    const uint32_t* keys = turned + t * pairs;
    int64_t n = 0;
    for (; n + 6 <= num_queries; n += 6) {
      next.ask(pairs / 8);
      score_turned_twice<P, 6>(q + n * pairs, pairs, keys, factor + n, scores + n * kChunk + t);
    }
    for (; n + 3 <= num_queries; n += 3) {
      next.ask(pairs / 16);
      score_turned_twice<P, 3>(q + n * pairs, pairs, keys, factor + n, scores + n * kChunk + t);
    }
    for (; n < num_queries; ++n)
      score_turned_twice<P, 1>(q + n * pairs, pairs, keys, factor + n, scores + n * kChunk + t);
  }
  for (; t < count; t += 16) {
    const uint32_t* keys = turned + t * pairs;
    int64_t n = 0;
    for (; n + 6 <= num_queries; n += 6)
      score_turned<P, 6>(q + n * pairs, pairs, keys, factor + n, scores + n * kChunk + t);
    for (; n < num_queries; ++n)
      score_turned<P, 1>(q + n * pairs, pairs, keys, factor + n, scores + n * kChunk + t);
  }
}

// Each word four times over, in the order that score_rows wants: words [count] -> [count / 16][4][16].
inline void spread_words(const uint32_t* q, int64_t count, uint32_t* to) {
  for (int64_t i = 0; i < count; i += 16) {
    const __m512i words = _mm512_loadu_si512(q + i);
    _mm512_storeu_si512(to + i * 4, _mm512_shuffle_epi32(words, (_MM_PERM_ENUM)0x00));
    _mm512_storeu_si512(to + i * 4 + 16, _mm512_shuffle_epi32(words, (_MM_PERM_ENUM)0x55));
    _mm512_storeu_si512(to + i * 4 + 32, _mm512_shuffle_epi32(words, (_MM_PERM_ENUM)0xaa));
    _mm512_storeu_si512(to + i * 4 + 48, _mm512_shuffle_epi32(words, (_MM_PERM_ENUM)0xff));
  }
}

// The same of kFew queries at most straight from the rows of `padded` keys; asks for the values, too. Scratch of
// 32 * pairs floats.
template <class P>
void score_pairs(const uint32_t* q, int64_t num_queries, const typename P::Stored* const* key,
                 const typename P::Stored* const* value, int64_t padded, int64_t dim, int64_t pairs,
                 const float* factor, uint32_t* scratch, float* scores) {
  spread_words(q, num_queries * pairs, scratch);
  for (int64_t n = 0; n < num_queries;) {
    const uint32_t* spread = scratch + n * pairs * 4;
    const float* f = factor + n;
    float* s = scores + n * kChunk;
    const auto ask = n == 0 ? value : nullptr;
    switch (num_queries - n) {
      case 1: score_rows_all<P, 1>(spread, key, ask, padded, dim, pairs, f, s), n += 1; break;
      case 2: score_rows_all<P, 2>(spread, key, ask, padded, dim, pairs, f, s), n += 2; break;
      case 3:
      case 5:
      case 6: score_rows_all<P, 3>(spread, key, ask, padded, dim, pairs, f, s), n += 3; break;
      default: score_rows_all<P, 4>(spread, key, ask, padded, dim, pairs, f, s), n += 4;
    }
  }
}

// Values of a pair of kv indices: 32 dims as words of (first, second), halves of each 128 bits apart.
inline void interleave(__m512i a, __m512i b, __m512i* low, __m512i* high) {
  *low = _mm512_unpacklo_epi16(a, b), *high = _mm512_unpackhi_epi16(a, b);
}

// Puts interleaved columns back in order: 32 dims.
inline void store_in_order(float* to, vf low, vf high) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  _mm512_storeu_ps(to, _mm512_permutex2var_ps((__m512)low, first, (__m512)high));
  _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps((__m512)low, second, (__m512)high));
}

// mix[n][32 C) = factor[n] * sum over pairs of weights[n][pair] . values, dims from d on; straight from the rows.
template <class P, int N, int C>
inline void mix_rows(const uint32_t* weights, const typename P::Stored* const* value, int64_t d, int64_t dim,
                     int64_t count, const float* factor, int64_t width, float* mix) {
  typename P::Sum acc[N][2 * C];
  for (int n = 0; n < N; ++n)
    for (int c = 0; c < 2 * C; ++c) acc[n][c] = P::zero();
  for (int64_t t = 0; t < count; t += 2) {
    __m512i v[2 * C];
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c)
      interleave(load_dims<P>(value[t], d + 32 * c, dim), load_dims<P>(value[t + 1], d + 32 * c, dim), &v[2 * c],
                 &v[2 * c + 1]);
    for (int n = 0; n < N; ++n) {
      const __m512i w = _mm512_set1_epi32((int32_t)weights[n * kChunk + t / 2]);
      for (int c = 0; c < 2 * C; ++c) acc[n][c] = P::dot(acc[n][c], v[c], w);
    }
  }
  for (int n = 0; n < N; ++n)
    for (int c = 0; c < C; ++c)
      store_in_order(mix + n * width + d + 32 * c, P::value(acc[n][2 * c]) * factor[n],
                     P::value(acc[n][2 * c + 1]) * factor[n]);
}

// The same from values laid out before: [pair][2 C * 16 words].
template <class P, int N, int C>
inline void mix_laid(const uint32_t* weights, const uint32_t* values, int64_t pairs, const float* factor,
                     int64_t width, Ahead<typename P::Stored>& next, float* mix) {
  typename P::Sum acc[N][2 * C];
  for (int n = 0; n < N; ++n)
    for (int c = 0; c < 2 * C; ++c) acc[n][c] = P::zero();
  for (int64_t p = 0; p < pairs; ++p, values += 32 * C) {
    if (p % 8 == 0) next.ask((N + 2) / 3);
    __m512i v[2 * C];
    for (int c = 0; c < 2 * C; ++c) v[c] = _mm512_loadu_si512(values + c * 16);
    for (int n = 0; n < N; ++n) {
      const __m512i w = _mm512_set1_epi32((int32_t)weights[n * kChunk + p]);
      for (int c = 0; c < 2 * C; ++c) acc[n][c] = P::dot(acc[n][c], v[c], w);
    }
  }
  for (int n = 0; n < N; ++n)
    for (int c = 0; c < C; ++c)
      store_in_order(mix + n * width + 32 * c, P::value(acc[n][2 * c]) * factor[n],
                     P::value(acc[n][2 * c + 1]) * factor[n]);
}

// 32 C dims of kFew queries at most.
template <class P, int C>
inline void mix_some(const uint32_t* weights, const typename P::Stored* const* value, int64_t num_queries, int64_t d,
                     int64_t dim, int64_t count, const float* factor, int64_t width, float* mix) {
  int64_t n = 0;
  for (; n + 3 <= num_queries; n += 3)
    mix_rows<P, 3, C>(weights + n * kChunk, value, d, dim, count, factor + n, width, mix + n * width);
  if (num_queries - n == 2)
    mix_rows<P, 2, C>(weights + n * kChunk, value, d, dim, count, factor + n, width, mix + n * width);
  else if (n < num_queries)
    mix_rows<P, 1, C>(weights + n * kChunk, value, d, dim, count, factor + n, width, mix + n * width);
}

// mix[n][width] of kFew queries at most; weights [n][kChunk] as words of pairs; an even `count` of rows.
template <class P>
void mix_pairs(const uint32_t* weights, const typename P::Stored* const* value, int64_t num_queries, int64_t dim,
               int64_t count, const float* factor, int64_t width, float* mix) {
  int64_t d = 0;
  for (; d + 32 < width; d += 64) mix_some<P, 2>(weights, value, num_queries, d, dim, count, factor, width, mix);
  if (d < width) mix_some<P, 1>(weights, value, num_queries, d, dim, count, factor, width, mix);
}

// Lays out `count` values (even): for every 64 dims (the last may be 32) [count / 2][their words].
template <class P>
void lay_values(const typename P::Stored* const* value, int64_t dim, int64_t count, int64_t width, uint32_t* words) {
  for (int64_t d = 0; d < width; d += 64) {
    const int64_t dims = width - d < 64 ? 32 : 64;
    for (int64_t t = 0; t < count; t += 2)
      for (int64_t c = d; c < d + dims; c += 32, words += 32) {
        __m512i low, high;
        interleave(load_dims<P>(value[t], c, dim), load_dims<P>(value[t + 1], c, dim), &low, &high);
        _mm512_storeu_si512(words, low);
        _mm512_storeu_si512(words + 16, high);
      }
  }
}

template <class P, int C>
inline void mix_laid_all(const uint32_t* weights, const uint32_t* values, int64_t num_queries, int64_t pairs,
                         const float* factor, int64_t width, Ahead<typename P::Stored>& next, float* mix) {
  int64_t n = 0;
  for (; n + 6 <= num_queries; n += 6)
    mix_laid<P, 6, C>(weights + n * kChunk, values, pairs, factor + n, width, next, mix + n * width);
  for (; n + 3 <= num_queries; n += 3)
    mix_laid<P, 3, C>(weights + n * kChunk, values, pairs, factor + n, width, next, mix + n * width);
  for (; n < num_queries; ++n)
    mix_laid<P, 1, C>(weights + n * kChunk, values, pairs, factor + n, width, next, mix + n * width);
}

// mix[n][width] of all queries from the first `count` of `laid` values.
template <class P>
void mix_many(const uint32_t* weights, const uint32_t* values, int64_t num_queries, int64_t laid, int64_t count,
              const float* factor, int64_t width, Ahead<typename P::Stored>& next, float* mix) {
  int64_t d = 0;
  for (; d + 64 <= width; d += 64, values += laid / 2 * 64)
    mix_laid_all<P, 2>(weights, values, num_queries, count / 2, factor, width, next, mix + d);
  if (d < width) mix_laid_all<P, 1>(weights, values, num_queries, count / 2, factor, width, next, mix + d);
}

}  // namespace

#endif
