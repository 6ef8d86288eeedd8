// torch.ops.motet_cpu.paged_attention: cuts the rows into tiles and chunks, shares them, joins the parts.
//
// How the work is cut and shared never changes a number: see attend.h.
#include "ops.h"

#include <cmath>
#include <tuple>

namespace {

using motet::Attention;
using motet::AttentionPart;
using motet::kChunk;

struct Tile {          // rows of one sequence under one kv head
  AttentionPart part;  // over everything its rows see
  int64_t first_chunk, num_chunks, item;
};

std::tuple<Tensor, Tensor> paged_attention(const Tensor& q, const Tensor& kv, const Tensor& tables,
                                           const Tensor& position, const Tensor& num_visible, const Tensor& row_starts,
                                           const std::optional<Tensor>& ancestors,
                                           const std::optional<Tensor>& tree_starts, const std::optional<Tensor>& sinks,
                                           double scale, int64_t window, double soft_cap, bool want_lse) {
  TORCH_CHECK(q.dim() == 3 && kv.dim() == 5 && kv.size(1) == 2,
              "paged_attention: expected q [R, H, D] and kv [N, 2, K, T, D]");
  const int64_t rows = q.size(0), heads = q.size(1), dim = q.size(2), kv_heads = kv.size(2);
  const Type kv_type = cache_type_of(kv);
  TORCH_CHECK(kv.size(4) == cache_width(kv_type, dim) && heads % kv_heads == 0, "paged_attention: q is ", q.sizes(),
              ", kv is ", kv.sizes(), " of ", kv.scalar_type());
  TORCH_CHECK(q.stride(2) == 1 && kv.stride(4) == 1, "paged_attention: head dims must be contiguous");
  TORCH_CHECK(tables.scalar_type() == at::kInt && tables.dim() == 2 && (tables.size(1) <= 1 || tables.stride(1) == 1),
              "paged_attention: expected int32 tables [S, B]");
  TORCH_CHECK(num_visible.numel() == rows && position.size(-1) == rows && num_visible.is_contiguous() &&
                  (position.stride(-1) == 1 || rows == 1) && row_starts.is_contiguous(),
              "paged_attention: expected ", rows, " contiguous rows in the batch");
  const int64_t num_seqs = row_starts.numel() - 1, group = heads / kv_heads, width = motet::padded_dim(dim);
  TORCH_CHECK(tables.size(0) >= num_seqs, "paged_attention: ", num_seqs, " sequences, tables ", tables.sizes());

  Attention a{};
  a.q = bytes(q), a.q_row = q.stride(0), a.q_head = q.stride(1), a.q_type = type_of(q);
  a.kv = bytes(kv), a.kv_block = kv.stride(0), a.kv_part = kv.stride(1), a.kv_head = kv.stride(2),
  a.kv_token = kv.stride(3);
  a.kv_type = kv_type;
  a.tables = tables.const_data_ptr<int32_t>(), a.table_stride = tables.stride(0);
  a.position = position.const_data_ptr<int64_t>();  // of [3, R] the first axis
  a.num_visible = num_visible.const_data_ptr<int64_t>();
  if (ancestors && tree_starts) {
    TORCH_CHECK(ancestors->is_contiguous() && ancestors->size(0) == rows, "paged_attention: expected ancestors [R, W]");
    a.ancestors = ancestors->const_data_ptr<int64_t>(), a.ancestor_words = ancestors->size(1);
    a.tree_starts = tree_starts->const_data_ptr<int64_t>();
  }
  a.num_heads = heads, a.num_kv_heads = kv_heads, a.dim = dim, a.block_size = kv.size(3);
  a.window = window, a.scale = (float)scale, a.soft_cap = (float)soft_cap;

  Tensor out = at::empty({rows, heads, dim}, q.options());
  Tensor lse = at::empty({want_lse ? rows : 0, heads}, q.options().dtype(at::kFloat));
  float* lses = want_lse ? lse.mutable_data_ptr<float>() : nullptr;
  char* outs = mutable_bytes(out);
  const int64_t out_size = size_of(a.q_type);
  const Tensor sink = sinks ? sinks->to(at::kFloat).contiguous() : Tensor();
  const float* sink_values = sinks ? sink.const_data_ptr<float>() : nullptr;

  const int64_t* starts = row_starts.const_data_ptr<int64_t>();
  const int64_t tile_rows = std::max<int64_t>(1, 48 / group), capacity = tables.size(1) * a.block_size;
  std::vector<Tile> tiles;
  std::vector<std::pair<int64_t, int64_t>> items;  // (tile, chunk)
  int64_t cost = 0;
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    TORCH_CHECK(starts[seq] >= 0 && starts[seq + 1] <= rows, "paged_attention: row_starts leave the rows");
    for (int64_t begin = starts[seq]; begin < starts[seq + 1]; begin += tile_rows) {
      int64_t end = std::min(begin + tile_rows, starts[seq + 1]), low = capacity, high = 0;
      for (int64_t row = begin; row < end; ++row) {
        high = std::max(high, a.num_visible[row]);
        low = std::min(low, window > 0 ? std::max<int64_t>(0, a.position[row] - window + 1) : 0);
        for (int64_t word = 0; word < a.ancestor_words; ++word)
          if (uint64_t bits = (uint64_t)a.ancestors[row * a.ancestor_words + word]) {
            int64_t first = a.tree_starts[seq] + word * 64;
            low = std::min(low, first + __builtin_ctzll(bits));
            high = std::max(high, first + 64 - __builtin_clzll(bits));
          }
      }
      TORCH_CHECK(high <= capacity && low >= 0, "paged_attention: a row sees kv index ", high - 1, ", its table holds ",
                  capacity);
      low = low / 16 * 16;  // vectors of kv indices start at the same places whatever the tile
      int64_t first = low / kChunk, chunks = high > low ? (high - 1) / kChunk - first + 1 : 0;
      for (int64_t head = 0; head < kv_heads; ++head) {
        tiles.push_back({{seq, head, begin, end, low, high}, first, chunks, (int64_t)items.size()});
        for (int64_t chunk = 0; chunk < chunks; ++chunk) items.emplace_back(tiles.size() - 1, chunk);
      }
      cost += std::max<int64_t>(0, high - low) * (end - begin) * heads * dim;
    }
  }
  for (int64_t row = num_seqs > 0 ? starts[num_seqs] : 0; row < rows; ++row) {  // padding after the last sequence
    std::memset(outs + row * heads * dim * out_size, 0, heads * dim * out_size);
    if (lses) std::fill(lses + row * heads, lses + (row + 1) * heads, -INFINITY);
  }

