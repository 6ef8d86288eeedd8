// Linear layers over quantized weights, for few rows: decode is bound by reading the weights, so they stay small.
//
// Layout "rows16": a tile is 16 output features, one per 32-bit lane. Inputs go in blocks of 32, a block in 16 pairs of
// neighbours. A vector holds one pair of all 16 features, as 32 words (feature 0 even, feature 0 odd, feature 1 even ...),
// which is what VDPBF16PS multiplies with one broadcast pair of activations. No sum across lanes is ever needed.
//
//   4 bits: u8 [tiles, blocks, 4, 64]: 4 vectors of 32 words; nibble n of vector j is pair 4 j + n.
//   8 bits: i8 [tiles, blocks, 16, 32]: 16 half vectors of 32 signed bytes.
//   16 bits: bf16 [tiles, blocks, 16, 32]: the vectors themselves; no scale.
//   scale, minimum: fp16 or fp32 [tiles, groups, 16]; a group is one or more blocks. value = scale * (q - zero) + minimum
//
// Small integers are exact in bf16, products are summed in fp32 and scaled once per block: the only roundings are those
// of the activations (given in bf16) and of the result. Out is padded to whole tiles with zeros.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#if defined(__x86_64__)
// GCC 12 takes the undefined vectors inside its own intrinsics for ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#endif
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

namespace {

constexpr int64_t kTile = 16;    // output features of a tile
constexpr int64_t kBlock = 32;   // inputs of a block
constexpr int64_t kPairs = kBlock / 2;

struct Weight {
  const uint8_t* quants;
  const void* scale;
  const void* minimum;  // null: none
  bool half;            // scale and minimum are fp16, else fp32
  int bits;
  int zero;
  int64_t out, in, tiles, blocks, groups, blocks_per_group;

