// Writing and moving single positions of KV tiles (include one of simd_*.h first).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "outrider/ops.h"

namespace outrider::OUTRIDER_OPS {

// Nearest bfloat16, ties to even; NaN stays NaN.
inline std::uint16_t to_bf16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline void store_key(const float* key, int head_dim, std::uint16_t* keys, int position) {
  for (int d = 0; d < head_dim; ++d) keys[(d / 2 * kTile + position) * 2 + d % 2] = to_bf16(key[d]);
}
inline void store_key(const float* key, int head_dim, float* keys, int position) {
  for (int d = 0; d < head_dim; ++d) keys[d * kTile + position] = key[d];
}

inline void store_value(const float* value, int head_dim, std::uint16_t* row) {
  for (int d = 0; d < head_dim; ++d) row[d] = to_bf16(value[d]);
}
inline void store_value(const float* value, int head_dim, float* row) {
  std::memcpy(row, value, static_cast<std::size_t>(head_dim) * sizeof(float));
}

template <typename T>
void store_kv_as(const float* key, const float* value, const KvShape& shape, std::byte* tile, int position) {
  store_key(key, shape.head_dim, reinterpret_cast<T*>(tile), position);
  T* values = reinterpret_cast<T*>(tile + shape.key_bytes());
  store_value(value, shape.head_dim, values + std::ptrdiff_t{position} * shape.value_columns());
}

inline void store_kv(const float* key, const float* value, const KvShape& shape, std::byte* tile, int position) {
  if (shape.type == KvType::bf16)
    store_kv_as<std::uint16_t>(key, value, shape, tile, position);
  else
    store_kv_as<float>(key, value, shape, tile, position);
}

inline void copy_kv(const KvShape& shape, const std::byte* from, int from_position, std::byte* to, int to_position) {
  // In both layouts the keys are columns of 16 four-byte cells: a pair of bfloat16, or one float.
  const int cells = shape.type == KvType::bf16 ? shape.head_dim / 2 : shape.head_dim;
  for (int i = 0; i < cells; ++i)
    std::memcpy(to + (i * kTile + to_position) * 4, from + (i * kTile + from_position) * 4, 4);
  const std::size_t row = static_cast<std::size_t>(shape.value_columns()) * shape.element_bytes();
  std::memcpy(to + shape.key_bytes() + row * to_position, from + shape.key_bytes() + row * from_position, row);
}

}  // namespace outrider::OUTRIDER_OPS
