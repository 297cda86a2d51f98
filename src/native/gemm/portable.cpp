// Kernels in plain C++, for any processor: the reference that the others equal bit for bit on integer weights.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "gemm/half.h"
#include "gemm/kernels.h"
#include "gemm/variants.h"

namespace outrider {
namespace {

using Byte = std::uint8_t;

// One group of 32 k of a unit, decoded: values in the order of the codes, [2 halves][8 quads][16 columns][4 k].
struct Group {
  std::int8_t value[2][8][64];
  float scale[2][kUnit];  // the second for the group's upper half, if it has its own
  float min[kUnit];
};

template <typename V>
void decode_values(const Byte* codes, Group& group) {
  for (int half = 0; half < 2; ++half) {
    for (int quad = 0; quad < 8; ++quad) {
      std::int8_t* value = group.value[half][quad];
      const Byte* low = codes + (V::format == WeightFormat::int8 ? 8 * half + quad : 4 * half + quad / 2) * 64;
      const Byte* high = codes + 512 + (V::format == WeightFormat::int6 ? 2 * half + quad / 4 : half) * 64;
      for (int i = 0; i < 64; ++i) {
        int code = low[i];
        if constexpr (V::format != WeightFormat::int8) code = code >> (4 * (quad % 2)) & 15;
        if constexpr (V::format == WeightFormat::int5) code |= (high[i] >> quad & 1) << 4;
        if constexpr (V::format == WeightFormat::int6) code |= (high[i] >> (2 * (quad % 4)) & 3) << 4;
        value[i] = static_cast<std::int8_t>(code - V::zero);
      }
    }
  }
}

template <typename V>
float stored_float(const Byte* p, int index) {
  if constexpr (V::scales == ScaleKind::f32) {
    float value;
    std::memcpy(&value, p + 4 * index, 4);
    return value;
  } else {
    std::uint16_t value;
    std::memcpy(&value, p + 2 * index, 2);
    return half_to_float(value);
  }
}

template <typename V>
void decode_scales(const Byte* header, const Byte* scales, Group& group) {
  for (int c = 0; c < kUnit; ++c) {
    if constexpr (V::scales != ScaleKind::kquant) {
      group.scale[0][c] = stored_float<V>(scales, c);
      if constexpr (V::has_min) group.min[c] = stored_float<V>(scales, kUnit + c);
    } else if constexpr (V::has_min) {
      group.scale[0][c] = stored_float<V>(header, c) * static_cast<float>(scales[c]);
      group.min[c] = -(stored_float<V>(header, kUnit + c) * static_cast<float>(scales[kUnit + c]));
    } else {
      const float d = stored_float<V>(header, c);
      for (int part = 0; part < 2; ++part) {
        group.scale[part][c] = d * static_cast<float>(static_cast<std::int8_t>(scales[part * kUnit + c]));
      }
    }
  }
}

// dot[c] = sum over quads first … last - 1 of value * q, exact.
void dot_products(const Group& group, int half, int first, int last, const std::int8_t* q, std::int32_t* dot) {
  std::fill_n(dot, 16, 0);
  for (int quad = first; quad < last; ++quad) {
    const std::int8_t* value = group.value[half][quad];
    for (int c = 0; c < 16; ++c) {
      std::int32_t sum = 0;
      for (int k = 0; k < 4; ++k) sum += value[4 * c + k] * q[4 * quad + k];
      dot[c] += sum;
    }
  }
}

template <typename V>
void accumulate_group(const Group& group, const std::int8_t* q, const ActivationGroup& x, float* sums) {
  constexpr int parts = scales_per_group(V::format);
  for (int half = 0; half < 2; ++half, sums += 16) {
    std::int32_t dot[parts][16];
    for (int part = 0; part < parts; ++part) {
      dot_products(group, half, part * 8 / parts, (part + 1) * 8 / parts, q, dot[part]);
    }
    for (int c = 0; c < 16; ++c) {
      const int column = 16 * half + c;
      float value = static_cast<float>(dot[0][c]) * group.scale[0][column];
      if constexpr (parts == 2) value = std::fma(static_cast<float>(dot[1][c]), group.scale[1][column], value);
      sums[c] = std::fma(value, x.scale, sums[c]);
      if constexpr (V::has_min) sums[c] = std::fma(group.min[column], x.sum, sums[c]);
    }
  }
}

template <typename V>
void multiply(const Byte* weights, std::int64_t units, std::int64_t k, const RowBlock& rows, const Output& out) {
  for (std::int64_t unit = 0; unit < units; ++unit) {
    float sums[QuantizedRows::kBlock][kUnit] = {};
    for (std::int64_t g = 0; g < k / kGroup;) {
      const Byte* header = weights;
      weights += V::shape.header_bytes;
      for (int i = 0; i < V::shape.groups; ++i, ++g, weights += V::shape.group_bytes) {
        Group group;
        decode_scales<V>(header, weights, group);
        decode_values<V>(weights + V::shape.scale_bytes, group);
        for (int r = 0; r < rows.rows; ++r) {
          const std::int64_t index = g * rows.rows + r;
          accumulate_group<V>(group, rows.q + index * kGroup, rows.groups[index], sums[r]);
        }
      }
    }
    store_unit(sums, rows.rows, unit, out);
  }
}

// Both products of 16 columns' pairs; they are exact in float32, so that a fused multiply-add would change nothing.
void accumulate_pairs(const Byte* weights, const std::uint16_t* x, float* __restrict sums) {
  const float even = bf16_to_float(x[0]), odd = bf16_to_float(x[1]);
  std::uint32_t pairs[16];
  std::memcpy(pairs, weights, sizeof pairs);
  for (int c = 0; c < 16; ++c) {
    const float product = std::bit_cast<float>(pairs[c] << 16) * even;
    sums[c] = (sums[c] + product) + std::bit_cast<float>(pairs[c] & 0xffff0000u) * odd;
  }
}

void multiply_bf16(const Byte* weights, std::int64_t units, std::int64_t k, const RowBlock& rows, const Output& out) {
  for (std::int64_t unit = 0; unit < units; ++unit) {
    float sums[QuantizedRows::kBlock][kUnit] = {};
    for (std::int64_t g = 0; g < k / kGroup; ++g, weights += 2 * kUnit * kGroup) {
      for (int r = 0; r < rows.rows; ++r) {
        const std::uint16_t* x = rows.bf16 + (g * rows.rows + r) * kGroup;
        for (int half = 0; half < 2; ++half) {
          for (int pair = 0; pair < 16; ++pair) {
            accumulate_pairs(weights + half * 1024 + pair * 64, x + 2 * pair, sums[r] + 16 * half);
          }
        }
      }
    }
    store_unit(sums, rows.rows, unit, out);
  }
}

GemmKernel find(const PackedLayout& layout) {
  GemmKernel kernel = multiply_bf16;
  IntegerVariants::visit(layout, [&]<typename V>() { kernel = multiply<V>; });
  return kernel;
}

void quantize(const float* x, std::int8_t* q, ActivationGroup* group) {
  // The largest magnitude by its bits: order does not matter, and a NaN is larger than all numbers.
  std::uint32_t largest_bits = 0;
  for (int i = 0; i < kGroup; ++i)
    largest_bits = std::max(largest_bits, std::bit_cast<std::uint32_t>(x[i]) & 0x7fffffffu);
  const QuantizerScale scale = quantizer_scale(largest_bits);
  std::int32_t low = 0, sum = 0;
  for (int i = 0; i < kGroup; ++i) {
    const auto value = scale.inverse == 0 ? 0 : static_cast<std::int32_t>(std::nearbyint(x[i] * scale.inverse));
    q[i] = static_cast<std::int8_t>(value);
    sum += value;
    if (i < kGroup / 2) low += value;
  }
  *group = {scale.scale, scale.scale * static_cast<float>(sum), -sum, -low};
}

void round_to_bf16(const float* x, std::uint16_t* out) {
  for (int i = 0; i < kGroup; ++i) out[i] = float_to_bf16(x[i]);
}

}  // namespace

const KernelSet& portable_kernels() {
  static constexpr KernelSet kernels{find, quantize, round_to_bf16};
  return kernels;
}

}  // namespace outrider
