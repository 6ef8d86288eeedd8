// Weights in layout "rows16" (described in linear.cpp) and what multiplies them: plain pointers, no ATen.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace motet {

constexpr int64_t kTile = 16;   // output features of a tile
constexpr int64_t kBlock = 32;  // inputs of a block

struct Weight {
  const uint8_t* quants;
  const void* scale;
  const void* minimum;  // null: none
  bool half;            // scale and minimum are fp16, else fp32
  int bits;             // 4, 8 or 16
  int zero;
  int64_t out, in, tiles, blocks, groups, blocks_per_group;

  int64_t block_bytes() const { return bits * kTile * kBlock / 8; }
};

// Activations in 8 bits: x = scale * q for each block of each row. A block with an infinity or a NaN has scale NaN.
struct Activations {
  int8_t* quants;  // [rows, in]; for 4 bits, inputs 8 i + {0, 4, 1, 5, 2, 6, 3, 7} of a block stand in this order
  float* scale;    // [rows, blocks]
  float* sum;      // [rows, blocks]: scale times the sum of q
  int32_t* start;  // [rows, blocks]: minus the sum of q, times what the kernel's weights lie above their values
};

// Where a product goes: y [rows, stride], fp32 or bf16; bias [out] of either type, or null.
struct Output {
  void* y;
  Type type;
  int64_t stride;
  const void* bias;
  Type bias_type;
};

// Many rows in pieces of about 64, the same number for each thread: a thread that rounds and multiplies rows of its own reads
// them from its own cache again and again. Pieces start at multiples of what int8.cpp takes at once.
struct RowPieces {
  static constexpr int64_t kRows = 64, kUnit = 6;
  int64_t rows, count;
  RowPieces(int64_t rows, int64_t threads) : rows(rows), count((rows + threads * kRows - 1) / (threads * kRows) * threads) {}
  static bool worth(int64_t rows, int64_t threads) { return rows >= threads * kRows; }
  int64_t begin(int64_t piece) const {
    const int64_t units = (rows + kUnit - 1) / kUnit, at = units * piece / count * kUnit;
    return at < rows ? at : rows;
  }
};

// Integer products for one instruction set; weights of 4 and 8 bits.
struct Int8Table {
  const char* name;
  // x bf16 [rows, in] -> rows `begin`..`end` of `to`.
  void (*quantize)(const Weight&, const uint16_t* x, int64_t begin, int64_t end, const Activations& to);
  // Rows 0..rows times tiles begin..end (a last odd one may be cut by `out`).
  void (*multiply)(const Weight&, const Activations&, int64_t rows, int64_t begin, int64_t end, const Output&);
};

const Int8Table* int8_plain();
#if defined(__x86_64__)
const Int8Table* int8_avx2();
const Int8Table* int8_avxvnni();
const Int8Table* int8_avx512vnni();
#endif

}  // namespace motet
