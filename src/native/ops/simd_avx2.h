// Eight float32 lanes in one AVX register. The interface is that of simd_portable.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace outrider::OUTRIDER_OPS {

struct Vec {
  static constexpr int kLanes = 8;
  static constexpr int kQueries = 6;
  static constexpr int kKeyVectors = 2;
  static constexpr int kDimVectors = 2;
  __m256 v;

  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec set(float x) { return {_mm256_set1_ps(x)}; }
  static Vec zero() { return {_mm256_setzero_ps()}; }
  void store(float* p) const { _mm256_storeu_ps(p, v); }

  friend Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
  friend Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
  friend Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
};

inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec power_of_two(Vec n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23))};
}
inline Vec zero_where_below(Vec value, Vec x, float bound) {
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.v, _mm256_set1_ps(bound), _CMP_LT_OQ), value.v)};
}

inline void load_bf16_pairs(const std::uint16_t* p, Vec& even, Vec& odd) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even.v = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
  odd.v = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

}  // namespace outrider::OUTRIDER_OPS
