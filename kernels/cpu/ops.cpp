// The torch operators motet_cpu::*: check shapes, choose the instruction set once, share rows among torch's threads.
//
// No Python headers: the library is loaded with torch.ops.load_library. How work is shared never changes a number.
#include "ops.h"

#include <cmath>
#include <string>

namespace {

// The tables that this CPU can run, least first.
std::vector<const motet::Table*> usable_tables() {
  std::vector<const motet::Table*> usable = {motet::table_plain()};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    usable.push_back(motet::table_avx2());
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      usable.push_back(motet::table_avx512());
      if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
        usable.push_back(motet::table_avx512bf16());
    }
  }
#endif
  return usable;
}
const motet::Table*& chosen_table() {
  static const motet::Table* chosen = usable_tables().back();
  return chosen;
}

}  // namespace

const motet::Table& motet::table() { return *chosen_table(); }

namespace {

// ---------------------------------------------------------------------------------------------------- store, rotary

struct Cache {
  char* data;
  int64_t block, part, head, token, num_tokens, num_slots;
  Type type;
  explicit Cache(const Tensor& kv)
      : data(mutable_bytes(kv)),
        block(kv.stride(0)),
        part(kv.stride(1)),
        head(kv.stride(2)),
        token(kv.stride(3)),
        num_tokens(kv.size(3)),
        num_slots(kv.size(0) * kv.size(3)),
        type(cache_type_of(kv)) {
    TORCH_CHECK(kv.dim() == 5 && kv.stride(4) == 1, "expected kv [N, 2, K, T, D] with contiguous D");
  }
  char* at(int64_t slot, int64_t which, int64_t kv_head) const {
    return data +
           (slot / num_tokens * block + which * part + kv_head * head + slot % num_tokens * token) * size_of(type);
  }
  // Asks for the lines that a row will be stored to: they lie all over the memory, and waiting for each in turn costs more
  // than rotating the row.
  void expect(const int64_t* slots, int64_t row, int64_t rows, int64_t heads, int64_t dim) const {
    if (row >= rows || slots[row] < 0 || slots[row] >= num_slots) return;
    const int64_t bytes = cache_width(type, dim) * size_of(type);
    for (int64_t which = 0; which < 2; ++which)
      for (int64_t kv_head = 0; kv_head < heads; ++kv_head)
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at(slots[row], which, kv_head) + line, 1);
  }
  bool holds(const Tensor& kv, int64_t heads, int64_t dim) const {
    return kv.size(2) == heads && kv.size(4) == cache_width(type, dim);
  }
  void put(Type from_type, int64_t dim, const char* from, int64_t slot, int64_t which, int64_t kv_head) const {
    if (type == Type::int8)
      table().quantize(from_type, dim, from, at(slot, which, kv_head));
    else
      table().convert(from_type, type, dim, from, at(slot, which, kv_head));
  }
};

constexpr int64_t kAhead = 8;  // rows: 8 x 3 kv heads x 4 lines are more than a core can wait for at once

struct Rows {  // [R, H, D] with contiguous D
  char* data;
  int64_t row, head, num_rows, num_heads, dim, size;
  Type type;
  explicit Rows(const Tensor& x)
      : data(const_cast<char*>(bytes(x))),
        row(x.stride(0)),
        head(x.stride(1)),
        num_rows(x.size(0)),
        num_heads(x.size(1)),
        dim(x.size(2)),
        type(type_of(x)) {
    TORCH_CHECK(x.stride(2) == 1, "expected a contiguous last dimension");
    size = size_of(type);
  }
  char* at(int64_t r, int64_t h) const { return data + (r * row + h * head) * size; }
};

