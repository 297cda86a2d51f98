// The two products of attention over a block of keys, for a few queries at a time (include one of simd_*.h first).
//
// Lanes are keys in the first and value columns in the second, so no sum runs across lanes: a score is a sum over
// dimensions in ascending order, a value column a sum over positions in ascending order. How many queries share a call
// (NQ) and how many vectors are held at once (NV) leave both orders as they are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "outrider/ops.h"

namespace outrider::OUTRIDER_OPS {

constexpr int kBlock =
    64;  // positions that the running maximum is updated for at once; blocks start at multiples of it

// Lanes ``offset`` … of the tile's positions in dimensions 2 * pair and 2 * pair + 1.
inline void load_keys(const std::uint16_t* keys, int pair, int offset, Vec& even, Vec& odd) {
  load_bf16_pairs(keys + (std::ptrdiff_t{pair} * kTile + offset) * 2, even, odd);
}
inline void load_keys(const float* keys, int pair, int offset, Vec& even, Vec& odd) {
  even = Vec::load(keys + std::ptrdiff_t{pair} * 2 * kTile + offset);
  odd = Vec::load(keys + (std::ptrdiff_t{pair} * 2 + 1) * kTile + offset);
}

// scores[query * stride + lane] = scale * q . key, for NV vectors of keys that start at vector ``first`` of the tiles.
template <typename T, int NQ, int NV>
void score_vectors(const float* const* q, int head_dim, float scale, const T* const* tiles, int first, float* scores,
                   std::ptrdiff_t stride) {
  constexpr int kPerTile = kTile / Vec::kLanes;
  Vec sum[NQ][NV];
#pragma GCC unroll 8
  for (int i = 0; i < NQ; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) sum[i][j] = Vec::zero();
  for (int pair = 0; pair < head_dim / 2; ++pair) {
    Vec even[NV], odd[NV];
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j)
      load_keys(tiles[(first + j) / kPerTile], pair, (first + j) % kPerTile * Vec::kLanes, even[j], odd[j]);
#pragma GCC unroll 8
    for (int i = 0; i < NQ; ++i) {
      const Vec a = Vec::set(q[i][2 * pair]);
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) sum[i][j] = fma(a, even[j], sum[i][j]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < NQ; ++i) {
      const Vec a = Vec::set(q[i][2 * pair + 1]);
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) sum[i][j] = fma(a, odd[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < NQ; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j)
      (sum[i][j] * Vec::set(scale)).store(scores + i * stride + std::ptrdiff_t{first + j} * Vec::kLanes);
}

// Scores of NQ queries against tiles[first_tile] … tiles[last_tile - 1]; tile t goes to scores[query * stride + 16 t].
template <typename T, int NQ>
void score_tiles(const float* const* q, int head_dim, float scale, const T* const* tiles, int first_tile, int last_tile,
                 float* scores, std::ptrdiff_t stride) {
  constexpr int kPerTile = kTile / Vec::kLanes, kWide = Vec::kKeyVectors;
  const int end = last_tile * kPerTile;
  int vector = first_tile * kPerTile;
  for (; vector + kWide <= end; vector += kWide)
    score_vectors<T, NQ, kWide>(q, head_dim, scale, tiles, vector, scores, stride);
  for (; vector < end; ++vector) score_vectors<T, NQ, 1>(q, head_dim, scale, tiles, vector, scores, stride);
}

// Two vectors of value columns. bfloat16 comes out as even and odd columns; `write_columns` puts them in order.
inline void load_values(const std::uint16_t* row, Vec& a, Vec& b) { load_bf16_pairs(row, a, b); }
inline void load_values(const float* row, Vec& a, Vec& b) {
  a = Vec::load(row);
  b = Vec::load(row + Vec::kLanes);
}

inline void write_columns(const std::uint16_t*, const float* sum, float scale, int columns, float* out) {
  for (int c = 0; c < columns; ++c) {
    const int within = c % (2 * Vec::kLanes);
    out[c] = sum[c - within + within / 2 + (within % 2) * Vec::kLanes] * scale;
  }
}
inline void write_columns(const float*, const float* sum, float scale, int columns, float* out) {
  for (int c = 0; c < columns; ++c) out[c] = sum[c] * scale;
}

// sum[query] = rescale[query] * sum[query] + weights[query] . values over positions first … last-1 of the block, for
// NV vectors of columns from ``column`` on.
template <typename T, int NQ, int NV>
void accumulate_columns(const float* weights, const float* rescale, const T* const* values, int first, int last,
                        int column, float* sums, std::ptrdiff_t stride) {
  Vec sum[NQ][NV];
#pragma GCC unroll 8
  for (int i = 0; i < NQ; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j)
      sum[i][j] = Vec::load(sums + i * stride + column + j * Vec::kLanes) * Vec::set(rescale[i]);
  for (int position = first; position < last; ++position) {
    Vec value[NV];
#pragma GCC unroll 8
    for (int j = 0; j < NV; j += 2) load_values(values[position] + column + j * Vec::kLanes, value[j], value[j + 1]);
#pragma GCC unroll 8
    for (int i = 0; i < NQ; ++i) {
      const Vec a = Vec::set(weights[i * kBlock + position]);
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) sum[i][j] = fma(a, value[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < NQ; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) sum[i][j].store(sums + i * stride + column + j * Vec::kLanes);
}

template <typename T, int NQ>
void accumulate(const float* weights, const float* rescale, const T* const* values, int first, int last, int columns,
                float* sums, std::ptrdiff_t stride) {
  constexpr int kWide = Vec::kDimVectors * Vec::kLanes;
  int column = 0;
  for (; column + kWide <= columns; column += kWide)
    accumulate_columns<T, NQ, Vec::kDimVectors>(weights, rescale, values, first, last, column, sums, stride);
  for (; column < columns; column += 2 * Vec::kLanes)
    accumulate_columns<T, NQ, 2>(weights, rescale, values, first, last, column, sums, stride);
}

}  // namespace outrider::OUTRIDER_OPS
