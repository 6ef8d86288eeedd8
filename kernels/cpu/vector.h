// Vectors of W fp32 lanes on GCC/Clang vector extensions, and the few functions the kernels need of them.
//
// Included by rows.cpp and attend.cpp, which are compiled once per instruction set; everything sits in an unnamed
// namespace so that the linker never mixes code of two instruction sets. No standard templates here for the same
// reason.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define MOTET_W 16
#elif defined(__AVX2__)
#define MOTET_W 8
#else
#define MOTET_W 4
#endif

namespace {

constexpr int W = MOTET_W;
typedef float vf __attribute__((vector_size(4 * MOTET_W)));
typedef int32_t vi __attribute__((vector_size(4 * MOTET_W)));
typedef uint32_t vu __attribute__((vector_size(4 * MOTET_W)));
typedef uint16_t vh __attribute__((vector_size(2 * MOTET_W)));
typedef int8_t vb __attribute__((vector_size(MOTET_W)));
typedef float vf_any __attribute__((vector_size(4 * MOTET_W), aligned(4), may_alias));
typedef uint32_t vu_any __attribute__((vector_size(4 * MOTET_W), aligned(2), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(2 * MOTET_W), aligned(2), may_alias));

struct bf16 {
  uint16_t bits;
};

inline vf splat(float x) { return x - vf{}; }
inline vi splat_int(int32_t x) { return x - vi{}; }
inline vf pick(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
inline vf larger(vf a, vf b) { return a > b ? a : b; }

inline vf load(const float* p) { return *(const vf_any*)p; }
// Widening and narrowing of 16-bit lanes; compilers make several instructions of __builtin_convertvector here.
#if defined(__AVX512F__)
inline vu widen_lanes(vh x) { return (vu)_mm512_cvtepu16_epi32((__m256i)x); }
inline vh narrow_lanes(vu x) { return (vh)_mm512_cvtepi32_epi16((__m512i)x); }
#elif defined(__AVX2__)
inline vu widen_lanes(vh x) { return (vu)_mm256_cvtepu16_epi32((__m128i)x); }
inline vh narrow_lanes(vu x) {
  const __m256i packed = _mm256_packus_epi32((__m256i)x, (__m256i)x);  // lanes are below 2^16 here
  return (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 8));
}
#else
inline vu widen_lanes(vh x) { return __builtin_convertvector(x, vu); }
inline vh narrow_lanes(vu x) { return __builtin_convertvector(x, vh); }
#endif

inline vf load(const bf16* p) { return (vf)(widen_lanes(*(const vh_any*)p) << 16); }
inline vf load(const int8_t* p) {
  vb bytes;
  memcpy(&bytes, p, sizeof bytes);
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_set_epi64x(0, (int64_t)bytes)));
#else
  return __builtin_convertvector(bytes, vf);
#endif
}
inline void store(float* p, vf x) { *(vf_any*)p = x; }
inline void store(bf16* p, vf x) {
  vu bits = (vu)x;
  vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest even
  vi nan = (vi)(x != x);
  rounded = ((vu)nan & 0x7fc0) | (~(vu)nan & rounded);
  *(vh_any*)p = narrow_lanes(rounded);
}

// The first n < W lanes; the rest of a loaded vector is 0.
template <class T>
inline vf load_first(const T* p, int64_t n) {
  T buffer[W];
  memset((void*)buffer, 0, sizeof buffer);
  memcpy((void*)buffer, (const void*)p, n * sizeof(T));
  return load(buffer);
}
template <class T>
inline void store_first(T* p, vf x, int64_t n) {
  T buffer[W];
  store(buffer, x);
  memcpy((void*)p, (const void*)buffer, n * sizeof(T));
}

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
inline float widen(int8_t x) { return x; }
inline void narrow(float* p, float x) { *p = x; }
inline void narrow(bf16* p, float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  p->bits = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float sum_lanes(vf x) {  // a tree, in one order on every instruction set of the same width
  float part[W];
  store(part, x);
  for (int step = W / 2; step; step /= 2)
    for (int i = 0; i < step; ++i) part[i] += part[i + step];
  return part[0];
}
inline float max_lanes(vf x) {
  float part[W];
  store(part, x);
  for (int step = W / 2; step; step /= 2)
    for (int i = 0; i < step; ++i) part[i] = part[i] > part[i + step] ? part[i] : part[i + step];
  return part[0];
}

// exp with about 2 ulp error; exactly 1 at 0, exactly 0 below -87 (so at -inf), saturates above 88.
inline vf exp_lanes(vf x) {
  vi tiny = (vi)(x < splat(-87.0f));
  x = larger(x, splat(-87.0f));
  x = x < splat(88.0f) ? x : splat(88.0f);
  vf shifted = x * 1.44269504088896341f + 12582912.0f;  // adding 1.5 * 2^23 rounds to the nearest integer
  vf turns = shifted - 12582912.0f;
  vf r = x - turns * 0.693359375f;
  r = r - turns * -2.12194440e-4f;
  vf y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  vi exponent = ((vi)shifted - 0x4b400000) << 23;
  return pick(~tiny, (vf)((vi)y + exponent), vf{});
}

// Natural logarithm of positive normal numbers, about 2 ulp.
inline vf log_lanes(vf x) {
  vi bits = (vi)x;
  vi exponent = ((bits - 0x3f3504f3) >> 23);  // mantissa in [sqrt(1/2), sqrt(2))
  vf m = (vf)(bits - (exponent << 23)) - 1.0f;
  vf e = __builtin_convertvector(exponent, vf);
  vf y = splat(7.0376836292e-2f);
  y = y * m - 1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m - 1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m - 1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m - 2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  vf square = m * m;
  y = y * m * square + e * -2.12194440e-4f - 0.5f * square;
  return m + y + e * 0.693359375f;
}

inline vf tanh_lanes(vf x) {
  vf square = x * x;
  vf small =
      x +
      x * square * (-3.33333333e-1f + square * (1.33333333e-1f + square * (-5.39682540e-2f + square * 2.18694885e-2f)));
  vf large = 1.0f - 2.0f / (exp_lanes(2.0f * x) + 1.0f);
  return pick((vi)(square < splat(0.0625f)), small, large);
}

}  // namespace
