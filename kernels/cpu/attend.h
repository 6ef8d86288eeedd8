// Paged attention of a few rows over one chunk of the cache, straight from the blocks.
//
// Every number of a row is computed in an order that depends on the row alone: a score is the sum over even dims plus
// the sum over odd dims; the softmax runs over fixed chunks of kChunk kv indices; the mix adds kv indices in rising
// order. So a row's result is the same alone, in a batch, in a prefill chunk of any size, and on any number of threads.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace {

using motet::Attention;
using motet::AttentionPart;
using motet::kChunk;

// One step of a W x W transpose of 32-bit words: swaps the off-diagonal squares of side S.
template <int... I>
struct Lanes {
  template <int S>
  static inline void swap(vu& a, vu& b) {
    vu low = __builtin_shufflevector(a, b, ((I & S) ? W + I - S : I)...);
    b = __builtin_shufflevector(a, b, ((I & S) ? W + I : I + S)...);
    a = low;
  }
};
#if MOTET_W == 16
typedef Lanes<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15> AllLanes;
#elif MOTET_W == 8
typedef Lanes<0, 1, 2, 3, 4, 5, 6, 7> AllLanes;
#else
typedef Lanes<0, 1, 2, 3> AllLanes;
#endif

template <int S>
inline void transpose_step(vu* rows) {
  for (int i = 0; i < W; ++i)
    if (!(i & S)) AllLanes::swap<S>(rows[i], rows[i + S]);
}
#if MOTET_W == 16
// Within 128-bit parts by unpacking, which is cheaper than general shuffles, then whole parts.
inline void transpose(vu* rows) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {  // b[i + c]: word c of each part, of rows i..i+3
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
  for (int c = 0; c < 4; ++c) {
    __m512i even01 = _mm512_shuffle_i32x4(b[c], b[c + 4], 0x88), odd01 = _mm512_shuffle_i32x4(b[c], b[c + 4], 0xdd);
    __m512i even23 = _mm512_shuffle_i32x4(b[c + 8], b[c + 12], 0x88),
            odd23 = _mm512_shuffle_i32x4(b[c + 8], b[c + 12], 0xdd);
    rows[c] = (vu)_mm512_shuffle_i32x4(even01, even23, 0x88);
    rows[c + 4] = (vu)_mm512_shuffle_i32x4(odd01, odd23, 0x88);
    rows[c + 8] = (vu)_mm512_shuffle_i32x4(even01, even23, 0xdd);
    rows[c + 12] = (vu)_mm512_shuffle_i32x4(odd01, odd23, 0xdd);
  }
}
#else
inline void transpose(vu* rows) {
  transpose_step<1>(rows);
  transpose_step<2>(rows);
#if MOTET_W == 8
  transpose_step<4>(rows);
#endif
}
#endif

// turned[d][lane] = row of lane, dim d, as fp32; W rows.
inline void turn(const float* const* row, int64_t dim, float* turned) {
  int64_t d = 0;
  for (; d + W <= dim; d += W) {
    vu block[W];
    for (int i = 0; i < W; ++i) block[i] = *(const vu_any*)(row[i] + d);
    transpose(block);
    for (int i = 0; i < W; ++i) store(turned + (d + i) * W, (vf)block[i]);
  }
  for (; d < dim; ++d)
    for (int i = 0; i < W; ++i) turned[d * W + i] = row[i][d];
}
inline void turn(const bf16* const* row, int64_t dim, float* turned) {
  int64_t d = 0;
  for (; d + 2 * W <= dim; d += 2 * W) {  // pairs of bf16 travel as one 32-bit word
    vu block[W];
    for (int i = 0; i < W; ++i) block[i] = *(const vu_any*)(row[i] + d);
    transpose(block);
    for (int i = 0; i < W; ++i) {
      store(turned + (d + 2 * i) * W, (vf)(block[i] << 16));
      store(turned + (d + 2 * i + 1) * W, (vf)(block[i] & 0xffff0000u));
    }
  }
  for (; d < dim; ++d)
    for (int i = 0; i < W; ++i) turned[d * W + i] = widen(row[i][d]);
}

// scores[n][W] of N queries against W turned keys; pairs = padded dims / 2 (pad dims are 0 in q and in turned).
template <int N>
inline void score(const float* q, int64_t width, const float* turned, int64_t pairs, float* scores) {
  vf even[N], odd[N];
  for (int n = 0; n < N; ++n) even[n] = odd[n] = vf{};
  for (int64_t d = 0; d < pairs; ++d) {
    vf k0 = load(turned + 2 * d * W), k1 = load(turned + (2 * d + 1) * W);
    for (int n = 0; n < N; ++n) {
      even[n] += splat(q[n * width + 2 * d]) * k0;
      odd[n] += splat(q[n * width + 2 * d + 1]) * k1;
    }
  }
  for (int n = 0; n < N; ++n) store(scores + n * kChunk, even[n] + odd[n]);
}

