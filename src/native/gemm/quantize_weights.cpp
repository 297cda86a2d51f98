// Quantisers from float weights, for checkpoints that bring none of their own.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "gemm/float_rows.h"
#include "gemm/pack_units.h"

namespace outrider {
namespace {

float round_to_half(float value) { return half_to_float(float_to_half(value)); }

// Symmetric: w = scale * q with q in -127 … 127.
void quantize_int8(const float* w, ColumnRecord& out) {
  float largest = 0;
  for (int i = 0; i < kGroup; ++i) largest = std::max(largest, std::fabs(w[i]));
  out.scale = round_to_half(largest / 127.0f);
  const float inverse = out.scale > 0 ? 1.0f / out.scale : 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    const float q = std::clamp(std::nearbyint(w[i] * inverse), -127.0f, 127.0f);
    out.codes[i] = static_cast<std::uint8_t>(static_cast<int>(q) + 128);
  }
}

// Writes the nearest codes for w = scale * q + min, q in 0 … 15, and returns the squared error.
double assign_int4(const float* w, float scale, float min, ColumnRecord& out) {
  out.scale = round_to_half(scale);
  out.min = round_to_half(min);
  const float inverse = out.scale > 0 ? 1.0f / out.scale : 0.0f;
  double error = 0;
  for (int i = 0; i < kGroup; ++i) {
    const float q = std::clamp(std::nearbyint((w[i] - out.min) * inverse), 0.0f, 15.0f);
    out.codes[i] = static_cast<std::uint8_t>(q);
    const double difference = double{out.scale} * q + out.min - w[i];
    error += difference * difference;
  }
  return error;
}

struct Line {
  float scale, min;
};

// The least-squares line through (code, weight); the given one if all codes are equal.
Line fit_line(const float* w, const ColumnRecord& record, Line otherwise) {
  double q1 = 0, q2 = 0, w1 = 0, qw = 0;
  for (int i = 0; i < kGroup; ++i) {
    const double q = record.codes[i];
    q1 += q;
    q2 += q * q;
    w1 += w[i];
    qw += q * w[i];
  }
  const double determinant = kGroup * q2 - q1 * q1;
  if (determinant <= 0) return otherwise;
  const double scale = (kGroup * qw - q1 * w1) / determinant;
  if (scale <= 0) return otherwise;
  return {static_cast<float>(scale), static_cast<float>((w1 - scale * q1) / kGroup)};
}

// With a minimum. Clipping the extremes a little often pays: tries ranges from 0.75 to 1 of the full one, each
// followed by a least-squares refit, and keeps the best.
void quantize_int4(const float* w, ColumnRecord& out) {
  const auto [low, high] = std::minmax_element(w, w + kGroup);
  const float range = *high - *low, middle = *low + range / 2;
  double best = assign_int4(w, range / 15.0f, *low, out);
  for (int step = 0; step <= 5 && best > 0; ++step) {
    const float clipped = range * (1.0f - 0.05f * static_cast<float>(step));
    ColumnRecord candidate;
    Line line{clipped / 15.0f, middle - clipped / 2};
    assign_int4(w, line.scale, line.min, candidate);
    line = fit_line(w, candidate, line);
    const double error = assign_int4(w, line.scale, line.min, candidate);
    if (error < best) {
      best = error;
      out = candidate;
    }
  }
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
  if (!std::isfinite(total.source)) throw std::invalid_argument("a weight is not finite: the matrix cannot be packed");
  result.relative_error = total.source > 0 ? std::sqrt(total.error / total.source) : 0.0;
  return result;
}

}  // namespace outrider
