// Paged attention of a few rows over one chunk of the cache, straight from the blocks.
//
// Every number of a row is computed in an order that depends on the row alone: scores and mixes as tiles.h or pairs.h
// say; the softmax runs over fixed chunks of kChunk kv indices. So a row's result is the same alone, in a batch, in a
// prefill chunk of any size, and on any number of threads.
#pragma once

#include "few.h"
#include "kernels.h"
#include "pairs.h"
#include "tiles.h"
#include "turn.h"
#include "vector.h"

namespace {

using motet::Attention;
using motet::AttentionPart;
using motet::kChunk;

constexpr int64_t kSome = 12;      // queries whose scores stay in the nearest cache; up to so many, values are not laid out
constexpr int64_t kFewTurned = 8;  // queries up to which turned keys never lie in memory

// seen[t] = all ones where the row sees kv index base + t. Returns true if it sees every one of count.
inline bool visible(const Attention& a, int64_t seq, int64_t row, int64_t base, int64_t count, int32_t* seen) {
  int64_t high = a.num_visible[row] - base;
  int64_t low = a.window > 0 ? a.position[row] - a.window + 1 - base : 0;
  if (low <= 0 && high >= count) return true;
  const int32_t first = low < 0 ? 0 : low > count ? count : low, end = high < 0 ? 0 : high > count ? count : high;
  for (int32_t t = 0; t < count; ++t) seen[t] = -(int32_t)((t >= first) & (t < end));
  for (int64_t word = 0; a.ancestors && word < a.ancestor_words; ++word) {
    uint64_t bits = (uint64_t)a.ancestors[row * a.ancestor_words + word];
    for (; bits; bits &= bits - 1) {
      int64_t t = a.tree_starts[seq] + word * 64 + __builtin_ctzll(bits) - base;
      if (t >= 0 && t < count) seen[t] = -1;
    }
  }
  return false;
}

// exp of x <= 0 with about 2 ulp error, exactly 1 at 0 and 0 far below (so at -inf). NaN stays NaN.
inline vf weight_lanes(vf x) {
#if defined(__AVX512F__)
  const __m512 low = _mm512_max_ps(_mm512_set1_ps(-110.0f), (__m512)x);  // gives x where that is NaN
  const __m512 turns = _mm512_roundscale_ps(_mm512_mul_ps(low, _mm512_set1_ps(1.44269504088896341f)),
                                            _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(turns, _mm512_set1_ps(0.693359375f), low);
  r = _mm512_fnmadd_ps(turns, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(1.3981999507e-3f), r, _mm512_set1_ps(8.3334519073e-3f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(4.1665795894e-2f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.6666665459e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.0000001201e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
  return (vf)_mm512_scalef_ps(y, turns);
#elif defined(__AVX2__)
  const __m256 magic = _mm256_set1_ps(12582912.0f), least = _mm256_set1_ps(-87.0f);  // 1.5 * 2^23 rounds to integers
  const __m256 low = _mm256_max_ps(least, (__m256)x);  // gives x where that is NaN
  const __m256 shifted = _mm256_fmadd_ps(low, _mm256_set1_ps(1.44269504088896341f), magic);
  const __m256 turns = _mm256_sub_ps(shifted, magic);
  __m256 r = _mm256_fnmadd_ps(turns, _mm256_set1_ps(0.693359375f), low);
  r = _mm256_fnmadd_ps(turns, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 y = _mm256_fmadd_ps(_mm256_set1_ps(8.2903061e-3f), r, _mm256_set1_ps(4.1897975e-2f));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.6667636e-1f));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(4.9999149e-1f));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(9.9999971e-1f));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f));
  const __m256i power = _mm256_add_epi32(_mm256_slli_epi32((__m256i)shifted, 23), _mm256_set1_epi32(0x3f800000));
  return (vf)_mm256_and_ps(_mm256_mul_ps(y, (__m256)power), _mm256_cmp_ps((__m256)x, least, _CMP_NLT_UQ));
#else
  return pick((vi)(x != x), x, exp_lanes(x));
#endif
}

