// Products of 4 and 8 bit weights with activations in 8 bits, compiled once per instruction set (see build.py).
//
// Activations are quantized as they come, each block of 32 inputs of a row with its own scale (max / 127), so the products
// of a block are whole numbers and their sum is exact; it is then scaled and added in fp32, block after block. A result
// depends on its row and its feature alone: every path below does the same operations in the same order.
//
// What lies above a weight's true value (8 for q4_0, kAbove of bytes.h for 8 bits) comes off by starting the sum at that many
// times minus the sum of the activations.

#include <cmath>
#include <cstring>

#include "bytes.h"
#include "gemm.h"

namespace {

using motet::Activations;
using motet::kBlock;
using motet::kTile;
using motet::Output;
using motet::Type;
using motet::Weight;

constexpr int64_t kQuads = kBlock / 4;
constexpr float kTiny = 0x1p-120f;  // blocks whose largest value lies below are taken as zero: their scale has no inverse
// -------------------------------------------------------------------------------------------------------- activations

#if defined(__AVX512VNNI__)
// The bits of the largest magnitude of a block; a NaN is above infinity.
MOTET_INLINE uint32_t largest(const uint16_t* x) {
  const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(magnitude), _mm512_maskz_extracti64x4_epi64(0xff, magnitude, 1));
  const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1)));
  return ~static_cast<uint32_t>(_mm_cvtsi128_si32(least)) & 0xffff;
}

// 32 bytes of a block, in order; returns their sum.
template <int kBits>
MOTET_INLINE int32_t quantize_block(const uint16_t* x, float inverse, int8_t* to) {
  const __m512 low = times(load_bf16(x), splat(inverse)), high = times(load_bf16(x + 16), splat(inverse));
  __m256i q = _mm256_set_m128i(_mm512_maskz_cvtsepi32_epi8(0xffff, _mm512_maskz_cvtps_epi32(0xffff, high)),
                               _mm512_maskz_cvtsepi32_epi8(0xffff, _mm512_maskz_cvtps_epi32(0xffff, low)));
  if constexpr (kBits == 4) {
    q = _mm256_shuffle_epi8(q, _mm256_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15,  //
                                                0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), q);
  const __m256i fours = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), q);
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

// Sixteen blocks at a time, so that the divisions are made side by side and no block waits for its own.
template <int kBits>
void quantize_rows(const Weight& w, const uint16_t* x, int64_t begin, int64_t end, const Activations& to) {
  const __m512i above = splat(-w.zero - (kBits == 8 ? kAbove : 0));
  for (int64_t i = begin * w.blocks; i < end * w.blocks; i += 16) {
    const int64_t count = end * w.blocks - i < 16 ? end * w.blocks - i : 16;
    alignas(64) uint32_t bits[16] = {};
    alignas(64) float inverse[16];
    alignas(64) int32_t sums[16] = {};
    for (int64_t b = 0; b < count; ++b) bits[b] = largest(x + (i + b) * kBlock) << 16;
    const __m512i most = _mm512_load_si512(bits);
    const __mmask16 strange = _mm512_cmpge_epu32_mask(most, splat(0x7f800000));
    const __mmask16 usable = ~strange & _mm512_cmp_ps_mask((__m512)most, splat(kTiny), _CMP_GE_OQ);
    const __m512 steps = _mm512_mask_mov_ps(_mm512_maskz_div_ps(usable, (__m512)most, splat(127.0f)), strange, splat(NAN));
    _mm512_store_ps(inverse, _mm512_maskz_div_ps(usable, splat(127.0f), (__m512)most));
    for (int64_t b = 0; b < count; ++b) sums[b] = quantize_block<kBits>(x + (i + b) * kBlock, inverse[b], to.quants + (i + b) * kBlock);
    const __mmask16 present = static_cast<__mmask16>((1u << count) - 1);
    const __m512i total = _mm512_load_si512(sums);
    _mm512_mask_storeu_ps(to.scale + i, present, steps);
    _mm512_mask_storeu_ps(to.sum + i, present, times(steps, to_float(total)));
    _mm512_mask_storeu_epi32(to.start + i, present, _mm512_mullo_epi32(total, above));
  }
}
#elif defined(__AVX2__)
// The bits of the largest magnitude of a block; a NaN is above infinity.
MOTET_INLINE uint32_t largest(const uint16_t* x) {
  const __m256i all = _mm256_set1_epi16(0x7fff);
  const auto magnitude = [&](int64_t i) {
    return _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)), all);
  };
  const __m256i half = _mm256_max_epu16(magnitude(0), magnitude(16));
  const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(quarter, _mm_set1_epi16(-1)));
  return ~static_cast<uint32_t>(_mm_cvtsi128_si32(least)) & 0xffff;
}