void store_kv(const Tensor& k, const Tensor& v, const Tensor& kv, const Tensor& slots) {
  const Rows keys(k), values(v);
  const Cache cache(kv);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  TORCH_CHECK(slots.numel() == keys.num_rows && values.num_rows == keys.num_rows &&
                  cache.holds(kv, keys.num_heads, keys.dim),
              "store_kv: k ", k.sizes(), ", v ", v.sizes(), ", kv ", kv.sizes());
  share_rows(keys.num_rows, k.numel() * 2, [&](int64_t row) {
    if (slot[row] < 0) return;
    TORCH_CHECK(slot[row] < cache.num_slots, "store_kv: slot ", slot[row], " of ", cache.num_slots);
    for (int64_t head = 0; head < keys.num_heads; ++head) {
      cache.put(keys.type, keys.dim, keys.at(row, head), slot[row], 0, head);
      cache.put(values.type, keys.dim, values.at(row, head), slot[row], 1, head);
    }
  });
}

struct Turn {  // cos, sin [R, half] fp32
  const float *cos, *sin;
  int64_t half;
  Turn(const Tensor& c, const Tensor& s, int64_t rows, int64_t dim)
      : cos(c.const_data_ptr<float>()), sin(s.const_data_ptr<float>()), half(c.size(1)) {
    TORCH_CHECK(
        c.is_contiguous() && s.is_contiguous() && c.sizes() == s.sizes() && c.size(0) == rows && 2 * half <= dim,
        "rotary: cos ", c.sizes(), ", sin ", s.sizes(), " for ", rows, " rows of dim ", dim);
  }
};

void rotate(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, bool interleaved) {
  const Rows queries(q), keys(k);
  const Turn turn(cos, sin, queries.num_rows, queries.dim);
  TORCH_CHECK(keys.num_rows == queries.num_rows && keys.dim == queries.dim, "rotary: q ", q.sizes(), ", k ", k.sizes());
  share_rows(queries.num_rows, q.numel() + k.numel(), [&](int64_t row) {
    for (const Rows* x : {&queries, &keys})
      for (int64_t head = 0; head < x->num_heads; ++head)
        table().rotate(x->type, x->type, x->dim, turn.half, x->at(row, head), turn.cos + row * turn.half,
                       turn.sin + row * turn.half, interleaved, x->at(row, head));
  });
}

void rotate_store_kv(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                     const Tensor& kv, const Tensor& slots, bool interleaved) {
  const Rows queries(q), keys(k), values(v);
  const Cache cache(kv);
  const Turn turn(cos, sin, queries.num_rows, queries.dim);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  TORCH_CHECK(slots.numel() == keys.num_rows && queries.num_rows == keys.num_rows && queries.dim == keys.dim &&
                  values.num_rows == keys.num_rows && values.num_heads == keys.num_heads &&
                  cache.holds(kv, keys.num_heads, keys.dim),
              "rotary_store_kv: q ", q.sizes(), ", k ", k.sizes(), ", v ", v.sizes(), ", kv ", kv.sizes());
  for (int64_t row = 0; row < kAhead; ++row) cache.expect(slot, row, keys.num_rows, keys.num_heads, keys.dim);
  share_rows(keys.num_rows, q.numel() + 2 * k.numel(), [&](int64_t row) {
    const float *c = turn.cos + row * turn.half, *s = turn.sin + row * turn.half;
    cache.expect(slot, row + kAhead, keys.num_rows, keys.num_heads, keys.dim);
    for (int64_t head = 0; head < queries.num_heads; ++head)
      table().rotate(queries.type, queries.type, queries.dim, turn.half, queries.at(row, head), c, s, interleaved,
                     queries.at(row, head));
    if (slot[row] < 0) return;
    TORCH_CHECK(slot[row] < cache.num_slots, "rotary_store_kv: slot ", slot[row], " of ", cache.num_slots);
    for (int64_t head = 0; head < keys.num_heads; ++head) {
      if (cache.type == Type::int8) {  // rotated in fp32, rounded once
        float* rotated = scratch(0, keys.dim);
        table().rotate(keys.type, Type::fp32, keys.dim, turn.half, keys.at(row, head), c, s, interleaved, rotated);
        cache.put(Type::fp32, keys.dim, reinterpret_cast<const char*>(rotated), slot[row], 0, head);
      } else {
        table().rotate(keys.type, cache.type, keys.dim, turn.half, keys.at(row, head), c, s, interleaved,
                       cache.at(slot[row], 0, head));
      }
      cache.put(values.type, keys.dim, values.at(row, head), slot[row], 1, head);
    }
  });
}