#if defined(__AVX512BF16__)
#define MOTET_BF16_DOT 1
// The same for bf16 queries and keys as pairs of dims, multiplied exactly and summed in fp32 by the CPU's own
// instruction.
inline void turn_pairs(const bf16* const* row, int64_t dim, uint32_t* turned) {
  int64_t d = 0;
  for (; d + 2 * W <= dim; d += 2 * W) {
    vu block[W];
    for (int i = 0; i < W; ++i) block[i] = *(const vu_any*)(row[i] + d);
    transpose(block);
    for (int i = 0; i < W; ++i) *(vu_any*)(turned + (d / 2 + i) * W) = block[i];
  }
  for (; d < dim; d += 2)
    for (int i = 0; i < W; ++i)
      turned[d / 2 * W + i] = row[i][d].bits | (d + 1 < dim ? (uint32_t)row[i][d + 1].bits << 16 : 0);
}

template <int N>
inline void score_pairs(const uint32_t* q, int64_t pairs, const uint32_t* turned, float scale, float* scores) {
  __m512 even[N], odd[N];
  for (int n = 0; n < N; ++n) even[n] = odd[n] = _mm512_setzero_ps();
  for (int64_t d = 0; d < pairs; d += 2) {
    __m512i k0 = _mm512_loadu_si512(turned + d * W), k1 = _mm512_loadu_si512(turned + (d + 1) * W);
    for (int n = 0; n < N; ++n) {
      even[n] = _mm512_dpbf16_ps(even[n], (__m512bh)k0, (__m512bh)_mm512_set1_epi32(q[n * pairs + d]));
      odd[n] = _mm512_dpbf16_ps(odd[n], (__m512bh)k1, (__m512bh)_mm512_set1_epi32(q[n * pairs + d + 1]));
    }
  }
  for (int n = 0; n < N; ++n) store(scores + n * kChunk, ((vf)even[n] + (vf)odd[n]) * scale);
}

inline void score_all_pairs(const uint32_t* q, int64_t num_queries, int64_t pairs, const uint32_t* turned, float scale,
                            float* scores) {
  int64_t n = 0;
  for (; n + 6 <= num_queries; n += 6) score_pairs<6>(q + n * pairs, pairs, turned, scale, scores + n * kChunk);
  for (; n + 3 <= num_queries; n += 3) score_pairs<3>(q + n * pairs, pairs, turned, scale, scores + n * kChunk);
  for (; n < num_queries; ++n) score_pairs<1>(q + n * pairs, pairs, turned, scale, scores + n * kChunk);
}

inline bool score_bf16(const Attention& a, const AttentionPart& part, const bf16* const* key, int64_t padded,
                       int64_t width, float* scratch, float* turned, float* scores) {
  if (a.q_type != motet::Type::bf16) return false;
  const int64_t group = a.num_heads / a.num_kv_heads, num_queries = (part.row_end - part.row_begin) * group,
                pairs = width / 2;
  uint32_t *q = (uint32_t*)scratch, *pair = (uint32_t*)turned;
  for (int64_t n = 0; n < num_queries; ++n) {
    const bf16* from =
        (const bf16*)a.q + (part.row_begin + n / group) * a.q_row + (part.kv_head * group + n % group) * a.q_head;
    memset(q + n * pairs, 0, pairs * 4);
    memcpy(q + n * pairs, from, a.dim * 2);
  }
  for (int64_t t = 0; t < padded; t += W) {
    turn_pairs(key + t, a.dim, pair);
    score_all_pairs(q, num_queries, pairs, pair, a.scale, scores + t);
  }
  return true;
}
inline bool score_bf16(const Attention&, const AttentionPart&, const float* const*, int64_t, int64_t, float*, float*,
                       float*) {
  return false;
}
#endif

