// The product with bf16 weights, for the two AVX-512 files: they differ in how a register of pairs is multiplied.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "gemm/kernels.h"

namespace outrider {
namespace {

constexpr int kBf16GroupBytes = 2 * kUnit * kGroup;
// A stretch of k whose weights stay in the first-level cache while several tiles of rows go over it.
constexpr std::int64_t kBf16Stretch = 8;

// How far ahead of its use the stream is fetched: past the hardware prefetcher's stop at each page.
inline void prefetch(const std::uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p + 8192), _MM_HINT_T0); }

// Rows' sums over `groups` groups, both halves of the unit in registers. stride: from a row's group to its next.
template <typename MultiplyAdd, int Rows>
inline void bf16_tile(const std::uint8_t* weights, std::int64_t groups, const std::uint16_t* x, std::int64_t stride,
                      float (*sums)[kUnit]) {
  __m512 sum[Rows][2];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    sum[r][0] = _mm512_load_ps(sums[r]);
    sum[r][1] = _mm512_load_ps(sums[r] + 16);
  }
  for (std::int64_t g = 0; g < groups; ++g, weights += kBf16GroupBytes, x += stride) {
#pragma GCC unroll 2
    for (int pair = 0; pair < 16; ++pair) {
      prefetch(weights + pair * 64);
      prefetch(weights + 1024 + pair * 64);
      const MultiplyAdd low(_mm512_load_si512(weights + pair * 64));
      const MultiplyAdd high(_mm512_load_si512(weights + 1024 + pair * 64));
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        std::int32_t word;
        std::memcpy(&word, x + r * kGroup + 2 * pair, sizeof word);
        const __m512i values = _mm512_set1_epi32(word);
        sum[r][0] = low(values, sum[r][0]);
        sum[r][1] = high(values, sum[r][1]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    _mm512_store_ps(sums[r], sum[r][0]);
    _mm512_store_ps(sums[r] + 16, sum[r][1]);
  }
}

template <typename MultiplyAdd>
void multiply_bf16_units(const std::uint8_t* weights, std::int64_t units, std::int64_t k, const RowBlock& rows,
                         const Output& out) {
  alignas(64) float sums[QuantizedRows::kBlock][kUnit];
  const std::int64_t groups = k / kGroup, stride = std::int64_t{rows.rows} * kGroup;
  for (std::int64_t unit = 0; unit < units; ++unit) {
    clear(sums, rows.rows);
    for (std::int64_t g = 0; g < groups; g += kBf16Stretch) {
      const std::int64_t count = groups - g < kBf16Stretch ? groups - g : kBf16Stretch;
      const std::uint16_t* x = rows.bf16 + g * stride;
      int r = 0;
      for (; r + 8 <= rows.rows; r += 8) bf16_tile<MultiplyAdd, 8>(weights, count, x + r * kGroup, stride, sums + r);
      if (rows.rows - r >= 4) {
        bf16_tile<MultiplyAdd, 4>(weights, count, x + r * kGroup, stride, sums + r);
        r += 4;
      }
      if (rows.rows - r >= 2) {
        bf16_tile<MultiplyAdd, 2>(weights, count, x + r * kGroup, stride, sums + r);
        r += 2;
      }
      if (r < rows.rows) bf16_tile<MultiplyAdd, 1>(weights, count, x + r * kGroup, stride, sums + r);
      weights += count * kBf16GroupBytes;
    }
    store_unit(sums, rows.rows, unit, out);
  }
}

}  // namespace
}  // namespace outrider
