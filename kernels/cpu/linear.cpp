// Linear layers over packed weights: decode is bound by reading them, so they stay small.
//
// Layout "rows16": a tile is 16 output features, one per 32-bit lane. Inputs go in blocks of 32. No sum across lanes is
// ever needed.
//
//   4 bits: u8 [tiles, blocks, 4, 64]: 4 vectors of 32 words (feature 0 even, feature 0 odd, feature 1 even ...); nibble n
//     of the words of vector j holds the neighbours 2 (4 j + n) and 2 (4 j + n) + 1. Read as bytes, the low nibbles of
//     vector j are inputs 8 j + {0, 4, 1, 5} of each feature and the high ones 8 j + {2, 6, 3, 7}.
//   8 bits: i8 [tiles, blocks, 8, 64]: vector j holds inputs 4 j .. 4 j + 3 of each feature.
//   16 bits: bf16 [tiles, blocks, 16, 32]: vector j holds inputs 2 j, 2 j + 1 of each feature; no scale.
//   scale, minimum: fp16 or fp32 [tiles, groups, 16]; a group is one or more blocks. value = scale * (q - zero) + minimum
//
// 4 and 8 bits meet activations rounded to 8 bits (int8.cpp), 16 bits are multiplied as they are (bf16.cpp). Out is padded to
// whole tiles with zeros.

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

#include "gemm.h"
#include "ops.h"

namespace {

using motet::kBlock;
using motet::kTile;
using motet::Weight;

constexpr int64_t kPairs = kBlock / 2;

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
  if (w.bits == 8) return static_cast<float>(reinterpret_cast<const int8_t*>(block)[k / 4 * 64 + 4 * lane + k % 4] - w.zero);
  const int64_t vector = pair / 4, nibble = pair % 4;
  const uint8_t byte = block[vector * 64 + word * 2 + nibble / 2];
  return static_cast<float>(((byte >> (4 * (nibble % 2))) & 15) - w.zero);
}

// ------------------------------------------------------------------------------------------------ unpacking to bf16
#if defined(__x86_64__)
MOTET_BF16_INLINE __m512 load_factor(const Weight& w, const void* table, int64_t at) {
  if (!w.half) return _mm512_loadu_ps(static_cast<const float*>(table) + at);
  const uint16_t* half = static_cast<const uint16_t*>(table) + at;
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(half)));
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

// Pair kPair of a block of 4 or 8 bits as whole numbers, its even and its odd inputs.
template <int kBits, int kPair>
MOTET_BF16_INLINE void integers(const uint8_t* block, int zero, __m512& even, __m512& odd) {
  __m512i e, o;
  if constexpr (kBits == 8) {
    const __m512i four = _mm512_loadu_si512(block + kPair / 2 * 64);
    e = _mm512_maskz_srai_epi32(0xffff, _mm512_maskz_slli_epi32(0xffff, four, kPair % 2 ? 8 : 24), 24);
    o = _mm512_maskz_srai_epi32(0xffff, _mm512_maskz_slli_epi32(0xffff, four, kPair % 2 ? 0 : 16), 24);
  } else {
    const __m512i words = _mm512_loadu_si512(block + kPair / 4 * 64), mask = _mm512_set1_epi32(15);
    e = _mm512_and_si512(_mm512_maskz_srli_epi32(0xffff, words, 4 * (kPair % 4)), mask);
    o = _mm512_and_si512(_mm512_maskz_srli_epi32(0xffff, words, 16 + 4 * (kPair % 4)), mask);
  }
  even = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_sub_epi32(e, _mm512_set1_epi32(zero)));
  odd = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_sub_epi32(o, _mm512_set1_epi32(zero)));
}

template <int kBits, int kPair>
MOTET_BF16_INLINE void unpack_pairs(const uint8_t* block, int zero, __m512 scale, __m512 minimum, __m512i (&v)[16]) {
  if constexpr (kBits == 16) {
    v[kPair] = _mm512_loadu_si512(block + kPair * 64);
  } else {
    __m512 even, odd;
    integers<kBits, kPair>(block, zero, even, odd);
    // Product and sum rounded apart, as the reference does it: the same bits everywhere.
    v[kPair] = interleave(_mm512_add_ps(_mm512_mul_ps(even, scale), minimum), _mm512_add_ps(_mm512_mul_ps(odd, scale), minimum));
  }
  if constexpr (kPair + 1 < kPairs) unpack_pairs<kBits, kPair + 1>(block, zero, scale, minimum, v);
}