  int64_t block_bytes() const { return bits * kTile * kBlock / 8; }
};

template <int kBits>
constexpr int64_t kBlockBytes = kBits * kTile * kBlock / 8;

Weight describe(const at::Tensor& quants, const std::optional<at::Tensor>& scale, const std::optional<at::Tensor>& minimum,
                int64_t bits, int64_t zero, int64_t out) {
  TORCH_CHECK(bits == 4 || bits == 8 || bits == 16, "bits must be 4, 8 or 16");
  TORCH_CHECK(quants.is_contiguous() && quants.dim() == 3, "quants must be [tiles, blocks, bytes]");
  Weight w{};
  w.quants = static_cast<const uint8_t*>(quants.const_data_ptr());
  w.bits = static_cast<int>(bits);
  w.zero = static_cast<int>(zero);
  w.out = out;
  w.tiles = quants.size(0);
  w.blocks = quants.size(1);
  w.in = w.blocks * kBlock;
  w.groups = 1;
  TORCH_CHECK(quants.size(2) * static_cast<int64_t>(quants.element_size()) == w.block_bytes(), "quants do not fit bits");
  TORCH_CHECK(out <= w.tiles * kTile && out > (w.tiles - 1) * kTile, "out does not fit the tiles");
  TORCH_CHECK(scale.has_value() == (bits != 16), "4 and 8 bits need a scale, 16 have none");
  if (scale.has_value()) {
    TORCH_CHECK(scale->is_contiguous() && scale->dim() == 3 && scale->size(2) == kTile, "scale must be [tiles, groups, 16]");
    TORCH_CHECK(scale->scalar_type() == at::kHalf || scale->scalar_type() == at::kFloat, "scale must be fp16 or fp32");
    w.groups = scale->size(1);
    TORCH_CHECK(w.groups > 0 && w.blocks % w.groups == 0 && scale->size(0) == w.tiles, "scale does not fit quants");
    w.scale = scale->const_data_ptr();
    w.half = scale->scalar_type() == at::kHalf;
  }
  if (minimum.has_value()) {
    TORCH_CHECK(scale.has_value() && minimum->is_contiguous() && minimum->sizes() == scale->sizes() &&
                minimum->scalar_type() == scale->scalar_type(), "minimum must look like scale");
    w.minimum = minimum->const_data_ptr();
  }
  w.blocks_per_group = w.blocks / w.groups;
  return w;
}

uint16_t bf16_of(float value) { return c10::BFloat16(value).x; }
float float_of(uint16_t bits) { return c10::detail::f32_from_bits(bits); }

float half_to_float(uint16_t h) {
  c10::Half value;
  value.x = h;
  return static_cast<float>(value);
}

float factor(const Weight& w, const void* table, int64_t tile, int64_t group, int64_t lane) {
  const int64_t at = (tile * w.groups + group) * kTile + lane;
  return w.half ? half_to_float(static_cast<const uint16_t*>(table)[at]) : static_cast<const float*>(table)[at];
}

// What the scale of input k of a block multiplies, for one lane.
float quant(const Weight& w, const uint8_t* block, int64_t k, int64_t lane) {
  const int64_t pair = k / 2, word = 2 * lane + k % 2;
  if (w.bits == 16) return float_of(reinterpret_cast<const uint16_t*>(block)[pair * 32 + word]);
  if (w.bits == 8) return static_cast<float>(reinterpret_cast<const int8_t*>(block)[pair * 32 + word]) - static_cast<float>(w.zero);
  const int64_t vector = pair / 4, nibble = pair % 4;
  const uint8_t byte = block[vector * 64 + word * 2 + nibble / 2];
  return static_cast<float>(((byte >> (4 * (nibble % 2))) & 15) - w.zero);
}

// Sums of each block of each row, for the minimum's share of the product. x [rows, in] bf16 -> [rows, blocks].
std::vector<float> block_sums(const uint16_t* x, int64_t rows, int64_t blocks) {
  std::vector<float> sums(static_cast<size_t>(rows * blocks));
  for (int64_t i = 0; i < rows * blocks; ++i) {
    float total = 0;
    for (int64_t k = 0; k < kBlock; ++k) total += float_of(x[i * kBlock + k]);
    sums[static_cast<size_t>(i)] = total;
  }
  return sums;
}

// ------------------------------------------------------------------------------------------------- any other processor

// The loops over 16 lanes are what the compiler vectorizes. acc [num_tiles][rows][16].
__attribute__((always_inline)) inline void any_tiles(const Weight& w, const uint16_t* x, const float* sums, int64_t rows,
                                                     int64_t tile, int64_t num_tiles, float* acc) {
  float scale[kTile], minimum[kTile], q[kTile];
  std::memset(acc, 0, sizeof(float) * static_cast<size_t>(num_tiles * rows * kTile));
  for (const int64_t end = tile + num_tiles; tile < end; ++tile, acc += rows * kTile) {
    for (int64_t b = 0; b < w.blocks; ++b) {
      const uint8_t* block = w.quants + (tile * w.blocks + b) * w.block_bytes();
      const int64_t group = b / w.blocks_per_group;
      for (int64_t i = 0; i < kTile; ++i) {
        scale[i] = w.scale ? factor(w, w.scale, tile, group, i) : 1.0f;
        minimum[i] = w.minimum ? factor(w, w.minimum, tile, group, i) : 0.0f;
      }
      for (int64_t k = 0; k < kBlock; ++k) {
        const int64_t pair = k / 2;
        if (w.bits == 16) {
          const uint16_t* words = reinterpret_cast<const uint16_t*>(block) + pair * 32 + k % 2;
          for (int64_t i = 0; i < kTile; ++i) q[i] = float_of(words[2 * i]);
        } else if (w.bits == 8) {
          const int8_t* bytes = reinterpret_cast<const int8_t*>(block) + pair * 32 + k % 2;
          for (int64_t i = 0; i < kTile; ++i) q[i] = scale[i] * static_cast<float>(bytes[2 * i] - w.zero);
        } else {
          const uint8_t* bytes = block + pair / 4 * 64 + 2 * (k % 2) + pair % 4 / 2;
          const int shift = 4 * static_cast<int>(pair % 2);
          for (int64_t i = 0; i < kTile; ++i) q[i] = scale[i] * static_cast<float>(((bytes[4 * i] >> shift) & 15) - w.zero);
        }
        for (int64_t r = 0; r < rows; ++r) {
          const float value = float_of(x[r * w.in + b * kBlock + k]);
          for (int64_t i = 0; i < kTile; ++i) acc[r * kTile + i] += q[i] * value;
        }
      }
      if (w.minimum)
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t i = 0; i < kTile; ++i) acc[r * kTile + i] += minimum[i] * sums[r * w.blocks + b];
    }
  }
}

