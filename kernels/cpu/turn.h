// Turns rows of a cache around: W keys side by side, one lane each, dims rising.
#pragma once

#include "vector.h"

namespace {

// One step of a W x W transpose of 32-bit words: swaps the off-diagonal squares of side S.
template <int... I>
struct Lanes {
  template <int S>
  static inline void swap(vu& a, vu& b) {
    vu low = __builtin_shufflevector(a, b, ((I & S) ? W + I - S : I)...);
    b = __builtin_shufflevector(a, b, ((I & S) ? W + I : I + S)...);
    a = low;
  }
  static inline void interleave(vf a, vf b, float* to) {  // a0 b0 a1 b1 ..
    store(to, __builtin_shufflevector(a, b, (I / 2 + I % 2 * W)...));
    store(to + W, __builtin_shufflevector(a, b, (W / 2 + I / 2 + I % 2 * W)...));
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
#elif MOTET_W == 4
inline void transpose(vu* rows) {
  transpose_step<1>(rows);
  transpose_step<2>(rows);
}
#endif

// block[i] = 32-bit word i of each of W rows from element d on.
template <class T>
inline void turn_words(const T* const* row, int64_t d, vu* block) {
#if MOTET_W == 8
  // Halves of two rows meet as they are loaded; the rest is unpacking within 128-bit parts.
  for (int half = 0; half < 2; ++half, block += 4) {
    __m256i x[4];
    for (int i = 0; i < 4; ++i) {
      const __m128i* low = (const __m128i*)(row[i] + d) + half;
      const __m128i* high = (const __m128i*)(row[i + 4] + d) + half;
      x[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)), _mm_loadu_si128(high), 1);
    }
    const __m256i low01 = _mm256_unpacklo_epi32(x[0], x[1]), high01 = _mm256_unpackhi_epi32(x[0], x[1]);
    const __m256i low23 = _mm256_unpacklo_epi32(x[2], x[3]), high23 = _mm256_unpackhi_epi32(x[2], x[3]);
    block[0] = (vu)_mm256_unpacklo_epi64(low01, low23), block[1] = (vu)_mm256_unpackhi_epi64(low01, low23);
    block[2] = (vu)_mm256_unpacklo_epi64(high01, high23), block[3] = (vu)_mm256_unpackhi_epi64(high01, high23);
  }
#else
  for (int i = 0; i < W; ++i) memcpy(&block[i], (const void*)(row[i] + d), sizeof block[i]);
  transpose(block);
#endif
}

// turned[d][lane] = row of lane, dim d, as fp32; W rows. Dims lie `stride` apart.
inline void turn(const float* const* row, int64_t dim, int64_t stride, float* turned) {
  int64_t d = 0;
  for (; d + W <= dim; d += W) {
    vu block[W];
    turn_words(row, d, block);
    for (int i = 0; i < W; ++i) store(turned + (d + i) * stride, (vf)block[i]);
  }
  for (; d < dim; ++d)
    for (int i = 0; i < W; ++i) turned[d * stride + i] = row[i][d];
}
inline void turn(const bf16* const* row, int64_t dim, int64_t stride, float* turned) {
  int64_t d = 0;
  for (; d + 2 * W <= dim; d += 2 * W) {  // pairs of bf16 travel as one 32-bit word
    vu block[W];
    turn_words(row, d, block);
    for (int i = 0; i < W; ++i) {
      store(turned + (d + 2 * i) * stride, (vf)(block[i] << 16));
      store(turned + (d + 2 * i + 1) * stride, (vf)(block[i] & 0xffff0000u));
    }
  }
  for (; d < dim; ++d)
    for (int i = 0; i < W; ++i) turned[d * stride + i] = widen(row[i][d]);
}
inline void turn(const int8_t* const* row, int64_t dim, int64_t stride, float* turned) {
  int64_t d = 0;
  for (; d + 4 * W <= dim; d += 4 * W) {  // four dims travel as one word
    vu block[W];
    turn_words(row, d, block);
    for (int i = 0; i < W; ++i)
      for (int j = 0; j < 4; ++j)
        store(turned + (d + 4 * i + j) * stride, __builtin_convertvector((vi)(block[i] << (24 - 8 * j)) >> 24, vf));
  }
  for (; d < dim; ++d)
    for (int i = 0; i < W; ++i) turned[d * stride + i] = row[i][d];
}

}  // namespace