// One tile as plain bf16 rows: out [lanes][in].
template <int kBits>
MOTET_BF16_TARGET void bf16_unpack(const Weight& w, int64_t tile, int64_t lanes, uint16_t* out) {
  for (int64_t b = 0; b < w.blocks; ++b) {
    const uint8_t* block = w.quants + (tile * w.blocks + b) * w.block_bytes();
    const int64_t at = (tile * w.groups + b / w.blocks_per_group) * kTile;
    const __m512 scale = w.scale ? load_factor(w, w.scale, at) : _mm512_set1_ps(1.0f);
    const __m512 minimum = w.minimum ? load_factor(w, w.minimum, at) : _mm512_set1_ps(-0.0f);
    __m512i v[16];
    unpack_pairs<kBits, 0>(block, w.zero, scale, minimum, v);
    transpose16(v);
    for (int64_t i = 0; i < lanes; ++i) _mm512_storeu_si512(out + i * w.in + b * kBlock, v[i]);
  }
}
#endif

const motet::Int8Table& int8_table() {
  static const motet::Int8Table* chosen = [] {
#if defined(__x86_64__)
    const std::string& isa = motet::forced_isa();
    if (isa == "plain") return motet::int8_plain();
    if (isa.empty() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
      return motet::int8_avx512vnni();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
      return isa != "avx2" && __builtin_cpu_supports("avxvnni") ? motet::int8_avxvnni() : motet::int8_avx2();
#endif
    return motet::int8_plain();
  }();
  return *chosen;
}

// ------------------------------------------------------------------------------------------------------------ products

// This thread's own memory for activations in 8 bits; other threads read it while the owner waits.
motet::Activations activations(int64_t rows, int64_t in, int64_t blocks) {
  thread_local std::vector<int64_t> pool;
  const int64_t part = (rows * blocks * 4 + 63) / 64 * 64, bytes = 3 * part + rows * in + 64;
  if (static_cast<int64_t>(pool.size()) * 8 < bytes) pool.resize(static_cast<size_t>(bytes / 8 + 1));
  char* at = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(pool.data()) + 63) & ~uintptr_t{63});
  return {reinterpret_cast<int8_t*>(at + 3 * part), reinterpret_cast<float*>(at), reinterpret_cast<float*>(at + part),
          reinterpret_cast<int32_t*>(at + 2 * part)};
}

void multiply_own_rows(const Weight& w, const uint16_t* x, int64_t rows, const motet::Output& to) {
  const motet::Int8Table& kernels = int8_table();
  const motet::RowPieces pieces(rows, at::get_num_threads());
  share(pieces.count, pieces.count > 1, [&](int64_t piece) {
    const int64_t first = pieces.begin(piece), end = pieces.begin(piece + 1);
    const motet::Activations a = activations(end - first, w.in, w.blocks);
    kernels.quantize(w, x + first * w.in, 0, end - first, a);
    motet::Output own = to;
    own.y = static_cast<char*>(to.y) + first * to.stride * size_of(to.type);
    kernels.multiply(w, a, end - first, 0, w.tiles, own);
  });
}

