// Four float32 lanes, in the vector extension that GCC and Clang share: SSE2 on x86-64, NEON on AArch64.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace outrider::OUTRIDER_OPS {

struct Vec {
  static constexpr int kLanes = 4;
  static constexpr int kQueries = 2;
  static constexpr int kKeyVectors = 4;
  static constexpr int kDimVectors = 4;
  typedef float Lanes __attribute__((vector_size(16)));
  typedef std::int32_t Bits __attribute__((vector_size(16)));
  Lanes v;

  static Vec load(const float* p) {
    Vec a;
    std::memcpy(&a.v, p, sizeof a.v);
    return a;
  }
  static Vec set(float x) { return {Lanes{x, x, x, x}}; }
  static Vec zero() { return {Lanes{}}; }
  void store(float* p) const { std::memcpy(p, &v, sizeof v); }

  friend Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
  friend Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
  friend Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
  friend Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
};

// a * b + c. Rounded twice where the baseline of the machine has no fused instruction: each ISA has its own bits.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__aarch64__)
  for (int i = 0; i < Vec::kLanes; ++i) c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return c;
#else
  return {a.v * b.v + c.v};
#endif
}
// As on x86: the second operand if either is NaN.
inline Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
inline Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
// To the nearest integer, ties to even, for |a| < 2^22: adding 1.5 * 2^23 leaves no fraction bits.
inline Vec round(Vec a) {
  const Vec shift = Vec::set(12582912.0f);
  return (a + shift) - shift;
}
// 2^n for whole n in [-126, 127].
inline Vec power_of_two(Vec n) {
  const Vec::Bits exponent = (__builtin_convertvector(n.v, Vec::Bits) + 127) << 23;
  return {reinterpret_cast<Vec::Lanes>(exponent)};
}
// 0 in the lanes where x < bound, elsewhere ``value``.
inline Vec zero_where_below(Vec value, Vec x, float bound) {
  return {x.v < Vec::set(bound).v ? Vec::zero().v : value.v};
}

inline void load_bf16_pairs(const std::uint16_t* p, Vec& even, Vec& odd) {
  Vec::Bits both;
  std::memcpy(&both, p, sizeof both);
  even.v = reinterpret_cast<Vec::Lanes>(both << 16);
  odd.v = reinterpret_cast<Vec::Lanes>(both & static_cast<std::int32_t>(0xffff0000u));
}

}  // namespace outrider::OUTRIDER_OPS