#if defined(__AVX512F__)
// 2^x for x <= 0 with relative error 1e-4, far below what rounding to bf16 adds; exactly 0 below -149. NaN stays NaN.
inline __m512 exp2_lanes(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x);
  const __m512 turns = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, turns);
  __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(5.500874e-2f), r, _mm512_set1_ps(2.4221113e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.9328297e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, turns);
}

// The same numbers as sum_lanes and max_lanes, without a way through memory.
inline float sum_of(vf x) { return _mm512_reduce_add_ps((__m512)x); }
inline float max_of(vf x) { return _mm512_reduce_max_ps((__m512)x); }
#elif defined(__AVX2__)
inline float sum_of(vf x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_of(vf x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
inline float sum_of(vf x) { return sum_lanes(x); }
inline float max_of(vf x) { return max_lanes(x); }
#endif

// The weights of 16 scores less a shift, stored as fp32, or (kHalves) as bf16 in the first half of the row of scores.
template <bool kHalves>
inline vf weigh(float* row, int64_t t, vf shift) {
  const vf x = load(row + t) - shift;
#if defined(MOTET_PAIRS)
  if constexpr (kHalves) {
    const __m512 weight = exp2_lanes((__m512)(x * 1.44269504088896341f));
    _mm256_storeu_si256((__m256i*)(row + t / 2), (__m256i)_mm512_cvtneps_pbh(weight));
    return (vf)weight;
  }
#endif
  const vf weight = weight_lanes(x);
  store(row + t, weight);
  return weight;
}

// Scores [n][kChunk] become weights, 0 where a row does not see. `scales` [padded] multiply the scores, or null. any[t] =
// all ones where a query sees kv index lo + t; null where nobody asks.
template <bool kHalves>
inline void soften(const Attention& a, const AttentionPart& part, int64_t padded, const float* scales, int32_t* seen,
                   int32_t* any, float* scores, float* top, float* sum) {
  const int64_t group = a.num_heads / a.num_kv_heads, count = part.hi - part.lo;
  const int64_t num_queries = (part.row_end - part.row_begin) * group;
  const bool plain = !scales && a.soft_cap <= 0 && count == padded;
  bool every = false;
  if (any) memset(any, 0, padded * sizeof(int32_t));
  for (int64_t n = 0; n < num_queries; ++n) {
    float* s = scores + n * kChunk;
    if (n % group == 0) {
      every = visible(a, part.seq, part.row_begin + n / group, part.lo, count, seen);
      if (every && (any || !plain))
        for (int64_t t = 0; t < count; ++t) seen[t] = -1;
      for (int64_t t = count; t < padded; ++t) seen[t] = 0;
      if (any)
        for (int64_t t = 0; t < padded; ++t) any[t] |= seen[t];
    }
    vf best = splat(-__builtin_inff());
    if (every && plain) {
      vf other = best;  // two, since each waits for the one before
      for (int64_t t = 0; t + W < padded; t += 2 * W) {
        best = larger(load(s + t), best);
        other = larger(load(s + t + W), other);
      }
      if (padded % (2 * W)) best = larger(load(s + padded - W), best);
      best = larger(other, best);
    } else {
      for (int64_t t = 0; t < padded; t += W) {
        vf x = load(s + t);
        if (scales) x *= load(scales + t);
        if (a.soft_cap > 0) x = tanh_lanes(x / a.soft_cap) * a.soft_cap;
        vi mask = *(const vi __attribute__((aligned(4), may_alias))*)(seen + t);
        x = pick(mask, x, splat(-__builtin_inff()));
        store(s + t, x);
        best = larger(x, best);
      }
    }
    top[n] = max_of(best);
  }
  for (int64_t n = 0; n < num_queries; ++n) {
    float* s = scores + n * kChunk;
    // A row that sees nothing here has top -inf; any finite shift gives weights of 0.
    const vf shift = splat(top[n] == -__builtin_inff() ? 0.0f : top[n]);
    vf total = vf{};
    for (int64_t t = 0; t < padded; t += W) total += weigh<kHalves>(s, t, shift);
    sum[n] = sum_of(total);
  }
}

// The scales of an int8 cache's rows; of other caches nothing.
inline void load_scales(const int8_t* const* row, int64_t dim, int64_t count, float* scales) {
  for (int64_t t = 0; t < count; ++t) memcpy(scales + t, row[t] + dim, 4);
}
template <class T>
inline void load_scales(const T* const*, int64_t, int64_t, float*) {}

// The same of groups of 16 rows, S elements apart.
template <int64_t S>
inline void load_scales_of(const int8_t* const* group, int64_t dim, int64_t num_groups, float* scales) {
  for (int64_t g = 0; g < num_groups; ++g)
    for (int64_t t = 0; t < 16; ++t) memcpy(scales + g * 16 + t, group[g] + t * S + dim, 4);
}
template <int64_t S, class T>
inline void load_scales_of(const T* const*, int64_t, int64_t, float*) {}

struct Parts {  // of scratch, in floats; W-aligned where the widths are
  float *q, *scores, *turned, *values, *zeros, *factors, *key_scales, *value_scales;
  int32_t *seen, *any;
  Parts(float* scratch, int64_t num_queries, int64_t width) {
    scores = scratch;                            // [n, kChunk]
    q = scores + num_queries * kChunk;           // [n, width]
    turned = q + num_queries * width;            // tiles [kChunk / kTile, width, kTile], or pairs [kChunk / 16, width / 2, 16]
    zeros = turned + kChunk * width;             // [width]: a row of any type
    values = zeros + 16 * width;                 // tiles [width / kTile, kChunk, kTile], or pairs [kChunk / 2, width]
    key_scales = values + kChunk * width;        // [kChunk]
    value_scales = key_scales + kChunk;
    seen = (int32_t*)(value_scales + kChunk);
    any = seen + kChunk;
    factors = (float*)(any + kChunk);  // [n]
  }
};

// Where the rows of kv indices begin..end (kChunk at most) of one head of a sequence lie.
template <class T>
inline void locate(const Attention& a, int64_t seq, int64_t kv_head, int64_t begin, int64_t end, const T** row) {
  const int32_t* blocks = a.tables + seq * a.table_stride;
  const T* head = (const T*)a.kv + kv_head * a.kv_head;
  for (int64_t index = begin; index < end;) {
    int64_t token = index % a.block_size;
    const T* at = head + blocks[index / a.block_size] * a.kv_block + token * a.kv_token;
    for (; index < end && token < a.block_size; ++index, ++token, at += a.kv_token) *row++ = at;
  }
}

#if defined(MOTET_PAIRS)
// More than kFew queries: keys and values are laid out once, then a few rows at a time go from scores to their mix while
// these are in the nearest cache. Meanwhile the next chunk is asked for.
template <class P>
void attend_many(const Attention& a, const AttentionPart& part, const Parts& at, const typename P::Stored* const* key,
                 const typename P::Stored** value, int64_t padded, float* top, float* sum, float* mix) {
  typedef typename P::Stored T;
  const int64_t width = motet::padded_dim(a.dim), pairs = width / 2, group = a.num_heads / a.num_kv_heads;
  const int64_t count = part.hi - part.lo;
  uint32_t *turned = (uint32_t*)at.turned, *values = (uint32_t*)at.values, *q = (uint32_t*)at.q;
  // Beside many queries, what was asked for during the chunk before has long come.
  const int64_t ask = (part.row_end - part.row_begin) * group <= kAskAgain ? padded : 0;
  for (int64_t t = 0; t < ask && t < kAhead; t += 16) prefetch_rows(key + t, a.dim);
  for (int64_t t = 0; t < padded; t += 16) {
    if (t + kAhead < ask) prefetch_rows(key + t + kAhead, a.dim);
    if (t < ask) prefetch_rows(value + t, a.dim);
    turn_pairs<P>(key + t, a.dim, turned + t * pairs);
  }
  load_scales(key, a.dim, padded, at.key_scales);

  bool every = false;  // some row sees all
  memset(at.any, 0, padded * sizeof(int32_t));
  for (int64_t row = part.row_end - 1; row >= part.row_begin && !every; --row) {
    every = visible(a, part.seq, row, part.lo, count, at.seen);
    for (int64_t t = 0; t < count && !every; ++t) at.any[t] |= at.seen[t];
  }
  for (int64_t t = 0; t < count && !every; ++t)
    if (!at.any[t]) value[t] = (const T*)at.zeros;  // 0 * NaN would leak
  load_scales(value, a.dim, padded, at.value_scales);
  lay_values<P>(value, a.dim, padded, width, values);

  Ahead<T> next;
  next.part = a.kv_part, next.dim = a.dim, next.done = next.count = 0;
  const int64_t num_next = part.next_hi - part.next_lo;
  if (num_next) locate(a, part.next_seq, part.next_head, part.next_lo, part.next_hi, next.row);
  const int64_t some_rows = group < kTogetherMany ? kTogetherMany / group : 1;
  const int64_t rows = part.row_end - part.row_begin;
  next.few = num_next * 768 / (rows * group * padded * pairs) + 1;
  for (int64_t begin = 0; begin < rows; begin += some_rows) {
    const int64_t end = begin + some_rows < rows ? begin + some_rows : rows, n = (end - begin) * group;
    next.count = num_next * end / rows;
    AttentionPart here = part;
    here.row_begin = part.row_begin + begin, here.row_end = part.row_begin + end;
    if (!a.ancestors) {  // later kv indices weigh 0 and change nothing
      int64_t high = part.lo;
      for (int64_t row = here.row_begin; row < here.row_end; ++row)
        high = a.num_visible[row] > high ? a.num_visible[row] : high;
      here.hi = high < part.hi ? high : part.hi;
    }
    const int64_t whole = (here.hi - part.lo + 15) / 16 * 16;
    uint32_t* words = q;
    for (int64_t i = 0; i < n; ++i)
      at.factors[i] = P::query(
          (const bf16*)a.q + (here.row_begin + i / group) * a.q_row + (part.kv_head * group + i % group) * a.q_head,
          a.dim, pairs, a.scale, words + i * pairs);
    score_many<P>(words, n, turned, whole, pairs, at.factors, next, at.scores);
    const int64_t first = begin * group;
    soften<!P::scaled>(a, here, whole, P::scaled ? at.key_scales : nullptr, at.seen, nullptr, at.scores, top + first,
                       sum + first);
    for (int64_t i = 0; i < n; ++i)
      at.factors[i] = P::scaled ? P::weights(at.scores + i * kChunk, whole, at.value_scales) : 1.0f;
    mix_many<P>((const uint32_t*)at.scores, values, n, padded, whole, at.factors, width, next, mix + first * width);
  }
}
#endif

#if defined(MOTET_PAIRS)
// Where groups of 16 rows of kv indices begin..end (kChunk at most, begin a multiple of 16) of one head start.
template <class T>
inline void locate_groups(const Attention& a, int64_t seq, int64_t kv_head, int64_t begin, int64_t end, const T** group) {
  const int32_t* blocks = a.tables + seq * a.table_stride;
  const T* head = (const T*)a.kv + kv_head * a.kv_head;
  int64_t block = begin / a.block_size, token = begin % a.block_size;
  for (int64_t index = begin; index < end; index += 16) {
    *group++ = head + blocks[block] * a.kv_block + token * a.kv_token;
    if ((token += 16) == a.block_size) token = 0, ++block;
  }
}

// Whether attend_few can do it: whole groups in each block, row behind row, and every query sees everything.
template <class P, int D>
inline bool is_few(const Attention& a, const AttentionPart& part, int32_t* seen) {
  if (a.dim != D || a.kv_token != D + (P::scaled ? motet::kScaleBytes : 0) || a.block_size % 16 || part.lo % 16)
    return false;
  for (int64_t row = part.row_begin; row < part.row_end; ++row)
    if (!visible(a, part.seq, row, part.lo, part.hi - part.lo, seen)) return false;
  return true;
}

// kFew queries at most that see all of their chunk.
template <class P, int D>
void attend_few(const Attention& a, const AttentionPart& part, const Parts& at, float* top, float* sum, float* mix) {
  typedef typename P::Stored T;
  constexpr int64_t S = D + (P::scaled ? motet::kScaleBytes : 0), pairs = D / 2;
  const int64_t group = a.num_heads / a.num_kv_heads, num_queries = (part.row_end - part.row_begin) * group;
  const int64_t count = part.hi - part.lo, num_groups = (count + 15) / 16, padded = num_groups * 16;
  const T *key[kGroups], *value[kGroups], *next[kGroups];
  locate_groups(a, part.seq, part.kv_head, part.lo, part.hi, key);
  for (int64_t g = 0; g < num_groups; ++g) value[g] = key[g] + a.kv_part;
  if (const int64_t rest = count % 16) {  // nobody sees what lies behind these rows
    T *last_keys = (T*)at.values, *last_values = (T*)(at.values + 16 * D);
    memset((void*)last_keys, 0, 16 * S * sizeof(T)), memset((void*)last_values, 0, 16 * S * sizeof(T));
    memcpy((void*)last_keys, (const void*)key[num_groups - 1], rest * S * sizeof(T));
    memcpy((void*)last_values, (const void*)value[num_groups - 1], rest * S * sizeof(T));
    key[num_groups - 1] = last_keys, value[num_groups - 1] = last_values;
  }
  const int64_t num_next = (part.next_hi - part.next_lo + 15) / 16;
  if (num_next) locate_groups(a, part.next_seq, part.next_head, part.next_lo, part.next_hi, next);

  uint32_t *q = (uint32_t*)at.q, *spread = (uint32_t*)at.turned;
  float* scores = at.scores;
  for (int64_t n = 0; n < num_queries; ++n)
    at.factors[n] = P::query(
        (const bf16*)a.q + (part.row_begin + n / group) * a.q_row + (part.kv_head * group + n % group) * a.q_head, D,
        pairs, a.scale, q + n * pairs);
  spread_words(q, num_queries * pairs, spread);
  for (int64_t n = 0; n < num_queries;) {
    const uint32_t* words = spread + n * pairs * 4;
    const auto ask = n == 0 ? value : nullptr;
    float *f = at.factors + n, *s = scores + n * kChunk;
    switch (num_queries - n) {
      case 1: score_groups<P, D, 1>(words, key, ask, num_groups, f, s), n += 1; break;
      case 2: score_groups<P, D, 2>(words, key, ask, num_groups, f, s), n += 2; break;
      case 3:
      case 5:
      case 6: score_groups<P, D, 3>(words, key, ask, num_groups, f, s), n += 3; break;
      default: score_groups<P, D, 4>(words, key, ask, num_groups, f, s), n += 4;
    }
  }
  load_scales_of<S>(key, D, num_groups, at.key_scales);
  soften<!P::scaled>(a, part, padded, P::scaled ? at.key_scales : nullptr, at.seen, nullptr, scores, top, sum);
  load_scales_of<S>(value, D, num_groups, at.value_scales);
  for (int64_t n = 0; n < num_queries; ++n)
    at.factors[n] = P::scaled ? P::weights(scores + n * kChunk, padded, at.value_scales) : 1.0f;
  for (int64_t d = 0; d < D; d += 64)
    for (int64_t n = 0; n < num_queries;) {
      const uint32_t* words = (const uint32_t*)scores + n * kChunk;
      const int64_t ask = n == 0 && d == 0 ? num_next : 0;
      float *f = at.factors + n, *m = mix + n * D;
      switch (num_queries - n) {
        case 1: mix_groups<P, D, 1>(words, value, num_groups, d, next, ask, f, m), n += 1; break;
        case 2: mix_groups<P, D, 2>(words, value, num_groups, d, next, ask, f, m), n += 2; break;
        default: mix_groups<P, D, 3>(words, value, num_groups, d, next, ask, f, m), n += 3;
      }
    }
}
#endif

// Keys are turned and values laid out once for many queries; then a few rows at a time go from scores to their mix, while
// these are in the nearest cache. Few queries use a tile of keys as soon as it is turned, and values as they lie.
// What comes next is asked for meanwhile: the values during the scores, the next chunk's keys during the mix.
template <class T>
void attend_tiles(const Attention& a, const AttentionPart& part, const Parts& at, const T* const* key, const T** value,
                  float* top, float* sum, float* mix) {
  constexpr bool scaled = sizeof(T) == 1;
  const int64_t width = motet::padded_dim(a.dim), group = a.num_heads / a.num_kv_heads, pairs = (a.dim + 1) / 2;
  const int64_t rows = part.row_end - part.row_begin, count = part.hi - part.lo;
  const int64_t padded = (count + kTile - 1) / kTile * kTile;
  const int64_t some_rows = group < kSome ? kSome / group : 1;
  const bool once = rows <= some_rows, direct = rows * group <= kSome;
  const bool few = rows * group <= kFewTurned && a.dim % kStep<T> == 0;
  float *q = at.q, *scores = at.scores;
  const auto ask_values = [&](int64_t t) {
    for (int64_t i = t; i < t + kTile && i < count; ++i) ask_row(value[i], a.dim);
  };
  const auto turn_tile = [&](int64_t t, float* turned) {
    ask_values(t);
    for (int64_t i = 0; i < kTile; i += W) turn(key + t + i, a.dim, kTile, turned + i);
    if (a.dim % 2) memset(turned + a.dim * kTile, 0, kTile * sizeof(float));
  };

  bool every = false;  // some row sees all
  memset(at.any, 0, padded * sizeof(int32_t));
  for (int64_t row = part.row_end - 1; row >= part.row_begin && !every; --row) {
    every = visible(a, part.seq, row, part.lo, count, at.seen);
    for (int64_t t = 0; t < count && !every; ++t) at.any[t] |= at.seen[t];
  }
  load_scales(key, a.dim, padded, at.key_scales);
  load_scales(value, a.dim, padded, at.value_scales);
  for (int64_t t = 0; t < count && !every; ++t)
    if (!at.any[t]) value[t] = (const T*)at.zeros;  // 0 * NaN would leak
  if (!once)
    for (int64_t t = 0; t < padded; t += kTile) turn_tile(t, at.turned + t * width);
  if (!direct)
    for (int64_t d = 0; d < a.dim; d += kTile) lay_tile(value, d, a.dim, count, at.values + d * kChunk);

  const T* next[kChunk];
  const int64_t num_next = direct ? part.next_hi - part.next_lo : 0;
  if (num_next) locate(a, part.next_seq, part.next_head, part.next_lo, part.next_hi, next);
  for (int64_t begin = 0; begin < rows; begin += some_rows) {
    const int64_t end = begin + some_rows < rows ? begin + some_rows : rows, n = (end - begin) * group;
    AttentionPart here = part;
    here.row_begin = part.row_begin + begin, here.row_end = part.row_begin + end;
    if (!a.ancestors) {  // later kv indices weigh 0 and change nothing
      int64_t high = part.lo;
      for (int64_t row = here.row_begin; row < here.row_end; ++row)
        high = a.num_visible[row] > high ? a.num_visible[row] : high;
      here.hi = high < part.hi ? high : part.hi;
    }
    const int64_t some = here.hi - part.lo, whole = (some + kTile - 1) / kTile * kTile;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t offset = (here.row_begin + i / group) * a.q_row + (part.kv_head * group + i % group) * a.q_head;
      if (a.q_type == motet::Type::bf16)
        widen_row((const bf16*)a.q + offset, a.dim, a.scale, width, q + i * width);
      else
        widen_row((const float*)a.q + offset, a.dim, a.scale, width, q + i * width);
    }
    for (int64_t t = 0; few && t < whole; t += kTile) {
      ask_values(t);
      for (int64_t i = t; i < t + kTile; i += W) score_few(q, n, width, key + i, a.dim, scores + i);
    }
    for (int64_t t = 0; !few && t < whole; t += kTile) {
      float* turned = once ? at.turned : at.turned + t * width;
      if (once) turn_tile(t, turned);
      score_tiles(q, n, width, turned, pairs, scores + t);
    }
    soften<false>(a, here, whole, scaled ? at.key_scales : nullptr, at.seen, nullptr, scores, top + begin * group,
                  sum + begin * group);
    for (int64_t i = 0; scaled && i < n; ++i)
      for (int64_t t = 0; t < whole; t += W) {  // a scale that nobody sees may be NaN
        float* weight = scores + i * kChunk + t;
        const vf w = load(weight);
        store(weight, pick((vi)(w == vf{}), w, w * load(at.value_scales + t)));
      }
    float* to = mix + begin * group * width;
    for (int64_t d = 0; d < width;) {
      const int64_t ask = d == 0 ? num_next : 0;
      if (direct && d + 4 * kTile <= a.dim && n == 1) {
        mix_rows<4>(scores, value, d, n, some, next, ask, a.dim, width, to), d += 4 * kTile;
      } else if (direct && d + 2 * kTile <= a.dim && n <= 3) {
        mix_rows<2>(scores, value, d, n, some, next, ask, a.dim, width, to), d += 2 * kTile;
      } else if (direct && d + kTile <= a.dim) {
        mix_rows<1>(scores, value, d, n, some, next, ask, a.dim, width, to), d += kTile;
      } else {
        if (direct && d < a.dim) lay_tile(value, d, a.dim, some, at.values + d * kChunk);
        if (d < a.dim) mix_laid<T>(scores, at.values + d * kChunk, n, some, width, to + d);
        for (int64_t i = 0; i < n && d >= a.dim; ++i) memset(to + i * width + d, 0, kTile * sizeof(float));
        d += kTile;
      }
    }
  }
}

template <class T>
void attend_typed(const Attention& a, const AttentionPart& part, float* scratch, float* top, float* sum, float* mix) {
  const int64_t width = motet::padded_dim(a.dim), group = a.num_heads / a.num_kv_heads;
  const int64_t num_queries = (part.row_end - part.row_begin) * group, count = part.hi - part.lo;
  const Parts at(scratch, num_queries, width);

#if defined(MOTET_PAIRS)
  if constexpr (sizeof(T) < 4)
    if (a.q_type == motet::Type::bf16 && num_queries <= kFew) {
      typedef typename Pairs<T>::type P;
      if (is_few<P, 64>(a, part, at.seen)) return attend_few<P, 64>(a, part, at, top, sum, mix);
      if (is_few<P, 128>(a, part, at.seen)) return attend_few<P, 128>(a, part, at, top, sum, mix);
    }
#endif
  memset(at.zeros, 0, width * sizeof(float));

  const T* key[kChunk];
  const T* value[kChunk];
  const T* nothing = (const T*)at.zeros;
  locate(a, part.seq, part.kv_head, part.lo, part.hi, key);
  for (int64_t t = 0; t < count; ++t) value[t] = key[t] + a.kv_part;
  for (int64_t t = count; t < (count + kTile - 1) / kTile * kTile; ++t) key[t] = value[t] = nothing;

#if defined(MOTET_PAIRS)
  if constexpr (sizeof(T) < 4)
    if (a.q_type == motet::Type::bf16) {
      typedef typename Pairs<T>::type P;
      constexpr bool scaled = sizeof(T) == 1;
      const int64_t padded = (count + W - 1) / W * W;
      float *q = at.q, *scores = at.scores, *turned = at.turned;
      if (num_queries > kFew) {
        attend_many<P>(a, part, at, key, value, padded, top, sum, mix);
        return;
      }
      for (int64_t n = 0; n < num_queries; ++n)
        at.factors[n] = P::query(
            (const bf16*)a.q + (part.row_begin + n / group) * a.q_row + (part.kv_head * group + n % group) * a.q_head,
            a.dim, width / 2, a.scale, (uint32_t*)q + n * width / 2);
      score_pairs<P>((const uint32_t*)q, num_queries, key, value, padded, a.dim, width / 2, at.factors, (uint32_t*)turned,
                     scores);
      load_scales(key, a.dim, padded, at.key_scales);
      soften<!scaled>(a, part, padded, scaled ? at.key_scales : nullptr, at.seen, at.any, scores, top, sum);
      for (int64_t t = 0; t < count; ++t)
        if (!at.any[t]) value[t] = nothing;  // 0 * NaN would leak
      load_scales(value, a.dim, padded, at.value_scales);
      for (int64_t n = 0; n < num_queries; ++n)
        at.factors[n] = scaled ? P::weights(scores + n * kChunk, padded, at.value_scales) : 1.0f;
      mix_pairs<P>((const uint32_t*)scores, value, num_queries, a.dim, padded, at.factors, width, mix);
      return;
    }
#endif

  attend_tiles(a, part, at, key, value, top, sum, mix);
}

void attend(const Attention& a, const AttentionPart& part, float* scratch, float* top, float* sum, float* mix) {
  if (a.kv_type == motet::Type::bf16)
    attend_typed<bf16>(a, part, scratch, top, sum, mix);
  else if (a.kv_type == motet::Type::int8)
    attend_typed<int8_t>(a, part, scratch, top, sum, mix);
  else
    attend_typed<float>(a, part, scratch, top, sum, mix);
}

void merge(int64_t n, int64_t width, float* top, float* sum, float* mix, const float* top2, const float* sum2,
           const float* mix2) {
  for (int64_t first = 0; first < n; first += W) {
    const int64_t some = n - first < W ? n - first : W;
    float best[W], old[W], add[W];
    for (int64_t i = 0; i < W; ++i) {
      const int64_t at = first + (i < some ? i : 0);
      best[i] = top[at] > top2[at] ? top[at] : top2[at];
      old[i] = top[at] - best[i], add[i] = top2[at] - best[i];
    }
    store(old, exp_lanes(load(old))), store(add, exp_lanes(load(add)));
    for (int64_t j = 0; j < some; ++j) {
      const int64_t i = first + j;
      if (sum2[i] == 0.0f) continue;
      const float a = sum[i] == 0.0f ? 0.0f : old[j], b = add[j];
      for (int64_t d = 0; d < width; d += W)
        store(mix + i * width + d, load(mix + i * width + d) * a + load(mix2 + i * width + d) * b);
      sum[i] = sum[i] * a + sum2[i] * b;
      top[i] = best[j];
    }
  }
}

template <class T>
void finish_typed(int64_t dim, const float* mix, float scale, T* out) {
  int64_t d = 0;
  for (; d + W <= dim; d += W) store(out + d, load(mix + d) * scale);
  for (; d < dim; ++d) narrow(out + d, mix[d] * scale);
}
void finish(motet::Type type, int64_t dim, const float* mix, float scale, void* out) {
  type == motet::Type::bf16 ? finish_typed(dim, mix, scale, (bf16*)out) : finish_typed(dim, mix, scale, (float*)out);
}

}  // namespace
