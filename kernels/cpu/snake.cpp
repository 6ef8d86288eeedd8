// Snake and the residual unit around it. build.py compiles this file once per set: -DMOTET_TABLE=snake_avx2 -mavx2 ...
//
// A unit runs over a few rows at a time: depthwise convolution and second Snake into a scratch that stays in L1, then the
// product of these rows with the matrix, its sums in registers.
#include "snake.h"

#include "vector.h"

extern "C" float sinf(float) noexcept;

namespace {

using motet::kUnitRows;
using motet::SnakeUnit;

constexpr float kLargest = 8192.0f;  // beyond, the reduction below would lose digits

// sin(u)^2 for |u| <= kLargest, about 2e-7 of absolute error: its period is pi, so whole turns of pi fall away, taken off
// in three parts (Cody and Waite); then an odd polynomial, the best of its degree on -pi/2 .. pi/2.
inline vf sine_squared(vf u) {
  vf turns = (u * 0.318309886183790672f + 12582912.0f) - 12582912.0f;  // adding 1.5 * 2^23 rounds
  vf r = u - turns * 3.140625f;
  r = r - turns * 9.67502593994140625e-4f;
  r = r - turns * 1.509957990978376432e-7f;
  vf z = r * r;
  vf y = splat(2.5999016173e-6f);
  y = y * z - 1.9806546236e-4f;
  y = y * z + 8.3330163408e-3f;
  y = y * z - 1.6666657058e-1f;
  vf sine = r + r * (z * y);
  return sine * sine;
}

inline vi beyond(vf u) { return (vi)((u > kLargest) | (u < -kLargest)); }
inline bool any(vi mask) {
  int32_t lanes[W], found = 0;
  memcpy(lanes, &mask, sizeof lanes);
  for (int i = 0; i < W; ++i) found |= lanes[i];
  return found != 0;
}
inline float snake_one(float x, float alpha, float inverse) {
  float sine = sinf(alpha * x);
  return x + sine * sine * inverse;
}

void snake_rows(int64_t rows, int64_t channels, const float* x, const float* alpha, const float* inverse, float* out) {
  for (int64_t row = 0; row < rows; ++row, x += channels, out += channels) {
    vi far = {};
    int64_t c = 0;
    for (; c + W <= channels; c += W) {
      vf value = load(x + c), u = load(alpha + c) * value;
      far |= beyond(u);
      store(out + c, value + load(inverse + c) * sine_squared(u));
    }
    if (any(far)) c = 0;  // once more, slowly
    for (; c < channels; ++c) out[c] = snake_one(x[c], alpha[c], inverse[c]);
  }
}

// One row of the convolution and the second Snake.
inline void convolve(const SnakeUnit& unit, const float* active, float* out) {
  const int64_t channels = unit.channels, apart = unit.dilation * channels;
  vi far = {};
  for (int64_t c = 0; c < channels; c += W) {
    vf sum = load(unit.taps_bias + c);
    for (int64_t tap = 0; tap < unit.num_taps; ++tap)
      sum += load(active + tap * apart + c) * load(unit.taps + tap * channels + c);
    vf u = load(unit.alpha + c) * sum;
    far |= beyond(u);
    store(out + c, sum + load(unit.inverse + c) * sine_squared(u));
  }
  if (!any(far)) return;
  for (int64_t c = 0; c < channels; ++c) {
    float sum = unit.taps_bias[c];
    for (int64_t tap = 0; tap < unit.num_taps; ++tap) sum += active[tap * apart + c] * unit.taps[tap * channels + c];
    out[c] = snake_one(sum, unit.alpha[c], unit.inverse[c]);
  }
}

// out[r] = skip[r] + bias + matrix . rows[r] for V vectors of columns from c and the first `num` of kUnitRows rows.
template <int V>
inline void multiply(const SnakeUnit& unit, int64_t c, int64_t num, const float* rows, const float* const* skip,
                     float* out) {
  const int64_t channels = unit.channels;
  const float* column = unit.matrix + c;
  vf sums[kUnitRows][V];
  for (int r = 0; r < kUnitRows; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = load(unit.bias + c + v * W);
  for (int64_t k = 0; k < channels; ++k, column += channels) {
    vf weights[V];
    for (int v = 0; v < V; ++v) weights[v] = load(column + v * W);
    for (int r = 0; r < kUnitRows; ++r) {
      vf value = splat(rows[r * channels + k]);
      for (int v = 0; v < V; ++v) sums[r][v] += value * weights[v];
    }
  }
  for (int64_t r = 0; r < num; ++r)
    for (int v = 0; v < V; ++v) store(out + r * channels + c + v * W, sums[r][v] + load(skip[r] + c + v * W));
}

void unit_rows(const SnakeUnit& unit, int64_t begin, int64_t end, const float* active, const float* held, const float* x,
          float* out, float* scratch) {
  const int64_t channels = unit.channels, delay = (unit.num_taps - 1) / 2 * unit.dilation;
  for (int64_t t = begin; t < end; t += kUnitRows) {
    const int64_t num = end - t < kUnitRows ? end - t : kUnitRows;
    const float* skip[kUnitRows];
    for (int64_t r = 0; r < kUnitRows; ++r) {
      const int64_t at = t + (r < num ? r : num - 1);
      convolve(unit, active + at * channels, scratch + r * channels);
      skip[r] = at < delay ? held + at * channels : x + (at - delay) * channels;
    }
    int64_t c = 0;
    for (; c + 2 * W <= channels; c += 2 * W) multiply<2>(unit, c, num, scratch, skip, out + t * channels);
    for (; c < channels; c += W) multiply<1>(unit, c, num, scratch, skip, out + t * channels);
  }
}

}  // namespace

namespace motet {

const SnakeTable* MOTET_TABLE() {
  static const SnakeTable table = {MOTET_NAME, snake_rows, unit_rows};
  return &table;
}

}  // namespace motet