void plain_tiles(const Weight& w, const uint16_t* x, const float* sums, int64_t rows, int64_t tile, int64_t num_tiles, float* acc) {
  any_tiles(w, x, sums, rows, tile, num_tiles, acc);
}
#if defined(__x86_64__)
__attribute__((target("avx2,fma,f16c"))) void avx2_tiles(const Weight& w, const uint16_t* x, const float* sums, int64_t rows,
                                                         int64_t tile, int64_t num_tiles, float* acc) {
  any_tiles(w, x, sums, rows, tile, num_tiles, acc);
}
#endif

// ------------------------------------------------------------------------------------------------------- AVX-512 BF16

#if defined(__x86_64__)
#define MOTET_BF16_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c,avx2,fma")))
#define MOTET_BF16_INLINE MOTET_BF16_TARGET __attribute__((always_inline)) inline

MOTET_BF16_INLINE __m512 load_factor(const Weight& w, const void* table, int64_t at) {
  if (!w.half) return _mm512_loadu_ps(static_cast<const float*>(table) + at);
  const uint16_t* half = static_cast<const uint16_t*>(table) + at;
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(half)));
}

MOTET_BF16_INLINE __m512bh broadcast_pair(const uint16_t* x) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof(pair));
  return (__m512bh)_mm512_set1_epi32(pair);
}

// Pair `kPair` of a block as 32 bf16, whole numbers. The table of 4 bits repeats after 16, so that the fifth bit of an
// index, which is its neighbour's, does not matter.
template <int kBits, int kPair>
MOTET_BF16_INLINE __m512bh load_pair(const uint8_t* block, __m512i table) {
  if constexpr (kBits == 16) {
    return (__m512bh)_mm512_loadu_si512(block + kPair * 64);
  } else if constexpr (kBits == 8) {
    const __m128i* bytes = reinterpret_cast<const __m128i*>(block + kPair * 32);
    const __m512 low = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
    const __m512 high = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1)));
    return _mm512_cvtne2ps_pbh(high, low);
  } else {
    const __m512i words = _mm512_loadu_si512(block + kPair / 4 * 64);
    return (__m512bh)_mm512_permutexvar_epi16(_mm512_maskz_srli_epi16(0xffffffff, words, 4 * (kPair % 4)), table);
  }
}

template <int kBits, int kTiles, int kRows, int kPair>
MOTET_BF16_INLINE void multiply_pairs(const uint8_t* const* block, const uint16_t* x, int64_t in, __m512i table,
                                      __m512 (&part)[kTiles][kRows]) {
  __m512bh q[kTiles];
#pragma GCC unroll 8
  for (int t = 0; t < kTiles; ++t) q[t] = load_pair<kBits, kPair>(block[t], table);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const __m512bh pair = broadcast_pair(x + r * in + 2 * kPair);
#pragma GCC unroll 8
    for (int t = 0; t < kTiles; ++t) part[t][r] = _mm512_dpbf16_ps(part[t][r], q[t], pair);
  }
  if constexpr (kPair + 1 < kPairs) multiply_pairs<kBits, kTiles, kRows, kPair + 1>(block, x, in, table, part);
}

// kRows rows of x against kTiles tiles; sums land in out [kTiles][stride rows][16].
template <int kBits, int kTiles, int kRows>
MOTET_BF16_TARGET void bf16_rows(const Weight& w, const uint16_t* x, const float* sums, int64_t tile, __m512i table,
                                 float* out, int64_t stride) {
  __m512 acc[kTiles][kRows];
  const uint8_t* block[kTiles];
#pragma GCC unroll 8
  for (int t = 0; t < kTiles; ++t) {
    block[t] = w.quants + (tile + t) * w.blocks * w.block_bytes();
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) acc[t][r] = _mm512_setzero_ps();
  }
  if constexpr (kBits == 16) {  // nothing to scale: one sum over all blocks
    for (int64_t b = 0; b < w.blocks; ++b) {
      multiply_pairs<kBits, kTiles, kRows, 0>(block, x + b * kBlock, w.in, table, acc);
#pragma GCC unroll 8
      for (int t = 0; t < kTiles; ++t) block[t] += kBlockBytes<kBits>;
    }
  } else {
    int64_t factors = tile * w.groups * kTile, left = w.blocks_per_group;
    for (int64_t b = 0; b < w.blocks; ++b) {
      __m512 part[kTiles][kRows];
#pragma GCC unroll 8
      for (int t = 0; t < kTiles; ++t)
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) part[t][r] = _mm512_setzero_ps();
      multiply_pairs<kBits, kTiles, kRows, 0>(block, x + b * kBlock, w.in, table, part);
#pragma GCC unroll 8
      for (int t = 0; t < kTiles; ++t) {
        const __m512 scale = load_factor(w, w.scale, factors + t * w.groups * kTile);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) acc[t][r] = _mm512_fmadd_ps(part[t][r], scale, acc[t][r]);
        if (w.minimum) {
          const __m512 minimum = load_factor(w, w.minimum, factors + t * w.groups * kTile);
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r)
            acc[t][r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sums[r * w.blocks + b]), acc[t][r]);
        }
        block[t] += kBlockBytes<kBits>;
      }
      if (--left == 0) {
        left = w.blocks_per_group;
        factors += kTile;
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTiles; ++t)
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(out + (t * stride + r) * kTile, acc[t][r]);
}

