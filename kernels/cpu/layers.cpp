// torch.ops.motet_cpu.decoder_layers: all layers of a decoder, or some that follow each other, in one call, for steps of few
// rows.
//
// A decode step of a small model is some 200 kernels of a few microseconds each; called one by one from Python a quarter of
// its time goes into the calls. This is the same sequence of the same functions: not one number differs.
//
// Block: x + attention(norm(x)), then x + mlp(norm(x)); RMSNorm, fused QKV and gate-up, the sum over the layers in fp32.
#include <torch/custom_class.h>

#include <array>
#include <chrono>
#include <optional>

#include "ops.h"

namespace {

// Rows of a matrix in layout rows16; `tensors` keep alive what `weight` points to.
struct Part {
  motet::Weight weight;
  std::vector<Tensor> tensors;
  const void* bias;
  Type bias_type;
};

// One or more parts over one input, their outputs side by side.
struct Matrix {
  std::vector<Part> parts;
  int64_t in = 0, out = 0;

  // x bf16 [rows, in] -> y bf16 [rows, out]
  void multiply(const char* x, int64_t rows, char* y) const {
    for (const Part& part : parts) {
      motet::multiply(part.weight, reinterpret_cast<const uint16_t*>(x), rows, {y, Type::bf16, out, part.bias, part.bias_type});
      y += part.weight.out * 2;
    }
  }
};

constexpr int64_t kNumMatrices = 4;

struct Layer {
  Tensor attention_norm, mlp_norm;
  std::optional<Tensor> q_norm, k_norm;
  int64_t rope, window;
  std::array<Matrix, kNumMatrices> matrices;

  const Matrix& qkv() const { return matrices[0]; }
  const Matrix& out() const { return matrices[1]; }
  const Matrix& gate_up() const { return matrices[2]; }
  const Matrix& down() const { return matrices[3]; }
};

// The parts that models/layer_stack.py names, in this order.
enum Phase { kNorm, kQkv, kRotary, kAttention, kOut, kGateUp, kActivation, kDown, kNumPhases };

// Adds the nanoseconds since the last mark to a phase; does nothing without a table.
class Stopwatch {
 public:
  explicit Stopwatch(const std::optional<Tensor>& nanoseconds) {
    if (!nanoseconds) return;
    TORCH_CHECK(nanoseconds->scalar_type() == at::kLong && nanoseconds->is_contiguous() && nanoseconds->numel() == kNumPhases,
                "decoder_layers: expected ", (int)kNumPhases, " int64 counters");
    totals_ = nanoseconds->mutable_data_ptr<int64_t>();
    last_ = Clock::now();
  }
  explicit Stopwatch(int64_t* totals) : totals_(totals), last_(Clock::now()) {}
  bool runs() const { return totals_; }
  // What `threads` threads spent side by side since the last mark.
  void add(const std::vector<std::array<int64_t, kNumPhases>>& spent, int64_t threads) {
    if (!totals_) return;
    for (const auto& piece : spent)
      for (int phase = 0; phase < kNumPhases; ++phase) totals_[phase] += piece[phase] / threads;
    last_ = Clock::now();
  }
  void mark(Phase phase) {
    if (!totals_) return;
    const auto now = Clock::now();
    totals_[phase] += std::chrono::duration_cast<std::chrono::nanoseconds>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  int64_t* totals_ = nullptr;
  Clock::time_point last_;
};

struct Layers : torch::CustomClassHolder {
  Layers(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, double scale, double soft_cap, double eps,
         double offset, int64_t activation, Tensor final_norm)
      : heads(num_heads),
        kv_heads(num_kv_heads),
        dim(head_dim),
        scale(scale),
        soft_cap(soft_cap),
        eps((float)eps),
        offset((float)offset),
        activation((int)activation),
        final_norm(check_norm(final_norm)) {
    TORCH_CHECK(heads > 0 && kv_heads > 0 && heads % kv_heads == 0 && dim > 0, "Layers: ", heads, " heads over ",
                kv_heads, " kv heads of dim ", dim);
    TORCH_CHECK(activation == 0 || activation == 1, "Layers: activation ", activation);
  }

  static Tensor check_norm(const Tensor& weight) {
    type_of(weight);
    TORCH_CHECK(weight.dim() == 1 && weight.is_contiguous(), "Layers: a norm's weight must be a contiguous vector");
    return weight;
  }