// 32 bytes of a block, in order; returns their sum.
template <int kBits>
MOTET_INLINE int32_t quantize_block(const uint16_t* x, float inverse, int8_t* to) {
  const auto eight = [&](int64_t i) { return _mm256_cvtps_epi32(times(load_bf16(x + i), splat(inverse))); };
  // Each half has four bytes of every eight inputs.
  const __m256i q = _mm256_packs_epi16(_mm256_packs_epi32(eight(0), eight(8)), _mm256_packs_epi32(eight(16), eight(24)));
  const __m128i low = _mm256_castsi256_si128(q), high = _mm256_extracti128_si256(q, 1);
  __m128i* out = reinterpret_cast<__m128i*>(to);
  _mm_storeu_si128(out, kBits == 4 ? _mm_unpacklo_epi8(low, high) : _mm_unpacklo_epi32(low, high));
  _mm_storeu_si128(out + 1, kBits == 4 ? _mm_unpackhi_epi8(low, high) : _mm_unpackhi_epi32(low, high));
  const __m256i eights = _mm256_sad_epu8(_mm256_xor_si256(q, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
  const __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(eights), _mm256_extracti128_si256(eights, 1));
  return _mm_cvtsi128_si32(sum) + _mm_extract_epi32(sum, 2) - 128 * static_cast<int32_t>(kBlock);
}

// Eight blocks at a time, so that the divisions are made side by side and no block waits for its own.
template <int kBits>
void quantize_rows(const Weight& w, const uint16_t* x, int64_t begin, int64_t end, const Activations& to) {
  const int32_t above = -w.zero - (kBits == 8 ? kAbove : 0);
  for (int64_t i = begin * w.blocks; i < end * w.blocks; i += 8) {
    const int64_t count = end * w.blocks - i < 8 ? end * w.blocks - i : 8;
    alignas(32) uint32_t bits[8] = {};
    alignas(32) float inverse[8], scale[8];
    for (int64_t b = 0; b < count; ++b) bits[b] = largest(x + (i + b) * kBlock) << 16;
    const __m256i most = _mm256_load_si256(reinterpret_cast<const __m256i*>(bits));
    const VecF strange = (VecF)_mm256_cmpgt_epi32(most, splat(0x7f7fffff)), value = (VecF)most;
    const VecF usable = _mm256_andnot_ps(strange, _mm256_cmp_ps(value, splat(kTiny), _CMP_GE_OQ));
    const VecF divisor = _mm256_blendv_ps(splat(1.0f), value, usable);
    _mm256_store_ps(inverse, _mm256_and_ps(usable, _mm256_div_ps(splat(127.0f), divisor)));
    const VecF steps = _mm256_and_ps(usable, _mm256_div_ps(value, splat(127.0f)));
    _mm256_store_ps(scale, _mm256_blendv_ps(steps, splat(NAN), strange));
    for (int64_t b = 0; b < count; ++b) {
      const int64_t block = i + b;
      const int32_t sum = quantize_block<kBits>(x + block * kBlock, inverse[b], to.quants + block * kBlock);
      to.scale[block] = scale[b];
      to.sum[block] = scale[b] * static_cast<float>(sum);
      to.start[block] = above * sum;
    }
  }
}
#else
template <int kBits>
void quantize_rows(const Weight& w, const uint16_t* x, int64_t begin, int64_t end, const Activations& to) {
  constexpr int kOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // of each 8 inputs, for 4 bits
  const int32_t above = w.zero + (kBits == 8 ? kAbove : 0);
  for (int64_t i = begin * w.blocks; i < end * w.blocks; ++i) {
    const uint16_t* from = x + i * kBlock;
    uint16_t high = 0;  // bits of the largest magnitude; a NaN is above infinity
    for (int64_t k = 0; k < kBlock; ++k) high = (from[k] & 0x7fff) > high ? from[k] & 0x7fff : high;
    const float most = bits_to_float(static_cast<uint32_t>(high) << 16), inverse = 127.0f / most;
    if (high >= 0x7f80 || most < kTiny) {
      std::memset(to.quants + i * kBlock, 0, kBlock);
      to.scale[i] = to.sum[i] = high >= 0x7f80 ? NAN : 0.0f;
      to.start[i] = 0;
      continue;
    }
    int32_t q[kBlock], sum = 0;
    for (int64_t k = 0; k < kBlock; ++k) {
      const float steps = bits_to_float(static_cast<uint32_t>(from[k]) << 16) * inverse;
      q[k] = static_cast<int32_t>((steps + 0x1.8p23f) - 0x1.8p23f);  // to the nearest, ties to even
      sum += q[k];
    }
    for (int64_t k = 0; k < kBlock; ++k) to.quants[i * kBlock + k] = static_cast<int8_t>(q[kBits == 4 ? k / 8 * 8 + kOrder[k % 8] : k]);
    to.scale[i] = most / 127.0f;
    to.sum[i] = to.scale[i] * static_cast<float>(sum);
    to.start[i] = -above * sum;
  }
}
#endif

void quantize(const Weight& w, const uint16_t* x, int64_t begin, int64_t end, const Activations& to) {
  w.bits == 4 ? quantize_rows<4>(w, x, begin, end, to) : quantize_rows<8>(w, x, begin, end, to);
}

// ------------------------------------------------------------------------------------------------------------ products

constexpr int64_t kLine = 64;  // bytes of a cache line
// With so few rows the next tiles are fetched while these are multiplied: left to the processor, memory and arithmetic take
// turns (all layers of SmolLM2-135M at 16 rows, weights cold, two cores of an EPYC Zen 5: 4.4 -> 2.9 ms).
constexpr int64_t kFewRows = 64;

MOTET_INLINE void fetch(const void* p) { __builtin_prefetch(p); }

constexpr int kVectors = kTile / kLanes;  // vectors across a tile

MOTET_INLINE VecF load_factor(const Weight& w, const void* table, int64_t at) {
  return w.half ? load_fp16(static_cast<const uint16_t*>(table) + at) : load_fp32(static_cast<const float*>(table) + at);
}

MOTET_INLINE VecI quad(const int8_t* x) { return splat(read<int32_t>(x)); }

// What multiplies a block's sum. With one scale a row of the weight (kWhole) that scale is left for the end.
enum class Factors { scale, scale_and_minimum, whole };

// Adds the bias and writes kept [num_rows][width] to rows from `row` on, features from `feature` on, `left` at most.
__attribute__((noinline)) void finish(const Output& to, int64_t row, int64_t num_rows, int64_t feature, int64_t left,
                                      int64_t width, const float* kept) {
  for (int64_t r = 0; r < num_rows; ++r, kept += width) {
    const int64_t at = (row + r) * to.stride + feature;
    int64_t i = 0;
    for (; i + kLanes <= width && i + kLanes <= left; i += kLanes) {
      VecF v = load_fp32(kept + i);
      if (to.bias) {
        v = plus(v, to.bias_type == Type::bf16 ? load_bf16(static_cast<const uint16_t*>(to.bias) + feature + i)
                                               : load_fp32(static_cast<const float*>(to.bias) + feature + i));
      }
      if (to.type == Type::bf16) {
        store_bf16(static_cast<uint16_t*>(to.y) + at + i, v);
      } else {
        store_fp32(static_cast<float*>(to.y) + at + i, v);
      }
    }
    for (; i < width && i < left; ++i) {
      float value = kept[i];
      if (to.bias) {
        value += to.bias_type == Type::bf16
                     ? bits_to_float(static_cast<uint32_t>(static_cast<const uint16_t*>(to.bias)[feature + i]) << 16)
                     : static_cast<const float*>(to.bias)[feature + i];
      }
      if (to.type == Type::bf16) {
        static_cast<uint16_t*>(to.y)[at + i] = to_bf16(value);
      } else {
        static_cast<float*>(to.y)[at + i] = value;
      }
    }
  }
}

// Which lines of each block of the tiles behind these a pass over the rows fetches, so that all passes together fetch each
// once. Past the last tile this reads nothing: such a request is dropped.
struct Ahead {
  int64_t begin, end;
};

// kRows rows from `row` on times kTiles tiles from `tile` on.
template <int kBits, Factors kFactors, int kTiles, int kRows, bool kAhead>
__attribute__((noinline)) void multiply_rows(const Weight& w, const Activations& a, int64_t row, int64_t tile, const Output& to,
                                             Ahead ahead) {
  constexpr int kColumns = kTiles * kVectors;
  constexpr int64_t kBytes = kBits * kTile * kBlock / 8, kVectorBytes = 4 * kLanes, kQuadBytes = 4 * kTile;
  VecF acc[kColumns][kRows];
#pragma GCC unroll 16
  for (int c = 0; c < kColumns; ++c)
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) acc[c][r] = splat(0.0f);
  const uint8_t* weights = w.quants + tile * w.blocks * kBytes;
  const int64_t next = w.blocks * kBytes;  // bytes from a tile to the next
  const int8_t* x = a.quants + row * w.in;
  const float* scales = a.scale + row * w.blocks;
  const float* sums = a.sum + row * w.blocks;
  const int32_t* starts = a.start + row * w.blocks;
  const int64_t first = tile * w.groups * kTile;
  int64_t factors = first, left = w.blocks_per_group;
  for (int64_t b = 0; b < w.blocks; ++b) {
    if constexpr (kAhead) {
      for (int64_t line = ahead.begin; line < ahead.end; ++line)
#pragma GCC unroll 4
        for (int t = 0; t < kTiles; ++t) fetch(weights + (kTiles + t) * next + line * kLine);
      if (kFactors != Factors::whole && ahead.begin < ahead.end) {
        const int64_t here = factors - first, at = (first + kTiles * (w.groups * kTile + here)) * (w.half ? 2 : 4);
        fetch(static_cast<const uint8_t*>(w.scale) + at);
        if constexpr (kFactors == Factors::scale_and_minimum) fetch(static_cast<const uint8_t*>(w.minimum) + at);
      }
    }
    VecI part[kColumns][kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
      for (int c = 0; c < kColumns; ++c) part[c][r] = first_sum<kBits>(starts[r * w.blocks + b]);
    if constexpr (kBits == 4) {
#pragma GCC unroll 4
      for (int j = 0; j < kQuads / 2; ++j) {
        VecI packed[kColumns];
#pragma GCC unroll 16
        for (int c = 0; c < kColumns; ++c)
          packed[c] = load_bytes(weights + c / kVectors * next + j * kQuadBytes + c % kVectors * kVectorBytes);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const VecI values = quad(x + r * w.in + 8 * j);
#pragma GCC unroll 16
          for (int c = 0; c < kColumns; ++c) part[c][r] = dot<4>(part[c][r], low_nibbles(packed[c]), values);
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const VecI values = quad(x + r * w.in + 8 * j + 4);
#pragma GCC unroll 16
          for (int c = 0; c < kColumns; ++c) part[c][r] = dot<4>(part[c][r], high_nibbles(packed[c]), values);
        }
      }
    } else {
#pragma GCC unroll 8
      for (int j = 0; j < kQuads; ++j) {
        VecI bytes[kColumns];
#pragma GCC unroll 16
        for (int c = 0; c < kColumns; ++c)
          bytes[c] = raised(load_bytes(weights + c / kVectors * next + j * kQuadBytes + c % kVectors * kVectorBytes));
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const VecI values = quad(x + r * w.in + 4 * j);
#pragma GCC unroll 16
          for (int c = 0; c < kColumns; ++c) part[c][r] = dot<8>(part[c][r], bytes[c], values);
        }
      }
    }
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
      const int64_t at = factors + c / kVectors * w.groups * kTile + c % kVectors * kLanes;
      VecF scale = splat(1.0f), minimum = splat(0.0f);
      if constexpr (kFactors != Factors::whole) scale = load_factor(w, w.scale, at);
      if constexpr (kFactors == Factors::scale_and_minimum) minimum = load_factor(w, w.minimum, at);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const VecF own = splat(scales[r * w.blocks + b]);
        const VecF sum = to_float(whole_sum<kBits>(part[c][r], starts[r * w.blocks + b]));
        acc[c][r] = fused(sum, kFactors == Factors::whole ? own : times(scale, own), acc[c][r]);
        if constexpr (kFactors == Factors::scale_and_minimum)
          acc[c][r] = fused(minimum, splat(sums[r * w.blocks + b]), acc[c][r]);
      }
    }
    x += kBlock;
    weights += kBytes;
    if (--left == 0) {
      left = w.blocks_per_group;
      factors += kTile;
    }
  }
  // The common case, straight from the registers.
  if (kLanes >= 8 && !to.bias && w.out - tile * kTile >= kColumns * kLanes) {
    const int64_t at = row * to.stride + tile * kTile;
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
      VecF scale = splat(1.0f);
      if constexpr (kFactors == Factors::whole) scale = load_factor(w, w.scale, tile * kTile + c * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const VecF value = kFactors == Factors::whole ? times(acc[c][r], scale) : acc[c][r];
        if (to.type == Type::bf16) {
          store_bf16(static_cast<uint16_t*>(to.y) + at + r * to.stride + c * kLanes, value);
        } else {
          store_fp32(static_cast<float*>(to.y) + at + r * to.stride + c * kLanes, value);
        }
      }
    }
    return;
  }
  alignas(64) float kept[kRows][kColumns * kLanes];
