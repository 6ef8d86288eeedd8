// What ops.cpp knows of the kernels: plain pointers, and one table of functions per instruction set.
//
// Letters: R rows, H query heads, K kv heads, D head dim, T tokens per block, E or F features, V vocabulary.
#pragma once

#include <cstdint>

namespace motet {

enum class Type : int { fp32 = 0, bf16 = 1, int8 = 2 };  // int8 only for caches, see Attention

// A row of an int8 cache is D values and then their scale, an fp32 number at any address: value * scale is what was stored.
constexpr int64_t kScaleBytes = 4;

// Attention of one step over one layer's cache. Strides count elements.
struct Attention {
  const void* q;  // [R, H, D], last dimension contiguous
  int64_t q_row, q_head;
  const void* kv;  // [N, 2, K, T, D], or [.., D + kScaleBytes] of int8; last dimension contiguous
  int64_t kv_block, kv_part, kv_head, kv_token;
  Type q_type, kv_type;
  const int32_t* tables;  // [S, B]
  int64_t table_stride;
  const int64_t* position;     // [R]
  const int64_t* num_visible;  // [R]
  const int64_t* ancestors;    // [R, words] bits, or null
  int64_t ancestor_words;
  const int64_t* tree_starts;  // [S]
  int64_t num_heads, num_kv_heads, dim, block_size;
  int64_t window;  // 0 = none
  float scale, soft_cap;
};

// Rows row_begin..row_end of one sequence, one kv head, kv indices lo..hi within one chunk of kChunk.
struct AttentionPart {
  int64_t seq, kv_head, row_begin, row_end, lo, hi;
  int64_t next_seq, next_head, next_lo, next_hi;  // kv indices (kChunk at most) that this thread reads next; no number of it
};

constexpr int64_t kChunk = 256;  // kv indices per softmax; a row's chunks are merged in order, whoever computed them
constexpr int64_t padded_dim(int64_t dim) { return (dim + 31) / 32 * 32; }
// Floats of scratch that attend needs for a part of num_queries = rows * H / K.
constexpr int64_t attend_scratch(int64_t num_queries, int64_t dim) {
  return num_queries * (padded_dim(dim) + kChunk + 1) + (2 * kChunk + 16) * padded_dim(dim) + 4 * kChunk + 128;
}

// Attention of all rows over all rows of their window, everything bf16. Strides count elements.
struct Dense {
  const void *q, *k, *v;  // [B, T, H, D], last dimension contiguous
  int64_t q_window, q_row, q_head, k_window, k_row, k_head, v_window, v_row, v_head;
  void* out;                       // [B, T, H, D] contiguous
  uint32_t *packed_k, *packed_v;   // each [B, H, T rounded up to kDenseBlock, padded_dim / 2] words
  int64_t rows, num_heads, dim;    // rows is T
  float scale;                     // > 0
};
constexpr int64_t kDenseRows = 48, kDenseKeys = 256, kDenseBlock = 64;  // rows and keys of a tile, keys packed together
static_assert(kDenseRows % 16 == 0 && kDenseKeys % kDenseBlock == 0);
// Floats of scratch that dense and dense_pack need.
constexpr int64_t dense_scratch(int64_t dim) {
  return kDenseRows * (kDenseKeys + 16 + 2 * padded_dim(dim)) + 16 * padded_dim(dim);
}

// Blocks of a picture's transformer (joint.h). A packed weight [out, in], out a multiple of kColumns; bias fp32 [out].
struct Product {
  const void* weight;
  const float* bias;
  int64_t in, out;
};
constexpr int64_t kColumns = 64;  // of a tile of a product
// What becomes of a product: y = it, y = gelu(it), or y += gate * it with y and gate [out] fp32.
enum class After : int { store, gelu, add };
// Attention of all tokens of one picture over each other. Rows of q, k, v are `row` numbers apart, heads follow each other.
struct Joint {
  const void *q, *k, *v;
  int64_t row;
  void* out;
  int64_t out_row, tokens, dim;
  float scale;
};
// Floats of scratch that attend_joint needs.
constexpr int64_t joint_scratch(int64_t tokens, int64_t dim) {
  return (tokens + 15) / 16 * 16 * (2 * dim + 48) + 48 * dim;
}

struct Table {
  const char* name;
  // Softmax over one chunk: for each query (row-major, then head of the group) top [n], sum [n], mix [n, padded_dim].
  void (*attend)(const Attention&, const AttentionPart&, float* scratch, float* top, float* sum, float* mix);
  // (top, sum, mix) becomes the merger with a later chunk.
  void (*merge)(int64_t n, int64_t width, float* top, float* sum, float* mix, const float* top2, const float* sum2,
                const float* mix2);
  // out[i] = mix[i] / sum for one query.
  void (*finish)(Type type, int64_t dim, const float* mix, float scale, void* out);
  // One row; `residual` (or null) takes x + residual first. weight + offset multiplies.
  void (*rms_norm)(Type type, Type weight_type, int64_t features, const void* x, void* residual, const void* weight,
                   float eps, float offset, void* out);
  // out[F] = act(gate[F]) * up[F]; kind 0 silu, 1 gelu_tanh
  void (*gated)(Type type, int64_t features, const void* gate, const void* up, int kind, void* out);
  // Rotates 2 * half dims of one head from x into y (may be x) and copies the other dims.
  void (*rotate)(Type type, Type out_type, int64_t dim, int64_t half, const void* x, const float* cos, const float* sin,
                 bool interleaved, void* y);
  void (*convert)(Type type, Type out_type, int64_t n, const void* x, void* y);
  // One row of an int8 cache: y = x * 127 / max |x| rounded to even, then the scale. NaN and inf make the scale NaN.
  void (*quantize)(Type type, int64_t n, const void* x, void* y);
  // Lowest id of the largest value; NaN never wins.
  int64_t (*argmax)(const float* x, int64_t n, float* value);
  // Lowest index of the largest x[i] / divisor + gumbel(key, ids ? ids[i] : i).
  int64_t (*noisy_argmax)(const float* x, const uint32_t* ids, int64_t n, float divisor, uint32_t key_high,
                          uint32_t key_low);
  // Sum of exp((x[i] - top) / divisor).
  double (*sum_exp)(const float* x, int64_t n, float divisor, float top);
  // Indices of x[i] >= least in rising order into ids (room for n); returns how many.
  int64_t (*at_least)(const float* x, int64_t n, float least, uint32_t* ids);
  // Lays out one block of keys and values of one head; then come rows begin..end. Both null where the set has neither.
  void (*dense_pack)(const Dense&, int64_t window, int64_t head, int64_t block, float* scratch);
  void (*dense)(const Dense&, int64_t window, int64_t head, int64_t begin, int64_t end, float* scratch);
  // joint.h; bf16 only where `dense` is.
  void (*product)(Type type, const Product&, const void* x, int64_t x_row, int64_t begin, int64_t end, int64_t tile_begin,
                  int64_t tile_end, After after, void* y, int64_t y_row, const float* gate);
  void (*modulate)(Type type, int64_t features, const float* x, const float* shift, const float* scale, float eps, void* out);
  void (*norm_turn)(Type type, int64_t dim, const float* weight, float eps, const float* cos, const float* sin, void* x);
  void (*attend_joint)(Type type, const Joint&, int64_t head, float* scratch);
};

const Table* table_plain();
#if defined(__x86_64__)
const Table* table_avx2();
const Table* table_avx512();
const Table* table_avx512bf16();
#endif

}  // namespace motet
