// Products of attention on fp32 lanes: scores of a few queries against keys that were turned around, and mixes of values.
//
// A tile is kTile kv indices, or kTile dims of values: two vectors. Each number of a query has its one order of sums,
// however many queries share what is loaded: a score is the sum over even dims plus the sum over odd dims, both rising;
// a mix adds kv indices in rising order.
#pragma once

#include "kernels.h"
#include "turn.h"
#include "vector.h"

namespace {

using motet::kChunk;

constexpr int64_t kTile = 2 * W;

// A row times a factor in fp32; what pads it to `width` is 0.
template <class T>
inline void widen_row(const T* from, int64_t dim, float factor, int64_t width, float* to) {
  int64_t d = 0;
  for (; d + W <= dim; d += W) store(to + d, load(from + d) * factor);
  for (; d < dim; ++d) to[d] = widen(from[d]) * factor;
  for (; d < width; ++d) to[d] = 0.0f;
}

// Asks for a row of a cache that is needed soon.
template <class T>
inline void ask_row(const T* row, int64_t dim) {
  for (int64_t byte = 0; byte < dim * (int64_t)sizeof(T); byte += 64) __builtin_prefetch((const char*)row + byte);
}

// kTile dims of a row of values as two vectors, of bf16 the even and the odd ones; put_tile knows it.
template <class T>
inline void get_tile(const T* row, vf& a, vf& b) {
  a = load(row), b = load(row + W);
}
inline void get_tile(const bf16* row, vf& a, vf& b) {
  const vu pairs = *(const vu_any*)row;
  a = (vf)(pairs << 16), b = (vf)(pairs & 0xffff0000u);
}
template <class T>
inline void put_tile(const T*, float* to, vf a, vf b) {
  store(to, a), store(to + W, b);
}
inline void put_tile(const bf16*, float* to, vf a, vf b) { AllLanes::interleave(a, b, to); }

// scores[n][kTile] of N queries against a tile of turned keys, [2 * pairs][kTile].
template <int N>
inline void score_tile(const float* q, int64_t width, const float* turned, int64_t pairs, float* scores) {
  if constexpr (N <= 3 || MOTET_W == 16) {  // even and odd sums at once fill the registers, or hide their latency
    vf even[N][2], odd[N][2];
    for (int n = 0; n < N; ++n) even[n][0] = even[n][1] = odd[n][0] = odd[n][1] = vf{};
    for (int64_t d = 0; d < pairs; ++d) {
      const float* k = turned + 2 * d * kTile;
      for (int n = 0; n < N; ++n) {
        const vf x = splat(q[n * width + 2 * d]), y = splat(q[n * width + 2 * d + 1]);
        even[n][0] += x * load(k), even[n][1] += x * load(k + W);
        odd[n][0] += y * load(k + kTile), odd[n][1] += y * load(k + kTile + W);
      }
    }
    for (int n = 0; n < N; ++n)
      for (int i = 0; i < 2; ++i) store(scores + n * kChunk + i * W, even[n][i] + odd[n][i]);
  } else {
    for (int half = 0; half < 2; ++half) {
      vf sum[N][2];
      for (int n = 0; n < N; ++n) sum[n][0] = sum[n][1] = vf{};
      const float *k = turned + half * kTile, *x = q + half;
      for (int64_t d = 0; d < pairs; ++d, k += 2 * kTile, x += 2) {
        const vf k0 = load(k), k1 = load(k + W);
        for (int n = 0; n < N; ++n) {
          const vf y = splat(x[n * width]);
          sum[n][0] += y * k0, sum[n][1] += y * k1;
        }
      }
      for (int n = 0; n < N; ++n)
        for (int i = 0; i < 2; ++i) {
          float* to = scores + n * kChunk + i * W;
          store(to, half ? load(to) + sum[n][i] : sum[n][i]);
        }
    }
  }
}

// How many of `rest` queries are taken together: sixes, which load least for each product, and no single one behind them.
inline int64_t together(int64_t rest) {
  if (rest > 8 || rest == 6) return 6;
  if (rest > 6 || rest == 4) return 4;
  return rest > 3 ? 3 : rest;
}

inline void score_tiles(const float* q, int64_t num_queries, int64_t width, const float* turned, int64_t pairs,
                        float* scores) {
  for (int64_t n = 0; n < num_queries;) {
    const int64_t some = together(num_queries - n);
    const float* x = q + n * width;
    float* to = scores + n * kChunk;
    switch (some) {
      case 1: score_tile<1>(x, width, turned, pairs, to); break;
      case 2: score_tile<2>(x, width, turned, pairs, to); break;
      case 3: score_tile<3>(x, width, turned, pairs, to); break;
      case 4: score_tile<4>(x, width, turned, pairs, to); break;
      default: score_tile<6>(x, width, turned, pairs, to);
    }
    n += some;
  }
}

// Dim j of the 4 / sizeof(T) that share each lane's word, as turn_words gives them.
inline vf word_dim(const float*, vu word, int) { return (vf)word; }
inline vf word_dim(const bf16*, vu word, int j) { return (vf)(j ? word & 0xffff0000u : word << 16); }
inline vf word_dim(const int8_t*, vu word, int j) {
  return __builtin_convertvector((vi)(word << (24 - 8 * j)) >> 24, vf);
}

// Dims that score_rows takes at a time.
template <class T>
constexpr int64_t kStep = W * 4 / (int64_t)sizeof(T);

// The same scores as score_tile's of W rows that are turned on the way, not through memory. dim is a multiple of kStep.
template <int N, class T>
inline void score_rows(const float* q, int64_t width, const T* const* row, int64_t dim, float* scores) {
  constexpr int kDims = 4 / (int)sizeof(T);
  vf sum[N][2];
  for (int n = 0; n < N; ++n) sum[n][0] = sum[n][1] = vf{};
  for (int64_t d = 0; d < dim; d += kStep<T>) {
    vu block[W];
    turn_words(row, d, block);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kDims; ++j) {
        const int at = i * kDims + j;
        const vf k = word_dim(row[0], block[i], j);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sum[n][at % 2] += splat(q[n * width + d + at]) * k;
      }
  }
  for (int n = 0; n < N; ++n) store(scores + n * kChunk, sum[n][0] + sum[n][1]);
}