// mix[n][0..4W) += sum over t of weights[n][t] * value[t]. Where `gaps`, values that no query weighs are not touched.
template <int N, int C, class T>
inline void mix_columns(const float* weights, const T* const* value, int64_t column, int64_t count, bool gaps,
                        int64_t width, float* mix) {
  vf acc[N][C];
  for (int n = 0; n < N; ++n)
    for (int c = 0; c < C; ++c) acc[n][c] = load(mix + n * width + column + c * W);
  for (int64_t t = 0; t < count; ++t) {
    if (gaps) {
      bool any = false;
      for (int n = 0; n < N; ++n) any |= weights[n * kChunk + t] != 0.0f;
      if (!any) continue;
    }
    vf v[C];
    for (int c = 0; c < C; ++c) v[c] = load(value[t] + column + c * W);
    for (int n = 0; n < N; ++n) {
      vf w = splat(weights[n * kChunk + t]);
      for (int c = 0; c < C; ++c) acc[n][c] += w * v[c];
    }
  }
  for (int n = 0; n < N; ++n)
    for (int c = 0; c < C; ++c) store(mix + n * width + column + c * W, acc[n][c]);
}

template <int N, class T>
inline void mix_some(const float* weights, const T* const* value, int64_t count, bool gaps, int64_t width, float* mix) {
  int64_t column = 0;
  for (; column + 4 * W <= width; column += 4 * W) mix_columns<N, 4>(weights, value, column, count, gaps, width, mix);
  for (; column < width; column += W) mix_columns<N, 1>(weights, value, column, count, gaps, width, mix);
}

constexpr int kTogether = MOTET_W == 16 ? 6 : 3;  // queries whose sums fit the registers (32, else 16)

template <class T>
void mix_all(const float* weights, const T* const* value, int64_t num_queries, int64_t count, bool gaps, int64_t width,
             float* mix) {
  int64_t n = 0;
  for (; n + kTogether <= num_queries; n += kTogether)
    mix_some<kTogether>(weights + n * kChunk, value, count, gaps, width, mix + n * width);
  for (; n + 3 <= num_queries; n += 3) mix_some<3>(weights + n * kChunk, value, count, gaps, width, mix + n * width);
  for (; n < num_queries; ++n) mix_some<1>(weights + n * kChunk, value, count, gaps, width, mix + n * width);
}

inline void score_all(const float* q, int64_t num_queries, int64_t width, const float* turned, int64_t pairs,
                      float* scores) {
  int64_t n = 0;
  for (; n + kTogether <= num_queries; n += kTogether)
    score<kTogether>(q + n * width, width, turned, pairs, scores + n * kChunk);
  for (; n + 3 <= num_queries; n += 3) score<3>(q + n * width, width, turned, pairs, scores + n * kChunk);
  for (; n < num_queries; ++n) score<1>(q + n * width, width, turned, pairs, scores + n * kChunk);
}

template <class T>
inline void widen_row(const T* from, int64_t dim, float factor, int64_t width, float* to) {
  int64_t d = 0;
  for (; d + W <= dim; d += W) store(to + d, load(from + d) * factor);
  for (; d < dim; ++d) to[d] = widen(from[d]) * factor;
  for (; d < width; ++d) to[d] = 0.0f;
}

// seen[t] = all ones where the row sees kv index base + t. Returns true if it sees every one of count.
inline bool visible(const Attention& a, int64_t seq, int64_t row, int64_t base, int64_t count, int32_t* seen) {
  int64_t high = a.num_visible[row] - base;
  int64_t low = a.window > 0 ? a.position[row] - a.window + 1 - base : 0;
  if (low <= 0 && high >= count) return true;
  for (int64_t t = 0; t < count; ++t) seen[t] = -(int32_t)((t >= low) & (t < high));
  for (int64_t word = 0; a.ancestors && word < a.ancestor_words; ++word) {
    uint64_t bits = (uint64_t)a.ancestors[row * a.ancestor_words + word];
    for (; bits; bits &= bits - 1) {
      int64_t t = a.tree_starts[seq] + word * 64 + __builtin_ctzll(bits) - base;
      if (t >= 0 && t < count) seen[t] = -1;
    }
  }
  return false;
}

