// The torch operators motet_cpu::snake and motet_cpu::snake_unit: check shapes, share rows among torch's threads, move the
// streams' states on. How work is shared never changes a number.
#include <ATen/ops/empty_like.h>

#include <cstring>
#include <string>

#include "ops.h"
#include "snake.h"

namespace {

constexpr float kTiny = 1e-9f;
constexpr int64_t kPiece = 64;      // rows that a thread takes at a time
constexpr int64_t kAlone = 1 << 14;  // elements below which waking a thread costs more than it helps

// The set that the other kernels use.
const motet::SnakeTable& snakes() {
#if defined(__x86_64__)
  const std::string name = table().name;
  for (auto* made : {motet::snake_avx512bf16, motet::snake_avx512, motet::snake_avx2})
    if (name == made()->name) return *made();
#endif
  return *motet::snake_plain();
}

bool plain(const Tensor& x, int64_t dims) {
  return x.scalar_type() == at::kFloat && x.dim() == dims && x.is_contiguous();
}

// 1 / alpha, one Snake after the other. Operators live on one thread at a time per caller, so each has its own room.
std::vector<float> inverses(const Tensor& alpha) {
  const float* from = alpha.const_data_ptr<float>();
  std::vector<float> made(alpha.numel());
  for (size_t i = 0; i < made.size(); ++i) made[i] = 1.0f / (from[i] + kTiny);
  return made;
}

Tensor snake(const Tensor& x, const Tensor& alpha) {
  TORCH_CHECK(plain(x, x.dim()) && plain(alpha, 1) && x.dim() > 0 && x.size(-1) == alpha.size(0),
              "snake: expected contiguous fp32 x [.., C] and alpha [C]");
  Tensor out = at::empty_like(x);
  const int64_t channels = alpha.size(0), rows = channels ? x.numel() / channels : 0;
  const std::vector<float> inverse = inverses(alpha);
  const float *from = x.const_data_ptr<float>(), *a = alpha.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const motet::SnakeTable& kernels = snakes();
  share((rows + kPiece - 1) / kPiece, x.numel() > kAlone, [&](int64_t piece) {
    const int64_t begin = piece * kPiece, num = std::min(rows - begin, kPiece);
    kernels.snake(num, channels, from + begin * channels, a, inverse.data(), to + begin * channels);
  });
  return out;
}

Tensor snake_unit(const Tensor& x, const Tensor& alpha, const Tensor& taps, const Tensor& taps_bias,
                  const Tensor& second_alpha, const Tensor& matrix, const Tensor& bias, int64_t dilation,
                  const Tensor& active, const Tensor& held, const Tensor& slots, const std::optional<Tensor>& keep) {
  TORCH_CHECK(plain(x, 3) && plain(taps, 2) && taps.size(0) % 2 == 1 && dilation > 0, "snake_unit: x [B, N, C], taps [K, C]");
  const int64_t batch = x.size(0), rows = x.size(1), channels = x.size(2), num_taps = taps.size(0);
  const int64_t delay = (num_taps - 1) / 2 * dilation, context = 2 * delay;
  for (const Tensor* vector : {&alpha, &taps_bias, &second_alpha, &bias})
    TORCH_CHECK(plain(*vector, 1) && vector->size(0) == channels, "snake_unit: vectors are fp32 [C]");
  TORCH_CHECK(channels % 16 == 0 && taps.size(1) == channels, "snake_unit: C is a multiple of 16");
  TORCH_CHECK(plain(matrix, 2) && matrix.size(0) == channels && matrix.size(1) == channels, "snake_unit: matrix [C, C]");
  TORCH_CHECK(plain(active, 3) && active.size(1) == context && active.size(2) == channels && plain(held, 3) &&
                  held.size(0) == active.size(0) && held.size(1) == delay && held.size(2) == channels,
              "snake_unit: states are [S, 2 delay, C] and [S, delay, C]");
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.is_contiguous() && slots.dim() == 1 && slots.size(0) == batch,
              "snake_unit: slots are int64 [B]");
  TORCH_CHECK(!keep || (keep->scalar_type() == at::kLong && keep->is_contiguous() && keep->dim() == 2 &&
                        keep->size(0) == batch && keep->size(1) == 2),
              "snake_unit: keep is int64 [B, 2]");
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  for (int64_t b = 0; b < batch; ++b) TORCH_CHECK(0 <= slot[b] && slot[b] < active.size(0), "snake_unit: no such slot");