// ------------------------------------------------------------------------------------------------- norm, activation

struct Strided {  // [.., E] of two or three dimensions as rows
  int64_t outer, inner, outer_stride, inner_stride;
  explicit Strided(const Tensor& x) {
    const int64_t dims = x.dim();
    TORCH_CHECK((dims == 2 || dims == 3) && x.stride(-1) == 1, "expected [R, E] or [R, H, E] with contiguous E, got ",
                x.sizes());
    outer = x.size(0), outer_stride = x.stride(0);
    inner = dims == 3 ? x.size(1) : 1, inner_stride = dims == 3 ? x.stride(1) : 0;
  }
  int64_t rows() const { return outer * inner; }
  int64_t offset(int64_t row) const { return row / inner * outer_stride + row % inner * inner_stride; }
};

Tensor norm(const Tensor& x, const Tensor* residual, const Tensor& weight, double eps, double offset) {
  const Strided from(x);
  const Type type = type_of(x), weight_type = type_of(weight);
  const int64_t features = x.size(-1), size = size_of(type);
  TORCH_CHECK(weight.numel() == features && weight.is_contiguous(), "rms_norm: weight ", weight.sizes(), " for ",
              features, " features");
  Tensor out = at::empty(x.sizes(), x.options());
  char* to = mutable_bytes(out);
  float* sums = nullptr;
  int64_t sums_stride = 0;
  if (residual) {
    TORCH_CHECK(x.dim() == 2 && residual->sizes() == x.sizes() && residual->scalar_type() == at::kFloat &&
                    residual->stride(1) == 1,
                "rms_norm_residual: x ", x.sizes(), ", expected an fp32 residual of that shape, got ",
                residual->scalar_type(), " ", residual->sizes());
    sums = residual->mutable_data_ptr<float>(), sums_stride = residual->stride(0);
  }
  share_rows(from.rows(), x.numel(), [&](int64_t row) {
    table().rms_norm(type, weight_type, features, bytes(x) + from.offset(row) * size,
                     sums ? sums + row * sums_stride : nullptr, bytes(weight), (float)eps, (float)offset,
                     to + row * features * size);
  });
  return out;
}
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, double offset) {
  return norm(x, nullptr, weight, eps, offset);
}
Tensor rms_norm_residual(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, double offset) {
  return norm(x, &residual, weight, eps, offset);
}

Tensor gated(const Tensor& gate_up, int64_t kind) {
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.stride(1) == 1 && gate_up.size(1) % 2 == 0, "gated: expected [R, 2F], got ",
              gate_up.sizes());
  const Type type = type_of(gate_up);
  const int64_t rows = gate_up.size(0), features = gate_up.size(1) / 2, size = size_of(type);
  Tensor out = at::empty({rows, features}, gate_up.options());
  char* to = mutable_bytes(out);
  share_rows(rows, rows * features * 2, [&](int64_t row) {
    const char* gate = bytes(gate_up) + row * gate_up.stride(0) * size;
    table().gated(type, features, gate, gate + features * size, (int)kind, to + row * features * size);
  });
  return out;
}

// -------------------------------------------------------------------------------------------------------- sampling

uint32_t mix(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

Tensor argmax(const Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1 && logits.size(1) > 0 && logits.scalar_type() == at::kFloat,
              "argmax: expected fp32 [N, V]");
  Tensor ids = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
  const float* from = logits.const_data_ptr<float>();
  int64_t* to = ids.mutable_data_ptr<int64_t>();
  share_rows(logits.size(0), logits.numel(),
             [&](int64_t row) { to[row] = table().argmax(from + row * logits.stride(0), logits.size(1), nullptr); });
  return ids;
}