template <class T>
void attend_typed(const Attention& a, const AttentionPart& part, float* scratch, float* top, float* sum, float* mix) {
  const int64_t width = motet::padded_dim(a.dim), group = a.num_heads / a.num_kv_heads;
  const int64_t num_queries = (part.row_end - part.row_begin) * group, count = part.hi - part.lo;
  const int64_t padded = (count + W - 1) / W * W;
  float* q = scratch;
  float* scores = q + num_queries * width;        // [n, kChunk]
  float* turned = scores + num_queries * kChunk;  // [width, W]
  float* values = turned + 16 * width;            // [64, width]
  float* zeros = values + 64 * width;             // [width]
  int32_t* seen = (int32_t*)(zeros + width);      // [kChunk]

  memset(zeros, 0, width * sizeof(float));
  memset(turned, 0, 16 * width * sizeof(float));

  const T* key[kChunk];
  const T* value[kChunk];
  const int32_t* blocks = a.tables + part.seq * a.table_stride;
  const T* head = (const T*)a.kv + part.kv_head * a.kv_head;
  for (int64_t t = 0, index = part.lo; t < count;) {
    int64_t token = index % a.block_size;
    const T* row = head + blocks[index / a.block_size] * a.kv_block + token * a.kv_token;
    for (; t < count && token < a.block_size; ++t, ++index, ++token, row += a.kv_token) {
      key[t] = row;
      value[t] = row + a.kv_part;
    }
  }
  for (int64_t t = count; t < padded; ++t) key[t] = (const T*)zeros;

#if defined(MOTET_BF16_DOT)
  const bool scored = score_bf16(a, part, key, padded, width, q, turned, scores);
#else
  const bool scored = false;
#endif
  if (!scored) {
    for (int64_t n = 0; n < num_queries; ++n) {
      int64_t offset = (part.row_begin + n / group) * a.q_row + (part.kv_head * group + n % group) * a.q_head;
      if (a.q_type == motet::Type::bf16)
        widen_row((const bf16*)a.q + offset, a.dim, a.scale, width, q + n * width);
      else
        widen_row((const float*)a.q + offset, a.dim, a.scale, width, q + n * width);
    }
    for (int64_t t = 0; t < padded; t += W) {
      turn(key + t, a.dim, turned);
      score_all(q, num_queries, width, turned, width / 2, scores + t);
    }
  }

  bool gaps = false;
  for (int64_t n = 0; n < num_queries; ++n) {
    float* s = scores + n * kChunk;
    if (a.soft_cap > 0)
      for (int64_t t = 0; t < padded; t += W) store(s + t, tanh_lanes(load(s + t) / a.soft_cap) * a.soft_cap);
    if (n % group == 0) {
      bool all = visible(a, part.seq, part.row_begin + n / group, part.lo, count, seen);
      if (all)
        for (int64_t t = 0; t < count; ++t) seen[t] = -1;
      for (int64_t t = count; t < padded; ++t) seen[t] = 0;
      gaps |= !all;
    }
    vf best = splat(-__builtin_inff());
    for (int64_t t = 0; t < padded; t += W) {
      vi mask = *(const vi __attribute__((aligned(4), may_alias))*)(seen + t);
      vf x = pick(mask, load(s + t), splat(-__builtin_inff()));
      store(s + t, x);
      best = larger(x, best);
    }
    top[n] = max_lanes(best);
    // A row that sees nothing here has top -inf; any finite shift gives weights of 0.
    vf shift = splat(top[n] == -__builtin_inff() ? 0.0f : top[n]);
    vf total = vf{};
    for (int64_t t = 0; t < padded; t += W) {
      vf weight = exp_lanes(load(s + t) - shift);
      store(s + t, weight);
      total += weight;
    }
    sum[n] = sum_lanes(total);
  }

  memset(mix, 0, num_queries * width * sizeof(float));
  const bool direct = a.dim == width && (sizeof(T) == 4 || num_queries <= kTogether);
  if (direct) {
    mix_all(scores, value, num_queries, count, gaps, width, mix);
    return;
  }
  for (int64_t t = 0; t < count; t += 64) {  // widened once for all queries
    int64_t some = count - t < 64 ? count - t : 64;
    const float* wide[64];
    for (int64_t i = 0; i < some; ++i) {
      widen_row(value[t + i], a.dim, 1.0f, width, values + i * width);
      wide[i] = values + i * width;
    }
    mix_all(scores + t, wide, num_queries, some, gaps, width, mix);
  }
}

void attend(const Attention& a, const AttentionPart& part, float* scratch, float* top, float* sum, float* mix) {
  if (a.kv_type == motet::Type::bf16)
    attend_typed<bf16>(a, part, scratch, top, sum, mix);
  else
    attend_typed<float>(a, part, scratch, top, sum, mix);
}

void merge(int64_t n, int64_t width, float* top, float* sum, float* mix, const float* top2, const float* sum2,
           const float* mix2) {
  for (int64_t i = 0; i < n; ++i) {
    if (sum2[i] == 0.0f) continue;
    float best = top[i] > top2[i] ? top[i] : top2[i];
    float a = exp_lanes(splat(top[i] - best))[0], b = exp_lanes(splat(top2[i] - best))[0];
    if (sum[i] == 0.0f) a = 0.0f;
    for (int64_t d = 0; d < width; d += W)
      store(mix + i * width + d, load(mix + i * width + d) * a + load(mix2 + i * width + d) * b);
    sum[i] = sum[i] * a + sum2[i] * b;
    top[i] = best;
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
