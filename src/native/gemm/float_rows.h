// Rows of float weights in the element types of checkpoints.
#pragma once

#include <cstdint>
#include <cstring>

#include "gemm/half.h"
#include "outrider/gemm.h"

namespace outrider {

inline std::size_t element_bytes(FloatType type) { return type == FloatType::f32 ? 4 : 2; }

inline float load_element(FloatType type, const std::uint8_t* p) {
  if (type == FloatType::f32) {
    float value;
    std::memcpy(&value, p, 4);
    return value;
  }
  std::uint16_t value;
  std::memcpy(&value, p, 2);
  return type == FloatType::f16 ? half_to_float(value) : bf16_to_float(value);
}

inline void convert_to_float(FloatType type, const std::uint8_t* in, std::int64_t count, float* out) {
  const std::size_t step = element_bytes(type);
  for (std::int64_t i = 0; i < count; ++i, in += step) out[i] = load_element(type, in);
}

inline void convert_to_bf16(FloatType type, const std::uint8_t* in, std::int64_t count, std::uint16_t* out) {
  if (type == FloatType::bf16) {
    std::memcpy(out, in, static_cast<std::size_t>(count) * 2);
    return;
  }
  const std::size_t step = element_bytes(type);
  for (std::int64_t i = 0; i < count; ++i, in += step) out[i] = float_to_bf16(load_element(type, in));
}

}  // namespace outrider