void multiply_int8(const Weight& w, const uint16_t* x, int64_t rows, motet::Output to) {
  const motet::Int8Table& kernels = int8_table();
  const int64_t threads = at::get_num_threads();
  if (motet::RowPieces::worth(rows, threads)) return multiply_own_rows(w, x, rows, to);
  // Even turns of rows that stay in the second-level cache; a turn too many costs more than a few rows too many.
  const int64_t turns = (rows * w.in + (640 << 10) - 1) / (640 << 10), fits = (rows + turns - 1) / turns;
  for (int64_t first = 0; first < rows; first += fits) {
    const int64_t count = std::min(fits, rows - first);
    const uint16_t* from = x + first * w.in;
    const motet::Activations a = activations(count, w.in, w.blocks);
    const int64_t parts = std::min(count, count * w.in < (64 << 10) ? 1 : threads);
    share(parts, parts > 1, [&](int64_t part) {
      kernels.quantize(w, from, count * part / parts, count * (part + 1) / parts, a);
    });
    // Pieces of whole pairs (or fours) of tiles; some per thread where there is much to do, in case one is held up.
    // A piece below some 300,000 products costs less than waking another thread.
    const int64_t unit = rows <= 2 ? 4 : 2, units = (w.tiles + unit - 1) / unit, products = count * w.in * w.out;
    const int64_t wanted = products < 300000 ? 1 : products < 50000000 ? threads : 4 * threads;
    const int64_t pieces = std::min(units, wanted);
    share(pieces, pieces > 1, [&](int64_t piece) {
      kernels.multiply(w, a, count, units * piece / pieces * unit, std::min(w.tiles, units * (piece + 1) / pieces * unit), to);
    });
    to.y = static_cast<char*>(to.y) + count * to.stride * size_of(to.type);
  }
}

}  // namespace

namespace motet {

Weight describe(const Tensor& quants, const std::optional<Tensor>& scale, const std::optional<Tensor>& minimum, int64_t bits,
                int64_t zero, int64_t out) {
  return ::describe(quants, scale, minimum, bits, zero, out);
}

void multiply(const Weight& w, const uint16_t* x, int64_t rows, const Output& to) {
  if (rows) w.bits == 16 ? multiply_bf16(w, x, rows, to) : multiply_int8(w, x, rows, to);
}

Tensor rows16_linear(const Tensor& x, const Tensor& quants, const std::optional<Tensor>& scale,
                     const std::optional<Tensor>& minimum, const std::optional<Tensor>& bias, int64_t bits, int64_t zero,
                     int64_t out, bool fp32) {
  const Weight w = describe(quants, scale, minimum, bits, zero, out);
  TORCH_CHECK(x.dim() == 2 && x.size(1) == w.in && x.scalar_type() == at::kBFloat16, "x must be bf16 [rows, ", w.in, "]");
  const Tensor rows = x.contiguous();
  Tensor y = at::empty({x.size(0), out}, x.options().dtype(fp32 ? at::kFloat : at::kBFloat16));
  Output to{y.mutable_data_ptr(), fp32 ? Type::fp32 : Type::bf16, out, nullptr, Type::fp32};
  Tensor bias_row;
  if (bias.has_value()) {
    TORCH_CHECK(bias->dim() == 1 && bias->size(0) == out, "bias must be [out]");
    bias_row = bias->contiguous();
    to.bias = bias_row.const_data_ptr();
    to.bias_type = type_of(bias_row);
  }
  multiply(w, static_cast<const uint16_t*>(rows.const_data_ptr()), rows.size(0), to);
  return y;
}

}  // namespace motet

namespace {

// ----------------------------------------------------------------------------------------------------------- other ops

// The whole weight as bf16 [out, in], where the processor has the instructions; false where not.
bool unpack_all(const Weight& w, uint16_t* y) {
#if defined(__x86_64__)
  if (motet::bf16_instruction_set() != std::string("avx512bf16")) return false;
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
              static_cast<uint8_t*>(to)[block + k / 4 * 64 + 4 * lane + k % 4] = static_cast<const uint8_t*>(from)[row + k];
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
  m.def("rows16_linear(Tensor x, Tensor quants, Tensor? scale, Tensor? minimum, Tensor? bias, int bits, int zero, int out, bool fp32=False) -> Tensor");
  m.def("rows16_take(Tensor? ids, Tensor quants, Tensor? scale, Tensor? minimum, int bits, int zero, int out, ScalarType dtype) -> Tensor");
  m.def("bf16_instruction_set() -> str", [] { return std::string(motet::bf16_instruction_set()); });
  m.def("int8_instruction_set() -> str", [] { return std::string(int8_table().name); });
  m.def("rows16_pack(Tensor values, int bits) -> Tensor");
}

TORCH_LIBRARY_IMPL(motet_cpu, CPU, m) {
  m.impl("rows16_linear", motet::rows16_linear);
  m.impl("rows16_take", rows16_take);
  m.impl("rows16_pack", rows16_pack);
}
