// RMSNorm, rotary embedding, SwiGLU and sums over a row (include one of simd_*.h and math.h first).
#pragma once

#include <cmath>
#include <cstdint>

namespace outrider::OUTRIDER_OPS {

// Sum of squares: four vectors of partial sums, so that additions overlap; which element goes to which is fixed.
inline float sum_of_squares(const float* x, std::int64_t n) {
  constexpr int kParts = 4, kLanes = Vec::kLanes;
  Vec parts[kParts] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
  std::int64_t i = 0;
  for (; i + kParts * kLanes <= n; i += kParts * kLanes)
    for (int part = 0; part < kParts; ++part) {
      const Vec v = Vec::load(x + i + part * kLanes);
      parts[part] = fma(v, v, parts[part]);
    }
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = Vec::load(x + i);
    parts[0] = fma(v, v, parts[0]);
  }
  float total = sum_lanes((parts[0] + parts[1]) + (parts[2] + parts[3]));
  for (; i < n; ++i) total += x[i] * x[i];
  return total;
}

inline void rms_norm(const float* x, const float* weight, float eps, std::int64_t n, float* y) {
  const float scale = 1.0f / __builtin_sqrtf(sum_of_squares(x, n) / static_cast<float>(n) + eps);
  std::int64_t i = 0;
  for (; i + Vec::kLanes <= n; i += Vec::kLanes)
    (Vec::load(x + i) * Vec::set(scale) * Vec::load(weight + i)).store(y + i);
  for (; i < n; ++i) y[i] = x[i] * scale * weight[i];
}

inline void rope(float* x, int heads, int head_dim, const float* cosine, const float* sine) {
  const int half = head_dim / 2;
  for (int head = 0; head < heads; ++head, x += head_dim) {
    float* upper = x + half;
    int i = 0;
    for (; i + Vec::kLanes <= half; i += Vec::kLanes) {
      const Vec a = Vec::load(x + i), b = Vec::load(upper + i);
      const Vec c = Vec::load(cosine + i), s = Vec::load(sine + i);
      (a * c - b * s).store(x + i);
      (b * c + a * s).store(upper + i);
    }
    for (; i < half; ++i) {
      const float a = x[i], b = upper[i];
      x[i] = a * cosine[i] - b * sine[i];
      upper[i] = b * cosine[i] + a * sine[i];
    }
  }
}

inline Vec swiglu(Vec gate, Vec up) {
  const Vec one = Vec::set(1.0f);
  return gate / (one + exp(Vec::zero() - gate)) * up;
}

inline void swiglu(const float* gate, const float* up, std::int64_t n, float* y) {
  constexpr int kLanes = Vec::kLanes;
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) swiglu(Vec::load(gate + i), Vec::load(up + i)).store(y + i);
  if (i == n) return;
  float last[3][kLanes] = {};
  for (std::int64_t j = i; j < n; ++j) last[0][j - i] = gate[j], last[1][j - i] = up[j];
  swiglu(Vec::load(last[0]), Vec::load(last[1])).store(last[2]);
  for (std::int64_t j = i; j < n; ++j) y[j] = last[2][j - i];
}

inline void add(const float* x, std::int64_t n, float* y) {
  std::int64_t i = 0;
  for (; i + Vec::kLanes <= n; i += Vec::kLanes) (Vec::load(y + i) + Vec::load(x + i)).store(y + i);
  for (; i < n; ++i) y[i] += x[i];
}

}  // namespace outrider::OUTRIDER_OPS