template <int kBits, int kTiles>
MOTET_BF16_TARGET void bf16_tiles_of(const Weight& w, const uint16_t* x, const float* sums, int64_t rows, int64_t tile,
                                     __m512i table, float* acc) {
  for (int64_t r = 0; r < rows;) {
    const uint16_t* xr = x + r * w.in;
    const float* sr = sums + r * w.blocks;
    float* out = acc + r * kTile;
    const int64_t left = rows - r;
#define MOTET_CASE(N)                                                        \
  if (left >= N) {                                                           \
    bf16_rows<kBits, kTiles, N>(w, xr, sr, tile, table, out, rows);          \
    r += N;                                                                  \
    continue;                                                                \
  }
    if constexpr (kTiles <= 2 && kBits == 16) {  // without partial sums more rows fit the registers
      MOTET_CASE(12)
    }
    if constexpr (kTiles <= 2) {
      MOTET_CASE(8)
    }
    MOTET_CASE(4) MOTET_CASE(3) MOTET_CASE(2) MOTET_CASE(1)
#undef MOTET_CASE
  }
}

// Activations are read once for several tiles: 4 with few rows, 2 with many (that is what fits the registers).
template <int kBits>
MOTET_BF16_TARGET void bf16_run(const Weight& w, const uint16_t* x, const float* sums, int64_t rows, int64_t tile,
                                int64_t num_tiles, float* acc) {
  uint16_t values[32];
  for (int i = 0; i < 32; ++i) values[i] = bf16_of(static_cast<float>(i % 16 - w.zero));
  const __m512i table = _mm512_loadu_si512(values);
  const int64_t end = tile + num_tiles;
  for (; rows <= 4 && tile + 4 <= end; tile += 4, acc += 4 * rows * kTile) bf16_tiles_of<kBits, 4>(w, x, sums, rows, tile, table, acc);
  for (; tile + 2 <= end; tile += 2, acc += 2 * rows * kTile) bf16_tiles_of<kBits, 2>(w, x, sums, rows, tile, table, acc);
  for (; tile < end; ++tile, acc += rows * kTile) bf16_tiles_of<kBits, 1>(w, x, sums, rows, tile, table, acc);
}

void bf16_tiles(const Weight& w, const uint16_t* x, const float* sums, int64_t rows, int64_t tile, int64_t num_tiles, float* acc) {
  const auto run = w.bits == 4 ? bf16_run<4> : w.bits == 8 ? bf16_run<8> : bf16_run<16>;
  run(w, x, sums, rows, tile, num_tiles, acc);
}

// Rounds to nearest even like everything else here: two vectors of the same features, even and odd input -> 16 pairs.
MOTET_BF16_INLINE __m512i interleave(__m512 even, __m512 odd) {
  const __m512i e = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
  const __m512i o = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
  return _mm512_or_si512(e, _mm512_maskz_slli_epi32(0xffff, o, 16));
}

