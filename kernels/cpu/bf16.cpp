// Products of 16-bit weights: layout rows16 of linear.cpp, bf16 [tiles, blocks, 16, 32]; no scale.
//
// Multiplied as they are into fp32: bf16 by bf16 (VDPBF16PS), or both widened (AVX2).

#include <ATen/Parallel.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "gemm.h"
#include "ops.h"

namespace {

using motet::kBlock;
using motet::kTile;
using motet::Weight;

constexpr int64_t kPairs = kBlock / 2;

// acc [num_tiles][rows][16]. The loops over 16 lanes are what the compiler vectorizes.
void plain_tiles(const Weight& w, const float* x, int64_t rows, int64_t tile, int64_t num_tiles, float* acc) {
  std::memset(acc, 0, sizeof(float) * static_cast<size_t>(num_tiles * rows * kTile));
  for (const int64_t end = tile + num_tiles; tile < end; ++tile, acc += rows * kTile) {
    const uint16_t* words = reinterpret_cast<const uint16_t*>(w.quants + tile * w.blocks * w.block_bytes());
    for (int64_t k = 0; k < w.in; ++k)
      for (int64_t r = 0; r < rows; ++r) {
        const float value = x[r * w.in + k];
        for (int64_t i = 0; i < kTile; ++i) acc[r * kTile + i] += value * float_of(words[k / 2 * 32 + 2 * i + k % 2]);
      }
  }
}

#if defined(__x86_64__)
MOTET_BF16_INLINE __m512bh broadcast_pair(const uint16_t* x) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof(pair));
  return (__m512bh)_mm512_set1_epi32(pair);
}

// kRows rows of x against kTiles tiles; sums land in out [kTiles][stride rows][16].
template <int kTiles, int kRows>
MOTET_BF16_TARGET void bf16_rows(const Weight& w, const uint16_t* x, int64_t tile, float* out, int64_t stride) {
  __m512 acc[kTiles][kRows];
  const uint8_t* block[kTiles];
#pragma GCC unroll 8
  for (int t = 0; t < kTiles; ++t) {
    block[t] = w.quants + (tile + t) * w.blocks * w.block_bytes();
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) acc[t][r] = _mm512_setzero_ps();
  }
  for (int64_t b = 0; b < w.blocks; ++b) {
#pragma GCC unroll 16
    for (int p = 0; p < kPairs; ++p) {
      __m512bh q[kTiles];
#pragma GCC unroll 8
      for (int t = 0; t < kTiles; ++t) q[t] = (__m512bh)_mm512_loadu_si512(block[t] + p * 64);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const __m512bh pair = broadcast_pair(x + r * w.in + b * kBlock + 2 * p);
#pragma GCC unroll 8
        for (int t = 0; t < kTiles; ++t) acc[t][r] = _mm512_dpbf16_ps(acc[t][r], q[t], pair);
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTiles; ++t) block[t] += kPairs * 64;
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTiles; ++t)
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(out + (t * stride + r) * kTile, acc[t][r]);
}

template <int kTiles>
MOTET_BF16_TARGET void bf16_tiles_of(const Weight& w, const uint16_t* x, int64_t rows, int64_t tile, float* acc) {
  for (int64_t r = 0; r < rows;) {
    const uint16_t* xr = x + r * w.in;
    float* out = acc + r * kTile;
    const int64_t left = rows - r;
#define MOTET_CASE(N)                                     \
  if (left >= N) {                                        \
    bf16_rows<kTiles, N>(w, xr, tile, out, rows);         \
    r += N;                                               \
    continue;                                             \
  }
    if constexpr (kTiles <= 2) {
      MOTET_CASE(12) MOTET_CASE(8)
    }
    MOTET_CASE(4) MOTET_CASE(3) MOTET_CASE(2) MOTET_CASE(1)
#undef MOTET_CASE
  }
}

// Activations are read once for several tiles: 4 with few rows, 2 with many (that is what fits the registers).
MOTET_BF16_TARGET void bf16_tiles(const Weight& w, const uint16_t* x, int64_t rows, int64_t tile, int64_t num_tiles, float* acc) {
  const int64_t end = tile + num_tiles;
  for (; rows <= 4 && tile + 4 <= end; tile += 4, acc += 4 * rows * kTile) bf16_tiles_of<4>(w, x, rows, tile, acc);
  for (; tile + 2 <= end; tile += 2, acc += 2 * rows * kTile) bf16_tiles_of<2>(w, x, rows, tile, acc);
  for (; tile < end; ++tile, acc += rows * kTile) bf16_tiles_of<1>(w, x, rows, tile, acc);
}

// ------------------------------------------------------------------------------------- 16-bit weights, without their dot
#define MOTET_WIDE_TARGET __attribute__((target("avx2,fma")))

MOTET_WIDE_TARGET __attribute__((always_inline)) inline __m256 even_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}
MOTET_WIDE_TARGET __attribute__((always_inline)) inline __m256 odd_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}

// As bf16_rows, with x in fp32; even inputs of a pair, then odd ones.
template <int kTiles, int kRows>
MOTET_WIDE_TARGET void wide_rows(const Weight& w, const float* x, int64_t tile, float* out, int64_t stride) {
  constexpr int kHalves = 2 * kTiles;
  __m256 acc[kHalves][kRows];
#pragma GCC unroll 8
  for (int h = 0; h < kHalves; ++h)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) acc[h][r] = _mm256_setzero_ps();
  const int64_t next = w.blocks * w.block_bytes();  // bytes from a tile to the next
  const uint8_t* weights = w.quants + tile * next;
  for (int64_t pair = 0; pair < w.blocks * kPairs; ++pair, weights += 64) {
    __m256 part[kHalves];
    const auto load = [&](int h) MOTET_WIDE_TARGET {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + h / 2 * next + h % 2 * 32));
    };