  const motet::Table& cpu = table();
  auto attend = [&](const Tile& tile, int64_t chunk, float* result) {
    AttentionPart part = tile.part;
    int64_t base = (tile.first_chunk + chunk) * kChunk, n = (part.row_end - part.row_begin) * group;
    part.lo = std::max(part.lo, base), part.hi = std::min(part.hi, base + kChunk);
    cpu.attend(a, part, scratch(0, motet::attend_scratch(n, dim)), result, result + n, result + 2 * n);
  };
  auto finish = [&](const Tile& tile, float* result) {
    const int64_t n = (tile.part.row_end - tile.part.row_begin) * group;
    float *top = result, *sum = result + n, *mix = result + 2 * n;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = tile.part.row_begin + i / group, head = tile.part.kv_head * group + i % group;
      float total = sum[i], factor = 1.0f, peak = top[i];
      if (sink_values) {
        peak = std::max(top[i], sink_values[head]);
        factor = total != 0 ? std::exp(top[i] - peak) : 0.0f;
        total = total * factor + std::exp(sink_values[head] - peak);
      }
      cpu.finish(a.q_type, dim, mix + i * width, total != 0 ? factor / total : 0.0f,
                 outs + (row * heads + head) * dim * out_size);
      if (lses) lses[row * heads + head] = total != 0 ? peak + std::log(total) : -INFINITY;
    }
  };
  auto results_size = [&](const Tile& tile) { return (tile.part.row_end - tile.part.row_begin) * group * (width + 2); };
  auto clear = [&](const Tile& tile, float* result) {
    const int64_t n = (tile.part.row_end - tile.part.row_begin) * group;
    std::fill(result, result + n, -INFINITY);
    std::fill(result + n, result + n * (width + 2), 0.0f);
  };
  auto merge = [&](const Tile& tile, float* into, const float* from) {
    const int64_t n = (tile.part.row_end - tile.part.row_begin) * group;
    cpu.merge(n, width, into, into + n, into + 2 * n, from, from + n, from + 2 * n);
  };

  const int64_t num_tiles = tiles.size();
  const bool parallel = cost > 400000;  // multiplications; about 20 us of one core
  if (parallel && num_tiles < 3 * at::get_num_threads() && (int64_t)items.size() > num_tiles) {
    // Few sequences: threads share the chunks. The mergers below are the ones a single thread would make.
    const int64_t size = results_size(*std::max_element(
        tiles.begin(), tiles.end(), [&](const Tile& x, const Tile& y) { return results_size(x) < results_size(y); }));
    std::vector<float> results(items.size() * size);
    share(items.size(), true,
          [&](int64_t i) { attend(tiles[items[i].first], items[i].second, results.data() + i * size); });
    share(num_tiles, true, [&](int64_t i) {
      const Tile& tile = tiles[i];
      float* result = tile.num_chunks ? results.data() + tile.item * size : scratch(1, size);
      if (!tile.num_chunks) clear(tile, result);
      for (int64_t chunk = 1; chunk < tile.num_chunks; ++chunk)
        merge(tile, result, results.data() + (tile.item + chunk) * size);
      finish(tile, result);
    });
  } else {
    share(num_tiles, parallel, [&](int64_t i) {
      const Tile& tile = tiles[num_tiles - 1 - i];  // of a prompt the last rows see most: long work first
      const int64_t size = results_size(tile);
      float* result = scratch(1, 2 * size);
      if (tile.num_chunks)
        attend(tile, 0, result);
      else
        clear(tile, result);
      for (int64_t chunk = 1; chunk < tile.num_chunks; ++chunk) {
        attend(tile, chunk, result + size);
        merge(tile, result, result + size);
      }
      finish(tile, result);
    });
  }
  return {out, lse};
}

}  // namespace

std::tuple<Tensor, Tensor> motet::paged_attention(const Tensor& q, const Tensor& kv, const Tensor& tables,
                                                  const Tensor& position, const Tensor& num_visible,
                                                  const Tensor& row_starts, const std::optional<Tensor>& ancestors,
                                                  const std::optional<Tensor>& tree_starts,
                                                  const std::optional<Tensor>& sinks, double scale, int64_t window,
                                                  double soft_cap, bool want_lse) {
  return ::paged_attention(q, kv, tables, position, num_visible, row_starts, ancestors, tree_starts, sinks, scale, window,
                           soft_cap, want_lse);
}

TORCH_LIBRARY_IMPL(motet_cpu, CPU, m) { m.impl("paged_attention", &paged_attention); }
