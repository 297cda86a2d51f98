// Sixteen float32 lanes in one AVX-512 register. The interface is that of simd_portable.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace outrider::OUTRIDER_OPS {

struct Vec {
  static constexpr int kLanes = 16;
  static constexpr int kQueries = 6;     // queries that one attention kernel holds in registers,
  static constexpr int kKeyVectors = 4;  // by vectors of keys,
  static constexpr int kDimVectors = 4;  // or by vectors of value columns
  __m512 v;

  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec set(float x) { return {_mm512_set1_ps(x)}; }
  static Vec zero() { return {_mm512_setzero_ps()}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }

  friend Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
  friend Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
  friend Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
};

inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec power_of_two(Vec n) { return {_mm512_scalef_ps(_mm512_set1_ps(1.0f), n.v)}; }
inline Vec zero_where_below(Vec value, Vec x, float bound) {
  return {_mm512_mask_mov_ps(value.v, _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(bound), _CMP_LT_OQ), _mm512_setzero_ps())};
}

// 2 * kLanes bfloat16 numbers: those at even places and those at odd ones.
inline void load_bf16_pairs(const std::uint16_t* p, Vec& even, Vec& odd) {
  const __m512i both = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

}  // namespace outrider::OUTRIDER_OPS