#pragma GCC unroll 16
  for (int c = 0; c < kColumns; ++c) {
    VecF scale = splat(1.0f);
    if constexpr (kFactors == Factors::whole) scale = load_factor(w, w.scale, tile * kTile + c * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
      store_fp32(&kept[r][c * kLanes], kFactors == Factors::whole ? times(acc[c][r], scale) : acc[c][r]);
  }
  finish(to, row, kRows, tile * kTile, w.out - tile * kTile, kColumns * kLanes, kept[0]);
}

template <int kBits, Factors kFactors, int kTiles, bool kAhead>
void multiply_tiles(const Weight& w, const Activations& a, int64_t rows, int64_t tile, const Output& to) {
  const int64_t passes = (rows + kRegisterRows - 1) / kRegisterRows, lines = w.block_bytes() / kLine;
  int64_t row = 0, pass = 0;
  const auto ahead = [&] { return Ahead{lines * pass / passes, lines * (pass + 1) / passes}; };
  for (; rows - row >= kRegisterRows; row += kRegisterRows, ++pass)
    multiply_rows<kBits, kFactors, kTiles, kRegisterRows, kAhead>(w, a, row, tile, to, ahead());
#define MOTET_CASE(N)                                  \
  if constexpr (kRegisterRows > N) {                   \
    if (rows - row == N) multiply_rows<kBits, kFactors, kTiles, N, kAhead>(w, a, row, tile, to, ahead()); \
  }
  MOTET_CASE(1) MOTET_CASE(2) MOTET_CASE(3) MOTET_CASE(4) MOTET_CASE(5)
#undef MOTET_CASE
}

