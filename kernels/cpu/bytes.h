// Vectors for products of bytes, one family per instruction set: what int8.cpp is made of.
//
// A vector holds four inputs of each of kLanes features. Bytes are multiplied four inputs at a time (VPDPBUSD where there is
// one). Weights must be unsigned there, so 8-bit ones are raised by kAbove.
#pragma once

#if defined(__x86_64__)
// GCC 12 takes the undefined vectors inside its own intrinsics for ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "gemm.h"

namespace {

using motet::kBlock;

#define MOTET_INLINE __attribute__((always_inline)) inline

MOTET_INLINE float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

MOTET_INLINE uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (value != value) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class T>
MOTET_INLINE T read(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

#if defined(__AVX512VNNI__)
// ------------------------------------------------------------------------------------------------------------- AVX-512
constexpr int kLanes = 16;
constexpr int kRegisterRows = 6;  // with two vectors of features
constexpr int kAbove = 128;  // what an 8-bit weight is raised by
using VecI = __m512i;
using VecF = __m512;

MOTET_INLINE VecI load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
MOTET_INLINE VecI low_nibbles(VecI v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
MOTET_INLINE VecI high_nibbles(VecI v) {
  return _mm512_and_si512(_mm512_maskz_srli_epi16(0xffffffff, v, 4), _mm512_set1_epi8(15));
}
MOTET_INLINE VecI raised(VecI v) { return _mm512_xor_si512(v, _mm512_set1_epi8(-128)); }
MOTET_INLINE VecI splat(int32_t v) { return _mm512_set1_epi32(v); }
MOTET_INLINE VecF splat(float v) { return _mm512_set1_ps(v); }
#define MOTET_DOTS_SUM_IN_32_BITS
template <int kBits>
MOTET_INLINE VecI dot(VecI sum, VecI weights, VecI x) {
  return _mm512_dpbusd_epi32(sum, weights, x);
}
MOTET_INLINE VecF to_float(VecI v) { return _mm512_maskz_cvtepi32_ps(0xffff, v); }
MOTET_INLINE VecF times(VecF a, VecF b) { return _mm512_mul_ps(a, b); }
MOTET_INLINE VecF plus(VecF a, VecF b) { return _mm512_add_ps(a, b); }
MOTET_INLINE VecF fused(VecF a, VecF b, VecF c) { return _mm512_fmadd_ps(a, b, c); }
MOTET_INLINE VecF load_fp32(const void* p) { return _mm512_loadu_ps(p); }
MOTET_INLINE VecF load_fp16(const void* p) {
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
MOTET_INLINE VecF load_bf16(const void* p) {
  const VecI wide = _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(static_cast<const __m256i*>(p)));
  return (VecF)_mm512_maskz_slli_epi32(0xffff, wide, 16);
}
MOTET_INLINE void store_fp32(void* p, VecF v) { _mm512_storeu_ps(p, v); }
MOTET_INLINE void store_bf16(void* p, VecF v) {
  const VecI bits = (VecI)v, even = _mm512_and_si512(_mm512_maskz_srli_epi32(0xffff, bits, 16), splat(1));
  const VecI near = _mm512_maskz_srli_epi32(0xffff, _mm512_add_epi32(bits, _mm512_add_epi32(even, splat(0x7fff))), 16);
  const VecI whole = _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), splat(0x7fc0));
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_maskz_cvtepi32_epi16(0xffff, whole));
}
#elif defined(__AVX2__)
// ---------------------------------------------------------------------------------------------------------------- AVX2
constexpr int kLanes = 8;
// Sums of the blocks before lie on the stack: sixteen registers hold what is multiplied, and more rows share the weights' nibbles.
constexpr int kRegisterRows = 4;
using VecI = __m256i;
using VecF = __m256;