#pragma GCC unroll 8
    for (int h = 0; h < kHalves; ++h) part[h] = even_of(load(h));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m256 value = _mm256_broadcast_ss(x + r * w.in + 2 * pair);
#pragma GCC unroll 8
      for (int h = 0; h < kHalves; ++h) acc[h][r] = _mm256_fmadd_ps(value, part[h], acc[h][r]);
    }
#pragma GCC unroll 8
    for (int h = 0; h < kHalves; ++h) part[h] = odd_of(load(h));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m256 value = _mm256_broadcast_ss(x + r * w.in + 2 * pair + 1);
#pragma GCC unroll 8
      for (int h = 0; h < kHalves; ++h) acc[h][r] = _mm256_fmadd_ps(value, part[h], acc[h][r]);
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < kHalves; ++h)
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) _mm256_storeu_ps(out + (h / 2 * stride + r) * kTile + h % 2 * 8, acc[h][r]);
}

// Four tiles with one row, else one with five rows: sixteen registers hold no more without spilling.
MOTET_WIDE_TARGET void wide_tiles(const Weight& w, const float* x, int64_t rows, int64_t tile, int64_t num_tiles, float* acc) {
  const int64_t end = tile + num_tiles;
  for (; rows == 1 && tile + 4 <= end; tile += 4, acc += 4 * kTile) wide_rows<4, 1>(w, x, tile, acc, 1);
  for (; tile < end; ++tile, acc += rows * kTile) {
    int64_t r = 0;
    for (; rows - r >= 5; r += 5) wide_rows<1, 5>(w, x + r * w.in, tile, acc + r * kTile, rows);
    const float* rest = x + r * w.in;
    float* out = acc + r * kTile;
    switch (rows - r) {
      case 4: wide_rows<1, 4>(w, rest, tile, out, rows); break;
      case 3: wide_rows<1, 3>(w, rest, tile, out, rows); break;
      case 2: wide_rows<1, 2>(w, rest, tile, out, rows); break;
      case 1: wide_rows<1, 1>(w, rest, tile, out, rows); break;
      default: break;
    }
  }
}
#endif

// `tiles` (first, count, acc [count][rows][16]) multiplies.
template <class Tiles>
void multiply_tiles(const Weight& w, int64_t rows, const motet::Output& to, const Tiles& tiles) {
  // Chunks of 4 tiles. A piece of work below some 100,000 products costs less than waking another thread.
  const int64_t chunks = (w.tiles + 3) / 4, grain = 100000 / (rows * w.in * kTile * 4) + 1;
  at::parallel_for(0, chunks, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> acc(static_cast<size_t>(rows * 4 * kTile));
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = chunk * 4, count = std::min<int64_t>(4, w.tiles - first);
      tiles(first, count, acc.data());
      for (int64_t t = 0; t < count; ++t) {
        const int64_t o = (first + t) * kTile, lanes = std::min(kTile, w.out - o);
        float bias[kTile] = {};
        for (int64_t i = 0; to.bias && i < lanes; ++i)
          bias[i] = to.bias_type == Type::bf16 ? float_of(static_cast<const uint16_t*>(to.bias)[o + i])
                                               : static_cast<const float*>(to.bias)[o + i];
        for (int64_t r = 0; r < rows; ++r) {
          const float* from = acc.data() + (t * rows + r) * kTile;
          const int64_t at = r * to.stride + o;
          if (to.type == Type::fp32) {
            for (int64_t i = 0; i < lanes; ++i) static_cast<float*>(to.y)[at + i] = from[i] + bias[i];
          } else {
            for (int64_t i = 0; i < lanes; ++i) static_cast<uint16_t*>(to.y)[at + i] = bf16_of(from[i] + bias[i]);
          }
        }
      }
    }
  });
}

}  // namespace

namespace motet {

const std::string& forced_isa() {
  static const std::string isa = [] {
    const char* forced = std::getenv("MOTET_CPU_ISA");
    return std::string(forced ? forced : "");
  }();
  return isa;
}

const char* bf16_instruction_set() {
#if defined(__x86_64__)
  if (forced_isa().empty() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw")) return "avx512bf16";
  if (forced_isa() != "plain" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
  return "plain";
}

void multiply_bf16(const Weight& w, const uint16_t* x, int64_t rows, Output to) {
  auto* wide = plain_tiles;
#if defined(__x86_64__)
  static const std::string isa = bf16_instruction_set();
  if (isa == "avx512bf16")
    return multiply_tiles(w, rows, to, [&](int64_t first, int64_t count, float* acc) { bf16_tiles(w, x, rows, first, count, acc); });
  if (isa == "avx2") wide = wide_tiles;
#endif
  constexpr int64_t kTogether = 60;  // rows that stay in the second-level cache, widened
  thread_local std::vector<float> widened;
  for (int64_t begin = 0; begin < rows; begin += kTogether) {
    const int64_t count = std::min(kTogether, rows - begin);
    if (static_cast<int64_t>(widened.size()) < count * w.in) widened.resize(static_cast<size_t>(count * w.in));
    float* some = widened.data();
    for (int64_t i = 0; i < count * w.in; ++i) some[i] = float_of(x[begin * w.in + i]);
    multiply_tiles(w, count, to, [&](int64_t first, int64_t num, float* acc) { wide(w, some, count, first, num, acc); });
    to.y = static_cast<char*>(to.y) + count * to.stride * size_of(to.type);
  }
}

}  // namespace motet