MOTET_BF16_INLINE void transpose16(__m512i (&v)[16]) {
  __m512i u[16];
  for (int i = 0; i < 16; i += 2) {
    u[i] = _mm512_maskz_unpacklo_epi32(0xffff, v[i], v[i + 1]);
    u[i + 1] = _mm512_maskz_unpackhi_epi32(0xffff, v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_maskz_unpacklo_epi64(0xff, u[i], u[i + 2]);
    v[i + 1] = _mm512_maskz_unpackhi_epi64(0xff, u[i], u[i + 2]);
    v[i + 2] = _mm512_maskz_unpacklo_epi64(0xff, u[i + 1], u[i + 3]);
    v[i + 3] = _mm512_maskz_unpackhi_epi64(0xff, u[i + 1], u[i + 3]);
  }
  // v[4 a + c] now holds, in quarter q, rows 4 a .. 4 a + 3 of column 4 q + c.
  for (int c = 0; c < 4; ++c) {
    const __m512i low01 = _mm512_maskz_shuffle_i32x4(0xffff, v[c], v[4 + c], 0x44), high01 = _mm512_maskz_shuffle_i32x4(0xffff, v[c], v[4 + c], 0xee);
    const __m512i low23 = _mm512_maskz_shuffle_i32x4(0xffff, v[8 + c], v[12 + c], 0x44), high23 = _mm512_maskz_shuffle_i32x4(0xffff, v[8 + c], v[12 + c], 0xee);
    u[c] = _mm512_maskz_shuffle_i32x4(0xffff, low01, low23, 0x88);
    u[4 + c] = _mm512_maskz_shuffle_i32x4(0xffff, low01, low23, 0xdd);
    u[8 + c] = _mm512_maskz_shuffle_i32x4(0xffff, high01, high23, 0x88);
    u[12 + c] = _mm512_maskz_shuffle_i32x4(0xffff, high01, high23, 0xdd);
  }
  for (int i = 0; i < 16; ++i) v[i] = u[i];
}

template <int kBits, int kPair>
MOTET_BF16_INLINE void unpack_pairs(const uint8_t* block, __m512i table, __m512 scale, __m512 minimum, __m512i (&v)[16]) {
  const __m512i q = (__m512i)load_pair<kBits, kPair>(block, table);
  if constexpr (kBits == 16) {
    v[kPair] = q;
  } else {
    const __m512 even = (__m512)_mm512_maskz_slli_epi32(0xffff, q, 16);
    const __m512 odd = (__m512)_mm512_and_si512(q, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
    // Product and sum rounded apart, as the reference does it: the same bits everywhere.
    v[kPair] = interleave(_mm512_add_ps(_mm512_mul_ps(even, scale), minimum), _mm512_add_ps(_mm512_mul_ps(odd, scale), minimum));
  }
  if constexpr (kPair + 1 < kPairs) unpack_pairs<kBits, kPair + 1>(block, table, scale, minimum, v);
}

// One tile as plain bf16 rows: out [lanes][in].
template <int kBits>
MOTET_BF16_TARGET void bf16_unpack(const Weight& w, int64_t tile, int64_t lanes, uint16_t* out) {
  uint16_t values[32];
  for (int i = 0; i < 32; ++i) values[i] = bf16_of(static_cast<float>(i % 16 - w.zero));
  const __m512i table = _mm512_loadu_si512(values);
  for (int64_t b = 0; b < w.blocks; ++b) {
    const uint8_t* block = w.quants + (tile * w.blocks + b) * w.block_bytes();
    const int64_t at = (tile * w.groups + b / w.blocks_per_group) * kTile;
    const __m512 scale = w.scale ? load_factor(w, w.scale, at) : _mm512_set1_ps(1.0f);
    const __m512 minimum = w.minimum ? load_factor(w, w.minimum, at) : _mm512_set1_ps(-0.0f);
    __m512i v[16];
    unpack_pairs<kBits, 0>(block, table, scale, minimum, v);
    transpose16(v);
    for (int64_t i = 0; i < lanes; ++i) _mm512_storeu_si512(out + i * w.in + b * kBlock, v[i]);
  }
}
#endif

using TilesFn = void (*)(const Weight&, const uint16_t*, const float*, int64_t, int64_t, int64_t, float*);

TilesFn choose_tiles() {
#if defined(__x86_64__)
  const char* forced = std::getenv("MOTET_CPU_ISA");  // "plain" or "avx2", for tests
  const std::string isa = forced ? forced : "";
  if (isa == "plain") return plain_tiles;
  if (isa != "avx2" && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw")) return bf16_tiles;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2_tiles;
#endif
  return plain_tiles;
}

// ----------------------------------------------------------------------------------------------------------------- ops

// x bf16 [rows, in] -> bf16 [rows, out]
at::Tensor rows16_linear(const at::Tensor& x, const at::Tensor& quants, const std::optional<at::Tensor>& scale,
                         const std::optional<at::Tensor>& minimum, const std::optional<at::Tensor>& bias, int64_t bits,
                         int64_t zero, int64_t out) {
  static const TilesFn tiles_fn = choose_tiles();
  const Weight w = describe(quants, scale, minimum, bits, zero, out);
  TORCH_CHECK(x.dim() == 2 && x.size(1) == w.in && x.scalar_type() == at::kBFloat16, "x must be bf16 [rows, ", w.in, "]");
  const at::Tensor xc = x.contiguous();
  const int64_t rows = xc.size(0);
  at::Tensor y = at::empty({rows, out}, xc.options());
  if (rows == 0) return y;
  std::optional<at::Tensor> bias32;
  if (bias.has_value()) {
    TORCH_CHECK(bias->dim() == 1 && bias->size(0) == out, "bias must be [out]");
    bias32 = bias->to(at::kFloat).contiguous();
  }
  const float* bias_data = bias32 ? bias32->const_data_ptr<float>() : nullptr;
  const uint16_t* x_data = static_cast<const uint16_t*>(xc.const_data_ptr());
  uint16_t* y_data = static_cast<uint16_t*>(y.mutable_data_ptr());
  const std::vector<float> sums = w.minimum ? block_sums(x_data, rows, w.blocks) : std::vector<float>();
  // Chunks of 4 tiles. A piece of work below some 100,000 products costs less than waking another thread.
  const int64_t chunks = (w.tiles + 3) / 4;
  const int64_t grain = 100000 / (rows * w.in * kTile * 4) + 1;
  at::parallel_for(0, chunks, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> acc(static_cast<size_t>(rows * 4 * kTile));
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = chunk * 4, count = std::min<int64_t>(4, w.tiles - first);
      tiles_fn(w, x_data, sums.data(), rows, first, count, acc.data());
      for (int64_t t = 0; t < count; ++t) {
        const int64_t o = (first + t) * kTile, lanes = std::min(kTile, out - o);
        for (int64_t r = 0; r < rows; ++r) {
          const float* from = acc.data() + (t * rows + r) * kTile;
          for (int64_t i = 0; i < lanes; ++i) y_data[r * out + o + i] = bf16_of(from[i] + (bias_data ? bias_data[o + i] : 0.0f));
        }
      }
    }
  });
  return y;
}

// The whole weight as bf16 [out, in], where the processor has the instructions; false where not.
bool unpack_all(const Weight& w, uint16_t* y) {
#if defined(__x86_64__)
  if (choose_tiles() != bf16_tiles) return false;
  const auto unpack = w.bits == 4 ? bf16_unpack<4> : w.bits == 8 ? bf16_unpack<8> : bf16_unpack<16>;
  at::parallel_for(0, w.tiles, 4, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile)
      unpack(w, tile, std::min(kTile, w.out - tile * kTile), y + tile * kTile * w.in);
  });
  return true;