// Tiles side by side share the reading of activations; with few rows more of them fit the registers.
template <int kBits, Factors kFactors>
void multiply_range(const Weight& w, const Activations& a, int64_t rows, int64_t begin, int64_t end, const Output& to) {
  int64_t tile = begin;
  if constexpr (kLanes == 16) {
    const Ahead all = {0, w.block_bytes() / kLine};
    for (; rows == 1 && end - tile >= 4; tile += 4) multiply_rows<kBits, kFactors, 4, 1, true>(w, a, 0, tile, to, all);
    for (; rows == 2 && end - tile >= 4; tile += 4) multiply_rows<kBits, kFactors, 4, 2, true>(w, a, 0, tile, to, all);
    for (; rows <= kFewRows && end - tile >= 4; tile += 2) multiply_tiles<kBits, kFactors, 2, true>(w, a, rows, tile, to);
    for (; end - tile >= 2; tile += 2) multiply_tiles<kBits, kFactors, 2, false>(w, a, rows, tile, to);
  }
  if constexpr (kLanes == 8) {
    const Ahead all = {0, w.block_bytes() / kLine};
    for (; rows == 1 && end - tile >= 2; tile += 2) multiply_rows<kBits, kFactors, 2, 1, true>(w, a, 0, tile, to, all);
    for (; rows <= kFewRows && end - tile >= 2; ++tile) multiply_tiles<kBits, kFactors, 1, true>(w, a, rows, tile, to);
  }
  for (; tile < end; ++tile) multiply_tiles<kBits, kFactors, 1, false>(w, a, rows, tile, to);
}

void multiply(const Weight& w, const Activations& a, int64_t rows, int64_t begin, int64_t end, const Output& to) {
  if (w.bits == 4) {
    (w.minimum ? multiply_range<4, Factors::scale_and_minimum> : multiply_range<4, Factors::scale>)(w, a, rows, begin, end, to);
  } else {
    (w.groups == 1 ? multiply_range<8, Factors::whole> : multiply_range<8, Factors::scale>)(w, a, rows, begin, end, to);
  }
}

const motet::Int8Table kTable = {MOTET_NAME, quantize, multiply};

}  // namespace

namespace motet {
const Int8Table* MOTET_TABLE() { return &kTable; }
}  // namespace motet