struct Filters {
  float temperature;
  int64_t top_k;
  float top_p, min_p;
};

// Ids of x that the filters keep, best first (value, then lower id).
void kept_ids(const float* x, int64_t vocab, const Filters& f, std::vector<uint32_t>& ids) {
  float top;
  table().argmax(x, vocab, &top);
  const bool by_mass = f.top_p < 1.0f, by_rank = f.top_k > 0 && f.top_k < vocab;
  const float floor = f.min_p > 0 ? std::log(f.min_p) : -INFINITY;
  // The mass that top_p shares out is that of all ids, unless another filter comes first.
  const double whole = by_mass && !by_rank && !(f.min_p > 0) ? table().sum_exp(x, vocab, f.temperature, top) : 0;
  auto depth = [&](uint32_t id) { return (x[id] - top) / f.temperature; };
  auto better = [&](uint32_t a, uint32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; };
  // Look ever deeper below the best value until the filters have all that they need.
  for (float reach = by_rank ? 4.0f : 6.0f;; reach *= 2) {
    const bool everything = reach > 1e4f;
    const float least = everything ? -INFINITY : top - reach * f.temperature;
    ids.resize(vocab);
    ids.resize(table().at_least(x, vocab, least, ids.data()));
    const bool past_floor = everything || -reach <= floor;
    if (by_rank && (int64_t)ids.size() < f.top_k && !past_floor) continue;
    if (!by_rank && f.min_p > 0 && !past_floor) continue;
    if (f.min_p > 0)
      ids.erase(std::remove_if(ids.begin(), ids.end(), [&](uint32_t id) { return !(std::exp(depth(id)) >= f.min_p); }),
                ids.end());
    if (by_rank && (int64_t)ids.size() > f.top_k) {
      std::nth_element(ids.begin(), ids.begin() + f.top_k - 1, ids.end(), better);
      ids.resize(f.top_k);
    }
    if (!by_mass) return;
    double total = whole, before = 0;
    if (total == 0)
      for (uint32_t id : ids) total += std::exp(depth(id));
    const double wanted = (double)f.top_p * total;
    // Halve towards the id at which the mass is reached: everything before `low` is kept, everything from `high` on is
    // not.
    size_t low = 0, high = ids.size();
    while (high - low > 32) {
      const size_t middle = (low + high) / 2;
      std::nth_element(ids.begin() + low, ids.begin() + middle, ids.begin() + high, better);
      double mass = before;
      for (size_t i = low; i < middle; ++i) mass += std::exp(depth(ids[i]));
      if (mass >= wanted)
        high = middle;
      else
        before = mass, low = middle;
    }
    std::sort(ids.begin() + low, ids.begin() + high, better);
    size_t kept = low;
    while (kept < high && (kept == 0 || before < wanted)) before += std::exp(depth(ids[kept++]));
    if (kept == ids.size() && whole != 0 && before < wanted && !everything) continue;
    ids.resize(kept);
    return;
  }
}