#else
  return false;
#endif
}

// ids [n] -> the rows `ids` of the weight, fp32 or bf16 [n, in]. Without ids: all rows.
at::Tensor rows16_take(const std::optional<at::Tensor>& ids, const at::Tensor& quants, const std::optional<at::Tensor>& scale,
                       const std::optional<at::Tensor>& minimum, int64_t bits, int64_t zero, int64_t out,
                       at::ScalarType dtype) {
  const Weight w = describe(quants, scale, minimum, bits, zero, out);
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, "dtype must be fp32 or bf16");
  std::optional<at::Tensor> order;
  if (ids.has_value()) {
    order = ids->to(at::kLong).contiguous();
    TORCH_CHECK(order->dim() == 1, "ids must be [n]");
  }
  const int64_t* id = order ? order->const_data_ptr<int64_t>() : nullptr;
  const int64_t n = order ? order->size(0) : out;
  for (int64_t i = 0; id && i < n; ++i) TORCH_CHECK(id[i] >= 0 && id[i] < out, "id ", id[i], " is not in 0..", out);
  at::Tensor y = at::empty({n, w.in}, quants.options().dtype(dtype));
  void* y_data = y.mutable_data_ptr();
  if (!id && dtype == at::kBFloat16 && unpack_all(w, static_cast<uint16_t*>(y_data))) return y;
  at::parallel_for(0, n, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = id ? id[i] : i, tile = row / kTile, lane = row % kTile;
      for (int64_t b = 0; b < w.blocks; ++b) {
        const uint8_t* block = w.quants + (tile * w.blocks + b) * w.block_bytes();
        const float s = w.scale ? factor(w, w.scale, tile, b / w.blocks_per_group, lane) : 1.0f;
        const float m = w.minimum ? factor(w, w.minimum, tile, b / w.blocks_per_group, lane) : 0.0f;
        for (int64_t k = 0; k < kBlock; ++k) {
          const float value = s * quant(w, block, k, lane) + m;
          const int64_t at = i * w.in + b * kBlock + k;
          if (dtype == at::kFloat)
            static_cast<float*>(y_data)[at] = value;
          else
            static_cast<uint16_t*>(y_data)[at] = bf16_of(value);
        }
      }
    }
  });
  return y;
}