  Tensor out = at::empty_like(x);
  const std::vector<float> first = inverses(alpha), second = inverses(second_alpha);
  const motet::SnakeUnit unit{taps.const_data_ptr<float>(), taps_bias.const_data_ptr<float>(),
                              second_alpha.const_data_ptr<float>(), second.data(), matrix.const_data_ptr<float>(),
                              bias.const_data_ptr<float>(), channels, num_taps, dilation};
  const float *from = x.const_data_ptr<float>(), *a = alpha.const_data_ptr<float>();
  float *to = out.mutable_data_ptr<float>(), *actives = active.mutable_data_ptr<float>(),
        *helds = held.mutable_data_ptr<float>();
  const motet::SnakeTable& kernels = snakes();
  const int64_t size = rows * channels, each = context * channels, late = delay * channels;
  const int64_t pieces = (rows + kPiece - 1) / kPiece;

  // What each stream has behind its first Snake, old rows before new ones.
  Tensor made = at::empty({batch, context + rows, channels}, x.options());
  float* behind = made.mutable_data_ptr<float>();
  const auto row_of = [&](int64_t b) { return behind + b * (each + size); };
  const auto open = [&](int64_t b, int64_t begin, int64_t num) {
    if (begin == 0) std::memcpy(row_of(b), actives + slot[b] * each, each * sizeof(float));
    kernels.snake(num, channels, from + b * size + begin * channels, a, first.data(), row_of(b) + each + begin * channels);
  };
  const auto run = [&](int64_t b, int64_t begin, int64_t num) {
    float* rows_out = to + b * size;
    kernels.unit(unit, begin, begin + num, row_of(b), helds + slot[b] * late, from + b * size, rows_out,
                 scratch(0, motet::kUnitRows * channels));
    if (!keep) return;
    const int64_t* bounds = keep->const_data_ptr<int64_t>() + 2 * b;
    for (int64_t t = begin; t < begin + num; ++t)
      if (t < bounds[0] || t >= bounds[1]) std::memset(rows_out + t * channels, 0, channels * sizeof(float));
  };
  const auto close = [&](int64_t b) {
    std::memcpy(actives + slot[b] * each, row_of(b) + size, each * sizeof(float));
    float* mine = helds + slot[b] * late;
    const int64_t stay = std::max<int64_t>(delay - rows, 0) * channels;  // older rows that are still to come
    std::memmove(mine, mine + late - stay, stay * sizeof(float));
    std::memcpy(mine + stay, from + (b + 1) * size - (late - stay), (late - stay) * sizeof(float));
  };
  const bool parallel = x.numel() > kAlone;
  if (batch >= at::get_num_threads()) {  // a stream stays with one thread, and in its cache
    share(batch, parallel, [&](int64_t b) {
      open(b, 0, rows);
      run(b, 0, rows);
      close(b);
    });
    return out;
  }
  const auto each_piece = [&](const auto& work) {
    share(batch * pieces, parallel, [&](int64_t i) {
      const int64_t begin = i % pieces * kPiece;
      work(i / pieces, begin, std::min(rows - begin, kPiece));
    });
  };
  each_piece(open);
  each_piece(run);
  for (int64_t b = 0; b < batch; ++b) close(b);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(motet_cpu, m) {
  m.def("snake(Tensor x, Tensor alpha) -> Tensor");
  m.def(
      "snake_unit(Tensor x, Tensor alpha, Tensor taps, Tensor taps_bias, Tensor second_alpha, Tensor matrix, Tensor bias, "
      "int dilation, Tensor(a!) active, Tensor(b!) held, Tensor slots, Tensor? keep) -> Tensor");
}
TORCH_LIBRARY_IMPL(motet_cpu, CPU, m) {
  m.impl("snake", &snake);
  m.impl("snake_unit", &snake_unit);
}