MOTET_INLINE VecI load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
MOTET_INLINE VecI low_nibbles(VecI v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
MOTET_INLINE VecI high_nibbles(VecI v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
MOTET_INLINE VecI splat(int32_t v) { return _mm256_set1_epi32(v); }
MOTET_INLINE VecF splat(float v) { return _mm256_set1_ps(v); }
#if defined(__AVXVNNI__)
constexpr int kAbove = 128;
MOTET_INLINE VecI raised(VecI v) { return _mm256_xor_si256(v, _mm256_set1_epi8(-128)); }
#define MOTET_DOTS_SUM_IN_32_BITS
template <int kBits>
MOTET_INLINE VecI dot(VecI sum, VecI weights, VecI x) {
  return _mm256_dpbusd_avx_epi32(sum, weights, x);
}
#else
// VPMADDUBSW adds pairs in 16 bits, which 255 * 127 * 2 exceeds: 8-bit weights keep their sign, which goes to x. Pairs with
// 4-bit weights are so small that a whole block's sum stays within 16 bits (8 * 2 * 15 * 127 = 30,480).
constexpr int kAbove = 0;
MOTET_INLINE VecI raised(VecI v) { return v; }
MOTET_INLINE VecI in_fours(VecI pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
template <int kBits>
MOTET_INLINE VecI dot(VecI sum, VecI weights, VecI x) {
  if constexpr (kBits == 4)
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(weights, x));
  else
    sum = _mm256_add_epi32(sum, in_fours(_mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights))));
  asm("" : "+x"(sum));  // else GCC makes all products of a block first and spills them
  return sum;
}
template <int kBits>
MOTET_INLINE VecI first_sum(int32_t start) {
  return splat(kBits == 4 ? 0 : start);
}
template <int kBits>
MOTET_INLINE VecI whole_sum(VecI sum, int32_t start) {
  return kBits == 4 ? _mm256_add_epi32(in_fours(sum), splat(start)) : sum;
}
static_assert(kBlock == 32);
#endif
MOTET_INLINE VecF to_float(VecI v) { return _mm256_cvtepi32_ps(v); }
MOTET_INLINE VecF times(VecF a, VecF b) { return _mm256_mul_ps(a, b); }
MOTET_INLINE VecF plus(VecF a, VecF b) { return _mm256_add_ps(a, b); }
MOTET_INLINE VecF fused(VecF a, VecF b, VecF c) { return _mm256_fmadd_ps(a, b, c); }
MOTET_INLINE VecF load_fp32(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
MOTET_INLINE VecF load_fp16(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
MOTET_INLINE VecF load_bf16(const void* p) {
  return (VecF)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))), 16);
}
MOTET_INLINE void store_fp32(void* p, VecF v) { _mm256_storeu_ps(static_cast<float*>(p), v); }
MOTET_INLINE void store_bf16(void* p, VecF v) {
  const VecI bits = (VecI)v, even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), splat(1));
  const VecI near = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(even, splat(0x7fff))), 16);
  const VecI whole = _mm256_blendv_epi8(near, splat(0x7fc0), (VecI)_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const VecI words = _mm256_permute4x64_epi64(_mm256_packus_epi32(whole, whole), 0x08);
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_castsi256_si128(words));
}
#else
// ------------------------------------------------------------------------------------------------- any other processor
constexpr int kLanes = 4;
constexpr int kRegisterRows = 2;
constexpr int kAbove = 0;
#define MOTET_DOTS_SUM_IN_32_BITS
typedef int32_t VecI __attribute__((vector_size(16)));
typedef float VecF __attribute__((vector_size(16)));
typedef uint8_t VecB __attribute__((vector_size(16)));
typedef int8_t VecS __attribute__((vector_size(16)));

MOTET_INLINE VecI load_bytes(const uint8_t* p) { return read<VecI>(p); }
MOTET_INLINE VecI low_nibbles(VecI v) { return (VecI)((VecB)v & 15); }
MOTET_INLINE VecI high_nibbles(VecI v) { return (VecI)((VecB)v >> 4); }
MOTET_INLINE VecI raised(VecI v) { return v; }
MOTET_INLINE VecI splat(int32_t v) { return v - VecI{}; }
MOTET_INLINE VecF splat(float v) { return v - VecF{}; }
// Byte `i` of every lane, with its sign.
template <int i>
MOTET_INLINE VecI byte_of(VecI v) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  return (VecI)((v << (24 - 8 * i)) >> 24);
#else
  return (VecI)((v << (8 * i)) >> 24);
#endif
}
template <int kBits>
MOTET_INLINE VecI dot(VecI sum, VecI weights, VecI x) {
  return sum + byte_of<0>(weights) * byte_of<0>(x) + byte_of<1>(weights) * byte_of<1>(x) +
         byte_of<2>(weights) * byte_of<2>(x) + byte_of<3>(weights) * byte_of<3>(x);
}
MOTET_INLINE VecF to_float(VecI v) { return __builtin_convertvector(v, VecF); }
MOTET_INLINE VecF times(VecF a, VecF b) { return a * b; }
MOTET_INLINE VecF plus(VecF a, VecF b) { return a + b; }
MOTET_INLINE VecF fused(VecF a, VecF b, VecF c) { return a * b + c; }
MOTET_INLINE VecF load_fp32(const void* p) { return read<VecF>(p); }
MOTET_INLINE float from_fp16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  const float value = rest < 0x400 ? static_cast<float>(rest) * 0x1p-24f : bits_to_float((rest << 13) + (112u << 23));
  return sign ? -value : value;
}
MOTET_INLINE VecF load_fp16(const void* p) {
  const uint16_t* half = static_cast<const uint16_t*>(p);
  return VecF{from_fp16(half[0]), from_fp16(half[1]), from_fp16(half[2]), from_fp16(half[3])};
}
MOTET_INLINE VecF load_bf16(const void* p) {
  const uint16_t* half = static_cast<const uint16_t*>(p);
  VecF v;
  for (int i = 0; i < 4; ++i) v[i] = bits_to_float(static_cast<uint32_t>(half[i]) << 16);
  return v;
}
MOTET_INLINE void store_fp32(void* p, VecF v) { std::memcpy(p, &v, sizeof(v)); }
MOTET_INLINE void store_bf16(void* p, VecF v) {
  for (int i = 0; i < 4; ++i) static_cast<uint16_t*>(p)[i] = to_bf16(v[i]);
}
#endif

#if defined(MOTET_DOTS_SUM_IN_32_BITS)
// What dot() adds a block's products to, and what it has come to in the end.
template <int kBits>
MOTET_INLINE VecI first_sum(int32_t start) {
  return splat(start);
}
template <int kBits>
MOTET_INLINE VecI whole_sum(VecI sum, int32_t) {
  return sum;
}
#endif

}  // namespace