Tensor sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
              const Tensor& min_p, const Tensor& seed, const Tensor& position, int64_t head) {
  TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1 && logits.size(1) > 0 && logits.scalar_type() == at::kFloat,
              "sample: expected fp32 [N, V]");
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  for (const Tensor* x : {&temperature, &top_k, &top_p, &min_p, &seed, &position})
    TORCH_CHECK(x->is_contiguous() && x->numel() == rows, "sample: expected ", rows, " entries per setting, got ",
                x->sizes());
  Tensor ids = at::empty({rows}, logits.options().dtype(at::kLong));
  int64_t* to = ids.mutable_data_ptr<int64_t>();
  const float *heat = temperature.const_data_ptr<float>(), *p = top_p.const_data_ptr<float>(),
              *least = min_p.const_data_ptr<float>();
  const int64_t *k = top_k.const_data_ptr<int64_t>(), *seeds = seed.const_data_ptr<int64_t>(),
                *positions = position.const_data_ptr<int64_t>();
  share(rows, logits.numel() > 16384, [&](int64_t row) {
    const float* x = logits.const_data_ptr<float>() + row * logits.stride(0);
    if (!(heat[row] > 0)) {
      to[row] = table().argmax(x, vocab, nullptr);
      return;
    }
    const uint32_t low = (uint32_t)seeds[row], high = (uint32_t)((uint64_t)seeds[row] >> 32);
    uint32_t first = mix(low ^ mix((uint32_t)positions[row] ^ 0x243f6a88u));
    const uint32_t second = mix(high ^ first ^ (uint32_t)head * 0x9e3779b1u);
    first = mix(first ^ second ^ 0x85a308d3u);
    if (!((k[row] > 0 && k[row] < vocab) || p[row] < 1.0f || least[row] > 0)) {
      to[row] = table().noisy_argmax(x, nullptr, vocab, heat[row], first, second);
      return;
    }
    thread_local std::vector<uint32_t> kept;
    thread_local std::vector<float> values;
    kept_ids(x, vocab, {heat[row], k[row], p[row], least[row]}, kept);
    std::sort(kept.begin(), kept.end());  // equal scores give the lower id
    values.resize(kept.size());
    for (size_t i = 0; i < kept.size(); ++i) values[i] = x[kept[i]];
    to[row] = kept.empty()
                  ? table().argmax(x, vocab, nullptr)
                  : kept[table().noisy_argmax(values.data(), kept.data(), kept.size(), heat[row], first, second)];
  });
  return ids;
}

std::string instruction_set() { return table().name; }

// For tests: takes another table. False where this CPU has none of that name.
bool use_instruction_set(const std::string& name) {
  for (const motet::Table* usable : usable_tables())
    if (name == usable->name) {
      chosen_table() = usable;
      return true;
    }
  return false;
}

}  // namespace

void motet::rotate_store_kv(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cos, const Tensor& sin,
                            const Tensor& kv, const Tensor& slots, bool interleaved) {
  ::rotate_store_kv(q, k, v, cos, sin, kv, slots, interleaved);
}

TORCH_LIBRARY(motet_cpu, m) {
  m.def(
      "paged_attention(Tensor q, Tensor kv, Tensor tables, Tensor position, Tensor num_visible, Tensor row_starts, "
      "Tensor? ancestors, Tensor? tree_starts, Tensor? sinks, float scale, int window, float soft_cap, bool want_lse) "
      "-> (Tensor, Tensor)");
  m.def("store_kv(Tensor k, Tensor v, Tensor(a!) kv, Tensor slots) -> ()");
  m.def("rotate(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, bool interleaved) -> ()");
  m.def(
      "rotate_store_kv(Tensor(a!) q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(b!) kv, Tensor slots, bool "
      "interleaved) -> ()");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, float offset) -> Tensor");
  m.def("rms_norm_residual(Tensor x, Tensor(a!) residual, Tensor weight, float eps, float offset) -> Tensor");
  m.def("gated(Tensor gate_up, int kind) -> Tensor");
  m.def("argmax(Tensor logits) -> Tensor");
  m.def(
      "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor "
      "position, int head) -> Tensor");
  m.def("instruction_set() -> str", &instruction_set);
  m.def("use_instruction_set(str name) -> bool", [](std::string name) { return use_instruction_set(name); });
}

TORCH_LIBRARY_IMPL(motet_cpu, CPU, m) {
  m.impl("store_kv", &store_kv);
  m.impl("rotate", &rotate);
  m.impl("rotate_store_kv", &rotate_store_kv);
  m.impl("rms_norm", &rms_norm);
  m.impl("rms_norm_residual", &rms_norm_residual);
  m.impl("gated", &gated);
  m.impl("argmax", &argmax);
  m.impl("sample", &sample);
}