template <class T>
inline void score_few(const float* q, int64_t num_queries, int64_t width, const T* const* row, int64_t dim, float* scores) {
  for (int64_t n = 0; n < num_queries;) {
    const int64_t rest = num_queries - n, some = rest == 5 || rest == 6 ? 3 : rest < 4 ? rest : 4;
    const float* x = q + n * width;
    float* to = scores + n * kChunk;
    switch (some) {
      case 1: score_rows<1>(x, width, row, dim, to); break;
      case 2: score_rows<2>(x, width, row, dim, to); break;
      case 3: score_rows<3>(x, width, row, dim, to); break;
      default: score_rows<4>(x, width, row, dim, to);
    }
    n += some;
  }
}

// Where values come from: rows of a cache from some dim on, or one tile of dims that was laid out, [t][kTile].
template <class T>
struct RowTiles {
  const T* const* row;
  int64_t column;
  inline void get(int64_t t, int c, vf& a, vf& b) const { get_tile(row[t] + column + c * kTile, a, b); }
};
struct LaidTile {
  const float* at;
  inline void get(int64_t t, int, vf& a, vf& b) const { a = load(at + t * kTile), b = load(at + t * kTile + W); }
};

// The same place, of which the compiler doesn't know that it is the same: a broadcast that is loaded again costs less than
// sums that are spilled to keep it.
inline const float* anew(const float* at) {
  __asm__ volatile("" : "+r"(at));
  return at;
}