  // A layer; its four matrices follow, each by one or more calls of add_part.
  void add_layer(Tensor attention_norm, Tensor mlp_norm, std::optional<Tensor> q_norm, std::optional<Tensor> k_norm,
                 int64_t rope, int64_t window) {
    TORCH_CHECK(q_norm.has_value() == k_norm.has_value() && rope >= 0 && window >= 0, "Layers: a layer's settings");
    if (q_norm) TORCH_CHECK(check_norm(*q_norm).numel() == dim && check_norm(*k_norm).numel() == dim, "Layers: q, k norm");
    layers.push_back({check_norm(attention_norm), check_norm(mlp_norm), q_norm, k_norm, rope, window, {}});
  }
  // The next output features of matrix `which` (0 QKV, 1 out, 2 gate-up, 3 down) of the last layer.
  void add_part(int64_t which, Tensor quants, std::optional<Tensor> scales, std::optional<Tensor> minimum,
                std::optional<Tensor> bias, int64_t bits, int64_t zero, int64_t out) {
    TORCH_CHECK(!layers.empty() && which >= 0 && which < kNumMatrices, "Layers: matrix ", which);
    Part part{motet::describe(quants, scales, minimum, bits, zero, out), {quants}, nullptr, Type::fp32};
    for (const std::optional<Tensor>* tensor : {&scales, &minimum, &bias})
      if (*tensor) part.tensors.push_back(**tensor);
    if (bias) {
      TORCH_CHECK(bias->dim() == 1 && bias->size(0) == out && bias->is_contiguous(), "Layers: bias must be [out]");
      part.bias = bias->const_data_ptr(), part.bias_type = type_of(*bias);
    }
    Matrix& matrix = layers.back().matrices[which];
    TORCH_CHECK(matrix.parts.empty() || matrix.in == part.weight.in, "Layers: parts of one matrix differ in inputs");
    matrix.in = part.weight.in, matrix.out += out;
    matrix.parts.push_back(std::move(part));
  }
  // Raises unless the last layer's matrices fit each other.
  void check_layer(int64_t features) const {
    const Layer& layer = layers.back();
    TORCH_CHECK(layer.qkv().in == features && layer.qkv().out == (heads + 2 * kv_heads) * dim &&
                    layer.out().in == heads * dim && layer.out().out == features && layer.gate_up().in == features &&
                    layer.gate_up().out == 2 * layer.down().in && layer.down().out == features &&
                    layer.attention_norm.numel() == features && layer.mlp_norm.numel() == features &&
                    final_norm.numel() == features && layer.gate_up().out == layers[0].gate_up().out,
                "Layers: the matrices of layer ", layers.size() - 1, " do not fit ", features, " features");
  }

