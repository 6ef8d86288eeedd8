// Row-wise kernels: norm, gated activations, rotation, argmax and seeded noise. A row's numbers depend on the row
// alone.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace {

using motet::Type;

// ------------------------------------------------------------------------------------------------------------ norm

// out = from * scale * (weight + offset), where scale is 1 / rms(from).
template <class F, class G, class X>
void scale_to_rms(int64_t features, const F* from, const G* weight, float eps, float offset, X* out) {
  vf part[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= features; i += 4 * W)
    for (int j = 0; j < 4; ++j) {
      vf v = load(from + i + j * W);
      part[j] += v * v;
    }
  for (; i + W <= features; i += W) {
    vf v = load(from + i);
    part[0] += v * v;
  }
  if (i < features) {
    vf v = load_first(from + i, features - i);
    part[1] += v * v;
  }
  float square = sum_lanes((part[0] + part[1]) + (part[2] + part[3]));
  float scale = 1.0f / __builtin_sqrtf(square / (float)features + eps);
  for (i = 0; i + W <= features; i += W) store(out + i, load(from + i) * scale * (load(weight + i) + offset));
  for (; i < features; ++i) narrow(out + i, widen(from[i]) * scale * (widen(weight[i]) + offset));
}

// The residual is fp32 whatever the rows are: it is summed over all layers.
template <class X, class G>
void rms_norm_typed(int64_t features, const X* x, float* residual, const G* weight, float eps, float offset, X* out) {
  if (!residual) return scale_to_rms(features, x, weight, eps, offset, out);
  int64_t i = 0;
  for (; i + W <= features; i += W) store(residual + i, load(x + i) + load(residual + i));
  for (; i < features; ++i) residual[i] += widen(x[i]);
  scale_to_rms(features, residual, weight, eps, offset, out);
}

template <class X>
void rms_norm_rows(Type weight_type, int64_t features, const void* x, void* residual, const void* weight, float eps,
                   float offset, void* out) {
  if (weight_type == Type::bf16)
    rms_norm_typed(features, (const X*)x, (float*)residual, (const bf16*)weight, eps, offset, (X*)out);
  else
    rms_norm_typed(features, (const X*)x, (float*)residual, (const float*)weight, eps, offset, (X*)out);
}
void rms_norm(Type type, Type weight_type, int64_t features, const void* x, void* residual, const void* weight,
              float eps, float offset, void* out) {
  auto run = type == Type::bf16 ? rms_norm_rows<bf16> : rms_norm_rows<float>;
  run(weight_type, features, x, residual, weight, eps, offset, out);
}

// ----------------------------------------------------------------------------------------------------------- gated

inline vf activate(vf x, int kind) {
  if (kind == 1)
    x = 1.5957691216057308f * (x + 0.044715f * x * x * x), x = 1.0f / (1.0f + exp_lanes(-x));
  else
    x = 1.0f / (1.0f + exp_lanes(-x));
  return x;
}

template <class X>
void gated_typed(int64_t features, const X* gate, const X* up, int kind, X* out) {
  int64_t i = 0;
  for (; i + W <= features; i += W) {
    vf g = load(gate + i);
    store(out + i, g * activate(g, kind) * load(up + i));
  }
  if (i < features) {
    vf g = load_first(gate + i, features - i);
    store_first(out + i, g * activate(g, kind) * load_first(up + i, features - i), features - i);
  }
}
void gated(Type type, int64_t features, const void* gate, const void* up, int kind, void* out) {
  if (type == Type::bf16)
    gated_typed(features, (const bf16*)gate, (const bf16*)up, kind, (bf16*)out);
  else
    gated_typed(features, (const float*)gate, (const float*)up, kind, (float*)out);
}

// ---------------------------------------------------------------------------------------------------------- rotary

template <class X, class Y>
void convert_typed(int64_t n, const X* x, Y* y) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(y + i, load(x + i));
  for (; i < n; ++i) narrow(y + i, widen(x[i]));
}

