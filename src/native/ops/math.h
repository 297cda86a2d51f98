// exp and lane sums over a Vec (include one of simd_*.h first). Every function has one order of operations.
#pragma once

namespace outrider::OUTRIDER_OPS {

// e^x to 2 ulp; 0 below -87.33 (where the result would be subnormal), at most e^88.37; e^0 is exactly 1; NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2, and e^r from its Taylor series: the term r^8 / 8! is below half an ulp.
inline Vec exp(Vec x) {
  constexpr float kLowest = -87.33f, kHighest = 88.37f;
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;  // the first with zeros in its last bits
  const Vec bounded = max(Vec::set(kLowest - 1), min(Vec::set(kHighest), x));
  const Vec n = round(bounded * Vec::set(1.44269504f));
  const Vec r = fma(n, Vec::set(-kLn2Low), fma(n, Vec::set(-kLn2High), bounded));
  Vec y = Vec::set(1.0f / 5040);
  y = fma(y, r, Vec::set(1.0f / 720));
  y = fma(y, r, Vec::set(1.0f / 120));
  y = fma(y, r, Vec::set(1.0f / 24));
  y = fma(y, r, Vec::set(1.0f / 6));
  y = fma(y, r, Vec::set(0.5f));
  y = fma(y, r, Vec::set(1.0f));
  y = fma(y, r, Vec::set(1.0f));
  return zero_where_below(y * power_of_two(n), x, kLowest);
}

// Halves added to each other until one lane is left.
inline float sum_lanes(Vec a) {
  float lanes[Vec::kLanes];
  a.store(lanes);
  for (int width = Vec::kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

inline float max_lanes(Vec a) {
  float lanes[Vec::kLanes];
  a.store(lanes);
  float highest = lanes[0];
  for (int i = 1; i < Vec::kLanes; ++i) highest = lanes[i] > highest ? lanes[i] : highest;
  return highest;
}

}  // namespace outrider::OUTRIDER_OPS