// mix[n][C kTile] = sum over t of weights[n][t] * value[t]. Asks for rows ask[t] meanwhile, or for none.
template <int N, int C, class T, class From>
inline void mix_tiles(const float* weights, const From& from, int64_t count, const T* const* ask, int64_t num_ask,
                      int64_t dim, int64_t width, float* mix) {
  vf acc[N][C][2];
  for (int n = 0; n < N; ++n)
    for (int c = 0; c < C; ++c) acc[n][c][0] = acc[n][c][1] = vf{};
  for (int64_t t = 0; t < count; ++t) {
    if (t < num_ask) ask_row(ask[t], dim);
    for (int c = 0; c < C; ++c) {
      vf a, b;
      from.get(t, c, a, b);
      const float* weight = N * C * 2 < 12 ? weights + t : anew(weights + t);
      for (int n = 0; n < N; ++n) {
        const vf w = splat(weight[n * kChunk]);
        acc[n][c][0] += w * a, acc[n][c][1] += w * b;
      }
    }
  }
  for (int n = 0; n < N; ++n)
    for (int c = 0; c < C; ++c) put_tile((const T*)nullptr, mix + n * width + c * kTile, acc[n][c][0], acc[n][c][1]);
}

// One tile of dims of all queries from values that were laid out.
template <class T>
inline void mix_laid(const float* weights, const float* laid, int64_t num_queries, int64_t count, int64_t width, float* mix) {
  const LaidTile from{laid};
  const T* const* none = nullptr;
  for (int64_t n = 0; n < num_queries;) {
    const int64_t some = together(num_queries - n);
    const float* w = weights + n * kChunk;
    float* to = mix + n * width;
    switch (some) {
      case 1: mix_tiles<1, 1>(w, from, count, none, 0, 0, width, to); break;
      case 2: mix_tiles<2, 1>(w, from, count, none, 0, 0, width, to); break;
      case 3: mix_tiles<3, 1>(w, from, count, none, 0, 0, width, to); break;
      case 4: mix_tiles<4, 1>(w, from, count, none, 0, 0, width, to); break;
      default: mix_tiles<6, 1>(w, from, count, none, 0, 0, width, to);
    }
    n += some;
  }
}

// C tiles of dims of a few queries, straight from the rows.
template <int C, class T>
inline void mix_rows(const float* weights, const T* const* value, int64_t column, int64_t num_queries, int64_t count,
                     const T* const* ask, int64_t num_ask, int64_t dim, int64_t width, float* mix) {
  for (int64_t n = 0; n < num_queries; num_ask = 0) {
    const int64_t some = C == 1 ? together(num_queries - n) : num_queries - n < 3 ? num_queries - n : 3;
    const float* w = weights + n * kChunk;
    float* to = mix + n * width + column;
    const RowTiles<T> from{value, column};
    switch (some) {
      case 1: mix_tiles<1, C>(w, from, count, ask, num_ask, dim, width, to); break;
      case 2: mix_tiles<2, C>(w, from, count, ask, num_ask, dim, width, to); break;
      case 3: mix_tiles<3, C>(w, from, count, ask, num_ask, dim, width, to); break;
      case 4: if constexpr (C == 1) mix_tiles<4, 1>(w, from, count, ask, num_ask, dim, width, to); break;
      default: if constexpr (C == 1) mix_tiles<6, 1>(w, from, count, ask, num_ask, dim, width, to);
    }
    n += some;
  }
}

// Lays out kTile dims from `column` on of `count` rows; what pads dim is 0.
template <class T>
inline void lay_tile(const T* const* value, int64_t column, int64_t dim, int64_t count, float* laid) {
  T rest[kTile];
  memset((void*)rest, 0, sizeof rest);
  for (int64_t t = 0; t < count; ++t, laid += kTile) {
    const T* row = value[t] + column;
    if (dim - column < kTile) memcpy((void*)rest, (const void*)row, (dim - column) * sizeof(T)), row = rest;
    vf a, b;
    get_tile(row, a, b);
    store(laid, a), store(laid + W, b);
  }
}

}  // namespace
