// Quantisers from float weights, for checkpoints that bring none of their own.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "gemm/float_rows.h"
#include "gemm/pack_units.h"

namespace outrider {
namespace {

float round_to_half(float value) { return half_to_float(float_to_half(value)); }

// To the nearest whole number, ties to even, for magnitudes below 2^22; unlike std::nearbyint it is no call and can be
// vectorised: float32 has no bits for a fraction at 2^23.
float round_to_whole(float value) {
  constexpr float magic = 0x1.8p23f;
  return (value + magic) - magic;
}

float inverse_or_zero(float scale) { return scale > 0 ? 1.0f / scale : 0.0f; }

// The sum of term(i) over a group, in eight lanes.
template <typename Term>
float sum_over_group(Term&& term) {
  float lanes[8] = {};
  for (int i = 0; i < kGroup; i += 8) {
    for (int lane = 0; lane < 8; ++lane) lanes[lane] += term(i + lane);
  }
  return std::accumulate(std::begin(lanes), std::end(lanes), 0.0f);
}

// Symmetric: w = scale * q with q in -127 … 127.
void quantize_int8(const float* w, ColumnRecord& out) {
  float largest = 0;
  for (int i = 0; i < kGroup; ++i) largest = std::max(largest, std::fabs(w[i]));
  out.scale = round_to_half(largest / 127.0f);
  const float inverse = inverse_or_zero(out.scale);
  for (int i = 0; i < kGroup; ++i) {
    const float q = std::clamp(round_to_whole(w[i] * inverse), -127.0f, 127.0f);
    out.codes[i] = static_cast<std::uint8_t>(static_cast<int>(q) + 128);
  }
}

// w = scale * q + min with q in 0 … 15; the scale and the minimum are halves.
struct Int4Group {
  float scale, min;
  float q[kGroup];
  float error;  // squared

  // The nearest q for a scale and a minimum.
  void assign(const float* w, float wanted_scale, float wanted_min) {
    scale = round_to_half(wanted_scale);
    min = round_to_half(wanted_min);
    const float inverse = inverse_or_zero(scale);
    for (int i = 0; i < kGroup; ++i) q[i] = std::clamp(round_to_whole((w[i] - min) * inverse), 0.0f, 15.0f);
    error = sum_over_group([&](int i) {
      const float difference = scale * q[i] + min - w[i];
      return difference * difference;
    });
  }

  // Again, for the least-squares line through the points (q, w), unless they give none that rises.
  void refit(const float* w) {
    const float q1 = sum_over_group([&](int i) { return q[i]; });
    const float q2 = sum_over_group([&](int i) { return q[i] * q[i]; });
    const float w1 = sum_over_group([&](int i) { return w[i]; });
    const float qw = sum_over_group([&](int i) { return q[i] * w[i]; });
    const float slope = (kGroup * qw - q1 * w1) / (kGroup * q2 - q1 * q1);
    if (slope > 0 && std::isfinite(slope)) assign(w, slope, (w1 - slope * q1) / kGroup);
  }
};

// Clipping the extremes a little often pays: tries ranges from 0.75 to 1 of the full one, each with a refit, and keeps
// the best.
void quantize_int4(const float* w, ColumnRecord& out) {
  const auto [low, high] = std::minmax_element(w, w + kGroup);
  const float range = *high - *low, middle = *low + range / 2;
  Int4Group best, candidate;
  best.assign(w, range / 15.0f, *low);
  for (int step = 0; step <= 5 && best.error > 0; ++step) {
    const float clipped = range * (1.0f - 0.05f * static_cast<float>(step));
    candidate.assign(w, clipped / 15.0f, middle - clipped / 2);
    candidate.refit(w);
    if (candidate.error < best.error) best = candidate;
  }
  out.scale = best.scale;
  out.min = best.min;
  std::transform(best.q, best.q + kGroup, out.codes, [](float q) { return static_cast<std::uint8_t>(q); });
}

[[noreturn]] void throw_not_finite() {
  throw std::invalid_argument("a weight is not finite: the matrix cannot be packed");
}

struct SquaredNorms {
  double error = 0, source = 0;
};

// Of packed row `row` against its source.
SquaredNorms compare(const PackedMatrix& matrix, std::int64_t row, const float* source) {
  std::vector<float> packed(static_cast<std::size_t>(matrix.k()));
  matrix.dequantize(std::span(&row, 1), packed.data());
  SquaredNorms norms;
  for (std::size_t j = 0; j < packed.size(); ++j) {
    const double difference = double{packed[j]} - source[j];
    norms.error += difference * difference;
    norms.source += double{source[j]} * source[j];
  }
  return norms;
}

}  // namespace

QuantizedWeights quantize_weights(WeightFormat format, FloatType type, const void* weights, std::int64_t n,
                                  std::int64_t k, std::span<const std::int64_t> row_index, ThreadPool& pool) {
  const bool int8 = format == WeightFormat::int8, int4 = format == WeightFormat::int4;
  if (!int8 && !int4 && format != WeightFormat::bf16) {
    throw std::invalid_argument("weights can be quantised to int8 or int4, or kept as bf16");
  }
  check_row_index(row_index, n);
  const PackedLayout layout{format, int8 || int4 ? ScaleKind::f16 : ScaleKind::none, int4, n, k};
  const auto row_start = [&](std::int64_t row) {
    return static_cast<const std::uint8_t*>(weights) +
           static_cast<std::size_t>(source_row(row_index, row) * k) * element_bytes(type);
  };

  QuantizedWeights result;
  result.matrix = pack_to_buffer(layout, [&](std::uint8_t* dst) {
    if (format == WeightFormat::bf16) {
      pack_bf16_units(layout, dst, pool,
                      [&](std::int64_t row, std::uint16_t* out) { convert_to_bf16(type, row_start(row), k, out); });
      return;
    }
    pack_integer_units(layout, dst, pool, [&](std::int64_t row, std::int64_t group, ColumnRecord& column) {
      float w[kGroup];
      convert_to_float(type, row_start(row) + static_cast<std::size_t>(group * kGroup) * element_bytes(type), kGroup,
                       w);
      if (!std::all_of(w, w + kGroup, [](float v) { return std::isfinite(v); })) throw_not_finite();
      int8 ? quantize_int8(w, column) : quantize_int4(w, column);
    });
  });

  std::vector<SquaredNorms> rows(static_cast<std::size_t>(n));
  pool.parallel_for(n, [&](std::int64_t row) {
    std::vector<float> source(static_cast<std::size_t>(k));
    convert_to_float(type, row_start(row), k, source.data());
    rows[static_cast<std::size_t>(row)] = compare(result.matrix, row, source.data());
  });
  SquaredNorms total;
  for (const SquaredNorms& norms : rows) {
    total.error += norms.error;
    total.source += norms.source;
  }
  if (!std::isfinite(total.source)) throw_not_finite();
  result.relative_error = total.source > 0 ? std::sqrt(total.error / total.source) : 0.0;
  return result;
}

}  // namespace outrider
