// Conversions between float32 and the 16-bit formats, in integer arithmetic: exact, and the same on every machine.
// Static, not merely inline: see kernels.h.
#pragma once

#include <bit>
#include <cstdint>

namespace outrider {

static inline float half_to_float(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Rebias by a multiplication, which normalises subnormal halves too.
  const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
}

// Rounds to nearest, ties to even; overflows to infinity.
static inline std::uint16_t float_to_half(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // at or above the midpoint between 65504 and 2^16
  if (magnitude < 0x38800000u) {
    // Subnormal halves: adding 0.5 puts the unit of the half, 2^-24, at the float's last bit, and rounds there.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return sign | static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u);
  }
  const std::uint32_t odd = (magnitude >> 13) & 1u;
  return sign | static_cast<std::uint16_t>((magnitude + 0xfffu + odd - 0x38000000u) >> 13);
}

static inline float bf16_to_float(std::uint16_t value) { return std::bit_cast<float>(std::uint32_t{value} << 16); }

// Rounds to nearest, ties to even; a NaN stays one.
static inline std::uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace outrider