template <class X, class Y>
void rotate_typed(int64_t dim, int64_t half, const X* x, const float* cos, const float* sin, bool interleaved, Y* y) {
  int64_t i = 0;
  if (interleaved) {
    for (; i < half; ++i) {
      float even = widen(x[2 * i]), odd = widen(x[2 * i + 1]);
      narrow(y + 2 * i, even * cos[i] - odd * sin[i]);
      narrow(y + 2 * i + 1, odd * cos[i] + even * sin[i]);
    }
  } else {
    for (; i + W <= half; i += W) {
      vf low = load(x + i), high = load(x + half + i), c = load(cos + i), s = load(sin + i);
      store(y + i, low * c - high * s);
      store(y + half + i, high * c + low * s);
    }
    for (; i < half; ++i) {
      float low = widen(x[i]), high = widen(x[half + i]);
      narrow(y + i, low * cos[i] - high * sin[i]);
      narrow(y + half + i, high * cos[i] + low * sin[i]);
    }
  }
  if ((const void*)x != (const void*)y) convert_typed(dim - 2 * half, x + 2 * half, y + 2 * half);
}

void rotate(Type type, Type out_type, int64_t dim, int64_t half, const void* x, const float* cos, const float* sin,
            bool interleaved, void* y) {
  if (type == Type::bf16) {
    if (out_type == Type::bf16)
      rotate_typed(dim, half, (const bf16*)x, cos, sin, interleaved, (bf16*)y);
    else
      rotate_typed(dim, half, (const bf16*)x, cos, sin, interleaved, (float*)y);
  } else {
    if (out_type == Type::bf16)
      rotate_typed(dim, half, (const float*)x, cos, sin, interleaved, (bf16*)y);
    else
      rotate_typed(dim, half, (const float*)x, cos, sin, interleaved, (float*)y);
  }
}
void convert(Type type, Type out_type, int64_t n, const void* x, void* y) {
  if (type == out_type)
    memcpy(y, x, n * (type == Type::bf16 ? 2 : 4));
  else if (type == Type::bf16)
    convert_typed(n, (const bf16*)x, (float*)y);
  else
    convert_typed(n, (const float*)x, (bf16*)y);
}

template <class X>
void quantize_typed(int64_t n, const X* x, int8_t* y) {
  float top = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    float a = __builtin_fabsf(widen(x[i]));
    finite &= a <= __FLT_MAX__;
    top = a > top ? a : top;
  }
  // Below the bound 127 / top would overflow; such a row counts as zeros.
  const float inverse = finite && top > 1e-36f ? 127.0f / top : 0.0f;
  float scale = !finite ? __builtin_nanf("") : inverse > 0.0f ? top / 127.0f : 0.0f;
  // Halves to even; no sum behind the product, which a compiler would fuse.
  for (int64_t i = 0; i < n; ++i) y[i] = (int8_t)(int32_t)__builtin_rintf(finite ? widen(x[i]) * inverse : 0.0f);
  memcpy(y + n, &scale, 4);
}
void quantize(Type type, int64_t n, const void* x, void* y) {
  type == Type::bf16 ? quantize_typed(n, (const bf16*)x, (int8_t*)y) : quantize_typed(n, (const float*)x, (int8_t*)y);
}

// -------------------------------------------------------------------------------------------------------- sampling

constexpr int64_t kBlock = 512;  // ids judged together: a block that cannot win costs one maximum