  const int64_t heads, kv_heads, dim;
  const double scale, soft_cap;
  const float eps, offset;
  const int activation;
  const Tensor final_norm;
  std::vector<Layer> layers;
};

// out [R, E] = norm(x), or norm(x + residual) with the sum left in `residual` fp32; x and out bf16.
void norm_rows(const Layers& stack, int64_t rows, int64_t features, const char* x, float* residual, const Tensor& weight,
               char* out) {
  const Type weight_type = type_of(weight);
  const char* factors = bytes(weight);
  share_rows(rows, rows * features, [&](int64_t row) {
    table().rms_norm(Type::bf16, weight_type, features, x + row * features * 2, residual ? residual + row * features : nullptr,
                     factors, stack.eps, stack.offset, out + row * features * 2);
  });
}

// Norms `count` heads from `first` on of x [R, stride] in place.
void norm_heads(const Layers& stack, int64_t rows, int64_t stride, char* x, int64_t first, int64_t count, const Tensor& weight) {
  share_rows(rows * count, rows * count * stack.dim, [&](int64_t i) {
    char* head = x + (i / count * stride + (first + i % count) * stack.dim) * 2;
    table().rms_norm(Type::bf16, type_of(weight), stack.dim, head, nullptr, bytes(weight), stack.eps, stack.offset, head);
  });
}

// hidden bf16 [R, E] -> hidden rows [R, E] after the final norm; K and V go into kvs. The batch is a PagedBatch's;
// cos and sin [R, half] fp32 come per rotary base, kvs and groups per layer, slots and tables per group.
//
// With `stream` fp32 [R, E] only layers begin..end run. Between them and those before and behind, rows travel as two tensors:
// the sum so far in `stream`, and what the last layer adds to it (bf16 [R, E]) as `hidden` and as the result.
Tensor decoder_layers(const c10::intrusive_ptr<Layers>& layers, const Tensor& hidden, const std::vector<Tensor>& kvs,
                      at::IntArrayRef groups, const Tensor& position, const std::vector<Tensor>& slots,
                      const Tensor& num_visible, const std::vector<Tensor>& tables, const Tensor& row_starts,
                      const std::vector<Tensor>& cos, const std::vector<Tensor>& sin,
                      const std::optional<Tensor>& ancestors, const std::optional<Tensor>& tree_starts,
                      const std::optional<Tensor>& nanoseconds, int64_t begin, int64_t end,
                      const std::optional<Tensor>& stream) {
  const Layers& stack = *layers;
  const int64_t num_layers = stack.layers.size(), H = stack.heads, K = stack.kv_heads, D = stack.dim;
  TORCH_CHECK(hidden.dim() == 2 && hidden.is_contiguous() && hidden.scalar_type() == at::kBFloat16 &&
                  hidden.size(1) == stack.final_norm.numel(),
              "decoder_layers: expected contiguous bf16 rows [R, ", stack.final_norm.numel(), "], got ",
              hidden.scalar_type(), " ", hidden.sizes());
  TORCH_CHECK(num_layers > 0 && (int64_t)kvs.size() == num_layers && (int64_t)groups.size() == num_layers, "decoder_layers: ",
              num_layers, " layers, ", kvs.size(), " caches, ", groups.size(), " groups");
  TORCH_CHECK(slots.size() == tables.size() && cos.size() == sin.size(), "decoder_layers: slots and tables, cos and sin");
  TORCH_CHECK(0 <= begin && begin < end && end <= num_layers && (stream || end - begin == num_layers),
              "decoder_layers: layers ", begin, " to ", end, " of ", num_layers, stream ? "" : " without a stream");
  TORCH_CHECK(!stream || (stream->scalar_type() == at::kFloat && stream->is_contiguous() && stream->sizes() == hidden.sizes()),
              "decoder_layers: expected a contiguous fp32 stream ", hidden.sizes());
  Stopwatch watch(nanoseconds);
  const int64_t rows = hidden.size(0), features = hidden.size(1), half = stack.layers[0].down().in;
  const auto like = [&](int64_t width) { return at::empty({rows, width}, hidden.options()); };
  const Tensor normed = like(features), qkv = like((H + 2 * K) * D), gate_up = like(2 * half), product = like(half), added = like(features);
  const Tensor residual = stream ? *stream : at::empty({rows, features}, hidden.options().dtype(at::kFloat));
  const Tensor heads = qkv.view({rows, H + 2 * K, D});
  const Tensor q = heads.narrow(1, 0, H), k = heads.narrow(1, H, K), v = heads.narrow(1, H + K, K);
  float* sums = residual.mutable_data_ptr<float>();
  char *normed_data = mutable_bytes(normed), *qkv_data = mutable_bytes(qkv), *gates = mutable_bytes(gate_up),
       *products = mutable_bytes(product), *x = mutable_bytes(added);
  if (!begin) table().convert(Type::bf16, Type::fp32, rows * features, bytes(hidden), sums);
  const int64_t threads = at::get_num_threads();
  // Work on rows `first` .. `first + count`: all at once, or each thread with pieces of its own from matrix to matrix.
  const auto by_rows = [&](const auto& work) {
    if (!motet::RowPieces::worth(rows, threads)) return work(0, rows, watch);
    const motet::RowPieces pieces(rows, threads);
    std::vector<std::array<int64_t, kNumPhases>> spent(pieces.count);
    share(pieces.count, true, [&](int64_t piece) {
      Stopwatch own(watch.runs() ? spent[piece].data() : nullptr);
      work(pieces.begin(piece), pieces.begin(piece + 1) - pieces.begin(piece), own);
    });
    watch.add(spent, threads);
  };
  // From the sum so far to q, k and v of layer i; behind the last layer to the final norm.
  const auto enter = [&](int64_t i, int64_t first, int64_t count, Stopwatch& own) {
    const int64_t width = (H + 2 * K) * D;
    char *to = normed_data + first * features * 2, *qkv_rows = qkv_data + first * width * 2;
    norm_rows(stack, count, features, (i > begin ? x : bytes(hidden)) + first * features * 2, i ? sums + first * features : nullptr,
              i < num_layers ? stack.layers[i].attention_norm : stack.final_norm, to);
    own.mark(kNorm);
    if (i == num_layers) return;
    const Layer& layer = stack.layers[i];
    layer.qkv().multiply(to, count, qkv_rows);
    own.mark(kQkv);
    if (!layer.q_norm) return;
    norm_heads(stack, count, width, qkv_rows, 0, H, *layer.q_norm);
    norm_heads(stack, count, width, qkv_rows, H, K, *layer.k_norm);
    own.mark(kNorm);
  };
  // From the heads' results through the MLP.
  const auto leave = [&](const Layer& layer, const char* mixed, int64_t first, int64_t count, Stopwatch& own) {
    char *to = normed_data + first * features * 2, *sum = x + first * features * 2, *gate = gates + first * half * 4,
         *gated = products + first * half * 2;
    layer.out().multiply(mixed + first * H * D * 2, count, sum);
    own.mark(kOut);
    norm_rows(stack, count, features, sum, sums + first * features, layer.mlp_norm, to);
    own.mark(kNorm);
    layer.gate_up().multiply(to, count, gate);
    own.mark(kGateUp);
    share_rows(count, count * half * 4, [&](int64_t row) {
      const char* pair = gate + row * half * 4;
      table().gated(Type::bf16, half, pair, pair + half * 2, stack.activation, gated + row * half * 2);
    });
    own.mark(kActivation);
    layer.down().multiply(gated, count, sum);
    own.mark(kDown);
  };
  by_rows([&](int64_t first, int64_t count, Stopwatch& own) { enter(begin, first, count, own); });
  for (int64_t i = begin; i < end; ++i) {
    const Layer& layer = stack.layers[i];
    const int64_t group = groups[i];
    TORCH_CHECK(group >= 0 && group < (int64_t)slots.size() && layer.rope < (int64_t)cos.size(),
                "decoder_layers: layer ", i, " names group ", group, " and rotary ", layer.rope);
    motet::rotate_store_kv(q, k, v, cos[layer.rope], sin[layer.rope], kvs[i], slots[group], false);
    watch.mark(kRotary);
    const Tensor mixed = std::get<0>(motet::paged_attention(q, kvs[i], tables[group], position, num_visible, row_starts,
                                                            ancestors, tree_starts, std::nullopt, stack.scale,
                                                            layer.window, stack.soft_cap, false));
    const char* mixed_data = bytes(mixed);
    watch.mark(kAttention);
    by_rows([&](int64_t first, int64_t count, Stopwatch& own) {
      leave(layer, mixed_data, first, count, own);
      if (i + 1 < end || end == num_layers) enter(i + 1, first, count, own);
    });
  }
  return end == num_layers ? normed : added;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(motet_cpu, m) {
  m.class_<Layers>("Layers")
      .def(torch::init<int64_t, int64_t, int64_t, double, double, double, double, int64_t, Tensor>())
      .def("add_layer", &Layers::add_layer)
      .def("add_part", &Layers::add_part)
      .def("check_layer", &Layers::check_layer)
      .def("num_layers", [](const c10::intrusive_ptr<Layers>& self) { return (int64_t)self->layers.size(); });
  m.def(
      "decoder_layers(__torch__.torch.classes.motet_cpu.Layers layers, Tensor hidden, Tensor[] kvs, int[] groups, Tensor "
      "position, Tensor[] slots, Tensor num_visible, Tensor[] tables, Tensor row_starts, Tensor[] cos, Tensor[] sin, "
      "Tensor? ancestors, Tensor? tree_starts, Tensor(a!)? nanoseconds, int begin, int end, Tensor(b!)? stream) -> Tensor");
}
TORCH_LIBRARY_IMPL(motet_cpu, CPU, m) { m.impl("decoder_layers", &decoder_layers); }
