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
  int64_t first_chunk, num_chunks, cost;
  int64_t results;  // where its chunks' results lie if threads share it, else -1
};
struct Unit {  // what a thread takes: a whole tile, or a run of a shared tile's chunks
  int64_t tile, begin, end, cost;
};

constexpr int64_t kTileQueries = 192;  // rows * H / K of a tile: what laying out keys and values is spread over
constexpr int64_t kRun = 4;           // chunks in a row, so that the next can be asked for in time

// Cuts the tiles so that threads can come out even: a tile stays whole while a thread has room for it. Units with much
// work first; returns the floats that shared tiles need for their results.
int64_t plan(std::vector<Tile>& tiles, int64_t threads, int64_t group, int64_t width, std::vector<Unit>& units) {
  std::vector<int64_t> order(tiles.size()), load(threads, 0);
  int64_t total = 0, floats = 0;
  for (size_t i = 0; i < tiles.size(); ++i) order[i] = i, total += tiles[i].cost;
  std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) { return tiles[x].cost > tiles[y].cost; });
  for (int64_t i : order) {
    Tile& tile = tiles[i];
    int64_t& least = *std::min_element(load.begin(), load.end());
    if (tile.num_chunks < 2 || threads < 2 || least + tile.cost <= total / threads + total / 64) {
      least += tile.cost;
      units.push_back({i, 0, tile.num_chunks, tile.cost});
      continue;
    }
    tile.results = floats;
    floats += tile.num_chunks * (tile.part.row_end - tile.part.row_begin) * group * (width + 2);
    const int64_t run = std::clamp<int64_t>(tile.num_chunks / (4 * threads), 1, kRun);
    for (int64_t begin = 0; begin < tile.num_chunks; begin += run) {
      const int64_t end = std::min(begin + run, tile.num_chunks), cost = tile.cost * (end - begin) / tile.num_chunks;
      *std::min_element(load.begin(), load.end()) += cost;
      units.push_back({i, begin, end, cost});
    }
  }
  std::stable_sort(units.begin(), units.end(), [](const Unit& x, const Unit& y) { return x.cost > y.cost; });
  return floats;
}

// This thread's memory for shared results; kept, because fresh memory costs more than the merging.
float* shared_results(int64_t floats) {
  thread_local std::vector<float> pool;
  if ((int64_t)pool.size() < floats) pool.resize(floats);
  return pool.data();
}

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
  const int64_t tile_rows = std::max<int64_t>(1, kTileQueries / group), capacity = tables.size(1) * a.block_size;
  std::vector<Tile> tiles;
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
      // A row costs something beside its products: keys are read, scores become weights.
      const int64_t tile_cost = std::max<int64_t>(0, high - low) * ((end - begin) * group + 4) * dim;
      for (int64_t head = 0; head < kv_heads; ++head)
        tiles.push_back({{seq, head, begin, end, low, high, 0, 0, 0, 0}, first, chunks, tile_cost, -1});
      cost += tile_cost * kv_heads;
    }
  }
  for (int64_t row = num_seqs > 0 ? starts[num_seqs] : 0; row < rows; ++row) {  // padding after the last sequence
    std::memset(outs + row * heads * dim * out_size, 0, heads * dim * out_size);
    if (lses) std::fill(lses + row * heads, lses + (row + 1) * heads, -INFINITY);
  }

  const motet::Table& cpu = table();
  auto attend = [&](const Tile& tile, int64_t chunk, const Tile* next, int64_t next_chunk, float* result) {
    AttentionPart part = tile.part;
    const int64_t base = (tile.first_chunk + chunk) * kChunk, n = (part.row_end - part.row_begin) * group;
    if (next) {
      const int64_t next_base = (next->first_chunk + next_chunk) * kChunk;
      part.next_seq = next->part.seq, part.next_head = next->part.kv_head;
      part.next_lo = std::max(next->part.lo, next_base), part.next_hi = std::min(next->part.hi, next_base + kChunk);
    }
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

  const bool parallel = cost > 400000;  // multiplications; about 20 us of one core
  const int64_t threads = parallel && !at::in_parallel_region() ? at::get_num_threads() : 1;
  std::vector<Unit> units;
  units.reserve(tiles.size());
  float* results = shared_results(plan(tiles, threads, group, width, units));
  std::vector<std::atomic<int64_t>> left(tiles.size());  // chunks of a shared tile that are not done
  for (size_t i = 0; i < tiles.size(); ++i) left[i].store(tiles[i].num_chunks, std::memory_order_relaxed);
  // The cache is met cold, so a thread takes its next unit before the last chunk of this one, and asks for its first.
  share_ahead(units.size(), parallel, [&](int64_t i, const auto& following) {
    const Unit& unit = units[i];
    const Tile& tile = tiles[unit.tile];
    const int64_t size = results_size(tile);
    const auto attend_next = [&](int64_t chunk, float* result) {
      if (chunk + 1 < unit.end) return attend(tile, chunk, &tile, chunk + 1, result);
      const int64_t then = following();
      const bool more = then < (int64_t)units.size() && units[then].end > units[then].begin;
      attend(tile, chunk, more ? &tiles[units[then].tile] : nullptr, more ? units[then].begin : 0, result);
    };
    if (tile.results < 0) {
      float* result = scratch(1, 2 * size);
      if (tile.num_chunks)
        attend_next(0, result);
      else
        clear(tile, result);
      for (int64_t chunk = 1; chunk < tile.num_chunks; ++chunk) {
        attend_next(chunk, result + size);
        merge(tile, result, result + size);
      }
      finish(tile, result);
      return;
    }
    float* result = results + tile.results;
    for (int64_t chunk = unit.begin; chunk < unit.end; ++chunk) attend_next(chunk, result + chunk * size);
    if (left[unit.tile].fetch_sub(unit.end - unit.begin, std::memory_order_acq_rel) != unit.end - unit.begin) return;
    // The last of them joins all, in the order in which a single thread would.
    for (int64_t chunk = 1; chunk < tile.num_chunks; ++chunk) merge(tile, result, result + chunk * size);
    finish(tile, result);
  });
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
