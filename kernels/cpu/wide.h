// Attention in fp32 lanes whatever the cache holds: what CPUs without bf16 dot products do, and fp32 caches everywhere.
//
// A score is the sum over rising dims, a mix the sum over rising kv indices, each one chain of fused steps: the same numbers
// however many queries and keys go side by side.
#pragma once

#include "kernels.h"
#include "turn.h"
#include "vector.h"

namespace {

using motet::kChunk;

constexpr int64_t kFewWide = 5;        // queries up to which keys and values are used as they come
constexpr int64_t kTogetherWide = 12;  // queries whose scores stay in the nearest cache beside some keys
constexpr int64_t kAheadWide = 64;     // rows that are asked for before they are needed

// Both take turns through the larger of their two sides, so that sums, the smaller side and one vector fill 16 registers.

// scores[n][V W] of N queries against V times W turned keys, `stride` floats apart.
template <int N, int V>
inline void score(const float* q, int64_t width, const float* turned, int64_t stride, int64_t dim, float* scores) {
  vf sum[N][V];
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < V; ++v) sum[n][v] = vf{};
  for (int64_t d = 0; d < dim; ++d, turned += W) {
    if constexpr (N < V) {
      vf w[N];
      for (int n = 0; n < N; ++n) w[n] = splat(q[n * width + d]);
      for (int v = 0; v < V; ++v) {
        const vf k = load(turned + v * stride);
        for (int n = 0; n < N; ++n) sum[n][v] += w[n] * k;
      }
    } else {
      vf k[V];
      for (int v = 0; v < V; ++v) k[v] = load(turned + v * stride);
      for (int n = 0; n < N; ++n) {
        const vf w = splat(q[n * width + d]);
        for (int v = 0; v < V; ++v) sum[n][v] += w * k[v];
      }
    }
  }
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < V; ++v) store(scores + n * kChunk + v * W, sum[n][v]);
}

template <int V>
inline void score_all(const float* q, int64_t num_queries, int64_t width, const float* turned, int64_t dim, float* scores) {
  int64_t n = 0;
  if constexpr (V <= 2)
    for (; n + 6 <= num_queries; n += 6) score<6, V>(q + n * width, width, turned, W * width, dim, scores + n * kChunk);
  for (; n + 3 <= num_queries; n += 3) score<3, V>(q + n * width, width, turned, W * width, dim, scores + n * kChunk);
  for (; n < num_queries; ++n) score<1, V>(q + n * width, width, turned, W * width, dim, scores + n * kChunk);
}

// scores[n][count] of all queries; `count` keys, a multiple of W, turned W by W: [count / W][width][W].
inline void score_keys(const float* q, int64_t num_queries, int64_t width, const float* turned, int64_t count, int64_t dim,
                       float* scores) {
  int64_t t = 0;
  if (num_queries <= kFewWide)  // else these sums would wait for each other
    for (; t + 4 * W <= count; t += 4 * W) score_all<4>(q, num_queries, width, turned + t * width, dim, scores + t);
  for (; t + 2 * W <= count; t += 2 * W) score_all<2>(q, num_queries, width, turned + t * width, dim, scores + t);
  for (; t < count; t += W) score_all<1>(q, num_queries, width, turned + t * width, dim, scores + t);
}

// mix[n][0..C W) += sum over t of weights[n][t] * value[t].
template <int N, int C, class T>
inline void mix_columns(const float* weights, const T* const* value, int64_t column, int64_t count, int64_t width,
                        float* mix) {
  vf acc[N][C];
  for (int n = 0; n < N; ++n)
    for (int c = 0; c < C; ++c) acc[n][c] = load(mix + n * width + column + c * W);
  for (int64_t t = 0; t < count; ++t) {
    if constexpr (N < C) {
      vf w[N];
      for (int n = 0; n < N; ++n) w[n] = splat(weights[n * kChunk + t]);
      for (int c = 0; c < C; ++c) {
        const vf v = load(value[t] + column + c * W);
        for (int n = 0; n < N; ++n) acc[n][c] += w[n] * v;
      }
    } else {
      vf v[C];
      for (int c = 0; c < C; ++c) v[c] = load(value[t] + column + c * W);
      for (int n = 0; n < N; ++n) {
        const vf w = splat(weights[n * kChunk + t]);
        for (int c = 0; c < C; ++c) acc[n][c] += w * v[c];
      }
    }
  }
  for (int n = 0; n < N; ++n)
    for (int c = 0; c < C; ++c) store(mix + n * width + column + c * W, acc[n][c]);
}

template <int N, class T>
inline void mix_queries(const float* weights, const T* const* value, int64_t count, int64_t width, float* mix) {
  int64_t column = 0;
  if constexpr (N == 1)
    for (; column + 8 * W <= width; column += 8 * W) mix_columns<N, 8>(weights, value, column, count, width, mix);
  if constexpr (N <= 3)
    for (; column + 4 * W <= width; column += 4 * W) mix_columns<N, 4>(weights, value, column, count, width, mix);
  for (; column + 2 * W <= width; column += 2 * W) mix_columns<N, 2>(weights, value, column, count, width, mix);
  for (; column < width; column += W) mix_columns<N, 1>(weights, value, column, count, width, mix);
}

template <class T>
void mix_all(const float* weights, const T* const* value, int64_t num_queries, int64_t count, int64_t width, float* mix) {
  int64_t n = 0;
  for (; n + 6 <= num_queries; n += 6) mix_queries<6>(weights + n * kChunk, value, count, width, mix + n * width);
  for (; n + 3 <= num_queries; n += 3) mix_queries<3>(weights + n * kChunk, value, count, width, mix + n * width);
  for (; n < num_queries; ++n) mix_queries<1>(weights + n * kChunk, value, count, width, mix + n * width);
}

template <class T>
inline void widen_row(const T* from, int64_t dim, float factor, int64_t width, float* to) {
  int64_t d = 0;
  for (; d + W <= dim; d += W) store(to + d, load(from + d) * factor);
  for (; d < dim; ++d) to[d] = widen(from[d]) * factor;
  for (; d < width; ++d) to[d] = 0.0f;
}

// Asks for rows begin..end of `count` there are. A cache is met cold, in runs too short for the CPU's own prefetcher.
template <class T>
inline void ask_wide(const T* const* row, int64_t dim, int64_t begin, int64_t end, int64_t count) {
  for (int64_t t = begin; t < end && t < count; ++t)
    for (int64_t byte = 0; byte < dim * (int64_t)sizeof(T); byte += 64) __builtin_prefetch((const char*)row[t] + byte);
}

}  // namespace