inline float block_max(const float* x, int64_t n) {
  vf best[4];
  for (int j = 0; j < 4; ++j) best[j] = splat(-__builtin_inff());
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int j = 0; j < 4; ++j) best[j] = larger(load(x + i + j * W), best[j]);
  for (; i + W <= n; i += W) best[0] = larger(load(x + i), best[0]);
  float top = max_lanes(larger(larger(best[0], best[1]), larger(best[2], best[3])));
  for (; i < n; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

int64_t argmax(const float* x, int64_t n, float* value) {
  float top = -__builtin_inff();
  int64_t where = 0;
  for (int64_t i = 0; i < n; i += kBlock) {
    float best = block_max(x + i, n - i < kBlock ? n - i : kBlock);
    if (best > top) top = best, where = i;
  }
  int64_t last = where + kBlock < n ? where + kBlock : n;
  for (int64_t i = where; i < last; ++i)
    if (x[i] == top) {
      where = i;
      break;
    }
  if (value) *value = top;
  return where;
}

inline vu mix_bits(vu x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

inline vf gumbel(vu ids, uint32_t high, uint32_t low) {
  vu bits = mix_bits(mix_bits(ids * 0x9e3779b1u ^ high) ^ low);
  vf w = (__builtin_convertvector(bits, vf) + 0.5f) * 2.3283064365386963e-10f;  // 2^-32
  w = w < splat(0.99999994f) ? w : splat(0.99999994f);
  // -log1p(-w): its series where w is small, else the logarithm itself
  vf series = w * (1.0f + w * (0.5f + w * (0.33333333f + w * (0.25f + w * (0.2f + w * 0.16666667f)))));
  vf wide = -log_lanes(1.0f - w);
  return -log_lanes(pick((vi)(w < splat(0.03125f)), series, wide));
}

int64_t noisy_argmax(const float* x, const uint32_t* ids, int64_t n, float divisor, uint32_t high, uint32_t low) {
  const float most = 23.0f;  // no gumbel of 32 bits is larger
  vu lane;
  for (int i = 0; i < W; ++i) lane[i] = i;
  float top = -__builtin_inff();
  int64_t where = -1;
  // The block of the largest value goes first: what it reaches lets most others be skipped.
  int64_t first = ids ? 0 : argmax(x, n, nullptr) / kBlock * kBlock;
  for (int64_t turn = -1; turn * kBlock < n; ++turn) {
    int64_t begin = turn < 0 ? first : turn * kBlock;
    if (turn >= 0 && begin == first) continue;
    int64_t end = begin + kBlock < n ? begin + kBlock : n;
    if (turn >= 0 && block_max(x + begin, end - begin) / divisor + most < top) continue;
    float scored[kBlock];
    vf best = splat(-__builtin_inff());
    for (int64_t i = begin; i < end; i += W) {
      int64_t some = end - i < W ? end - i : W;
      vf value = some == W ? load(x + i) : load_first(x + i, some);
      vu id = lane + (uint32_t)i;
      if (ids) {
        uint32_t buffer[W] = {};
        memcpy(buffer, ids + i, some * 4);
        id = *(const vu_any*)buffer;
      }
      vf score = value / divisor + gumbel(id, high, low);
      if (some < W) score = pick((vi)(lane < (uint32_t)some), score, splat(-__builtin_inff()));
      store(scored + (i - begin), score);
      best = larger(score, best);
    }
    float block_best = max_lanes(best);
    if (!(block_best > top || (block_best == top && begin < where))) continue;
    for (int64_t i = begin; i < end; ++i)
      if (scored[i - begin] == block_best) {
        top = block_best, where = i;
        break;
      }
  }
  return where < 0 ? 0 : where;
}

int64_t at_least(const float* x, int64_t n, float least, uint32_t* ids) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 64) {
    int64_t end = i + 64 < n ? i + 64 : n;
    if (block_max(x + i, end - i) < least) continue;
    for (int64_t j = i; j < end; ++j) {
      ids[count] = (uint32_t)j;
      count += x[j] >= least;
    }
  }
  return count;
}

double sum_exp(const float* x, int64_t n, float divisor, float top) {
  double total = 0;
  for (int64_t i = 0; i < n; i += kBlock) {
    int64_t end = i + kBlock < n ? i + kBlock : n;
    vf part = vf{};
    int64_t j = i;
    for (; j + W <= end; j += W) part += exp_lanes((load(x + j) - top) / divisor);
    float rest = 0;
    for (; j < end; ++j) rest += exp_lanes(splat((x[j] - top) / divisor))[0];
    total += (double)sum_lanes(part) + (double)rest;
  }
  return total;
}

}  // namespace
