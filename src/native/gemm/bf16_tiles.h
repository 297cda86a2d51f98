// The product with bf16 weights for vector registers, over a type that says how one of them multiplies:
//
//   kColumns, kRows     columns of a vector (8 or 16), and rows of the largest tile whose sums fit in registers
//   Vector, load, store a vector of float32 sums
//   Pairs(address)      the weights of kColumns columns, two k each
//   pairs(word, sum)    sum + weights * the two activations in word
#pragma once

#include <immintrin.h>

#include <cstring>

#include "gemm/kernels.h"

namespace outrider {
namespace {

constexpr int kBf16GroupBytes = 2 * kUnit * kGroup;
// A stretch of k whose weights stay in the first-level cache while several tiles of rows go over it.
constexpr std::int64_t kBf16Stretch = 8;

// Where column c of a group begins: its 16 pairs lie 64 bytes apart.
constexpr int bf16_column(int c) { return c / 16 * 1024 + c % 16 * 4; }

// How far ahead of its use the stream is fetched: past the hardware prefetcher's stop at each page.
inline void prefetch_bf16(const std::uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p + 8192), _MM_HINT_T0); }

// `groups` groups of Rows rows and two vectors of columns, the first at c. stride: from a row's group to its next.
template <typename M, int Rows>
inline void bf16_tile(const std::uint8_t* weights, int c, std::int64_t groups, const std::uint16_t* x,
                      std::int64_t stride, float (*sums)[kUnit]) {
  typename M::Vector sum[Rows][2];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    sum[r][0] = M::load(sums[r] + c);
    sum[r][1] = M::load(sums[r] + c + M::kColumns);
  }
  for (std::int64_t g = 0; g < groups; ++g, weights += kBf16GroupBytes, x += stride) {
    const std::uint8_t *first = weights + bf16_column(c), *second = weights + bf16_column(c + M::kColumns);
#pragma GCC unroll 2
    for (int pair = 0; pair < 16; ++pair) {
      prefetch_bf16(first + pair * 64);
      prefetch_bf16(second + pair * 64);
      const typename M::Pairs low(first + pair * 64), high(second + pair * 64);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        std::int32_t word;
        std::memcpy(&word, x + r * kGroup + 2 * pair, sizeof word);
        sum[r][0] = low(word, sum[r][0]);
        sum[r][1] = high(word, sum[r][1]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    M::store(sums[r] + c, sum[r][0]);
    M::store(sums[r] + c + M::kColumns, sum[r][1]);
  }
}

// All rows from r on, in tiles of Rows and then of ever fewer.
template <typename M, int Rows>
inline void bf16_rows(const std::uint8_t* weights, int c, std::int64_t groups, const std::uint16_t* x,
                      std::int64_t stride, float (*sums)[kUnit], int rows) {
  int r = 0;
  for (; r + Rows <= rows; r += Rows) bf16_tile<M, Rows>(weights, c, groups, x + r * kGroup, stride, sums + r);
  if constexpr (Rows > 1) {
    if (r < rows) bf16_rows<M, Rows / 2>(weights, c, groups, x + r * kGroup, stride, sums + r, rows - r);
  }
}

template <typename M>
void multiply_bf16(const std::uint8_t* weights, std::int64_t units, std::int64_t k, const RowBlock& rows,
                   const Output& out) {
  alignas(64) float sums[QuantizedRows::kBlock][kUnit];
  const std::int64_t groups = k / kGroup, stride = std::int64_t{rows.rows} * kGroup;
  for (std::int64_t unit = 0; unit < units; ++unit) {
    clear(sums, rows.rows);
    for (std::int64_t g = 0; g < groups; g += kBf16Stretch) {
      const std::int64_t count = groups - g < kBf16Stretch ? groups - g : kBf16Stretch;
      for (int c = 0; c < kUnit; c += 2 * M::kColumns) {
        bf16_rows<M, M::kRows>(weights, c, count, rows.bf16 + g * stride, stride, sums, rows.rows);
      }
      weights += count * kBf16GroupBytes;
    }
    store_unit(sums, rows.rows, unit, out);
  }
}

}  // namespace
}  // namespace outrider