// Whether this processor multiplies bf16 pairs itself, so that 16 bits are worth it.
bool rows16_is_native() {
#if defined(__x86_64__)
  return choose_tiles() == bf16_tiles;
#else
  return false;
#endif
}

// u8 (4 bits, 0..15), i8 or bf16 [out, in] -> quants [tiles, blocks, 256 | 512 | 512 bf16]
at::Tensor rows16_pack(const at::Tensor& values, int64_t bits) {
  const auto expected = bits == 4 ? at::kByte : bits == 8 ? at::kChar : at::kBFloat16;
  TORCH_CHECK(bits == 4 || bits == 8 || bits == 16, "bits must be 4, 8 or 16");
  TORCH_CHECK(values.dim() == 2 && values.size(1) % kBlock == 0 && values.scalar_type() == expected,
              "values must be u8 (4 bits), i8 (8) or bf16 (16) [out, multiple of 32]");
  const at::Tensor src = values.contiguous();
  const int64_t out = src.size(0), in = src.size(1), tiles = (out + kTile - 1) / kTile, blocks = in / kBlock;
  const int64_t extent = bits == 4 ? 256 : 512;
  at::Tensor packed = at::zeros({tiles, blocks, extent}, src.options());
  const void* from = src.const_data_ptr();
  void* to = packed.mutable_data_ptr();
  at::parallel_for(0, tiles, 4, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile)
      for (int64_t lane = 0; lane < std::min(kTile, out - tile * kTile); ++lane)
        for (int64_t b = 0; b < blocks; ++b) {
          const int64_t row = (tile * kTile + lane) * in + b * kBlock, block = (tile * blocks + b) * extent;
          for (int64_t k = 0; k < kBlock; ++k) {
            const int64_t pair = k / 2, word = 2 * lane + k % 2;
            if (bits == 16) {
              static_cast<uint16_t*>(to)[block + pair * 32 + word] = static_cast<const uint16_t*>(from)[row + k];
            } else if (bits == 8) {
              static_cast<uint8_t*>(to)[block + pair * 32 + word] = static_cast<const uint8_t*>(from)[row + k];
            } else {
              const int value = (static_cast<const uint8_t*>(from)[row + k] & 15) << (4 * (pair % 2));
              static_cast<uint8_t*>(to)[block + pair / 4 * 64 + word * 2 + pair % 4 / 2] |= static_cast<uint8_t>(value);
            }
          }
        }
  });
  return packed;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(motet_cpu, m) {
  m.def("rows16_linear(Tensor x, Tensor quants, Tensor? scale, Tensor? minimum, Tensor? bias, int bits, int zero, int out) -> Tensor");
  m.def("rows16_take(Tensor? ids, Tensor quants, Tensor? scale, Tensor? minimum, int bits, int zero, int out, ScalarType dtype) -> Tensor");
  m.def("rows16_is_native() -> bool", rows16_is_native);
  m.def("rows16_pack(Tensor values, int bits) -> Tensor");
}

TORCH_LIBRARY_IMPL(motet_cpu, CPU, m) {
  m.impl("rows16_linear", rows16_linear);
  m.impl("rows16_take", rows16_take);
  m.impl("rows16_pack", rows16_pack);
}
