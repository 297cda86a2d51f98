// Random packed matrices of every layout, and their float64 products, for the tests of the matrix product.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "gemm/half.h"
#include "gemm/pack_units.h"
#include "outrider/gemm.h"

namespace outrider::test {
inline std::string name(WeightFormat format) {
  return format == WeightFormat::bf16 ? "bf16" : "int" + std::to_string(format_bits(format));
}

inline std::string name(ScaleKind scales) {
  switch (scales) {
    case ScaleKind::none:
      return "";
    case ScaleKind::f16:
      return " f16";
    case ScaleKind::f32:
      return " f32";
    case ScaleKind::kquant:
      return " kquant";
  }
  return "?";
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : generator_(seed) {}
  int below(int bound) { return std::uniform_int_distribution<int>(0, bound - 1)(generator_); }
  float gaussian() { return normal_(generator_); }
  float uniform(float low, float high) { return std::uniform_real_distribution<float>(low, high)(generator_); }

 private:
  std::mt19937_64 generator_;
  std::normal_distribution<float> normal_;
};

inline void fill_column(const PackedLayout& layout, Random& random, ColumnRecord& column) {
  const int levels = 1 << format_bits(layout.format), zero = zero_point(layout.format, layout.has_min);
  for (std::uint8_t& code : column.codes) code = static_cast<std::uint8_t>(random.below(levels));
  const float step = 0.07f / static_cast<float>(levels);  // codes span about 0.07
  column.scale = step * random.uniform(0.5f, 1.5f);
  column.min = column.scale * (static_cast<float>(zero - levels / 2) + random.uniform(-1.0f, 1.0f));
  if (layout.scales == ScaleKind::f16) {
    column.scale = half_to_float(float_to_half(column.scale));
    column.min = half_to_float(float_to_half(column.min));
  }
  column.d = float_to_half(step / 32.0f * random.uniform(0.5f, 1.5f));
  column.dmin = float_to_half(step / 32.0f * static_cast<float>(levels) / 2.0f);
  for (std::uint8_t& code : column.scale_codes) {
    const int magnitude = 16 + random.below(48);
    const bool negative = layout.format == WeightFormat::int6 && random.below(2) == 0;
    code = static_cast<std::uint8_t>(negative ? -magnitude : magnitude);
  }
  for (std::uint8_t& code : column.min_codes) code = static_cast<std::uint8_t>(random.below(64));
}

// Every layout that kernels read, without sizes.
inline std::vector<PackedLayout> all_layouts() {
  std::vector<PackedLayout> layouts;
  for (const WeightFormat format :
       {WeightFormat::int4, WeightFormat::int5, WeightFormat::int6, WeightFormat::int8, WeightFormat::bf16}) {
    for (const ScaleKind scales : {ScaleKind::none, ScaleKind::f16, ScaleKind::f32, ScaleKind::kquant}) {
      for (const bool has_min : {false, true}) {
        PackedLayout layout{format, scales, has_min, 32, 256};
        try {
          layout.check();
          layouts.push_back(layout);
        } catch (const std::invalid_argument&) {
        }
      }
    }
  }
  return layouts;
}

inline std::string describe(const PackedLayout& layout) {
  return name(layout.format) + name(layout.scales) + (layout.has_min ? " min " : " ") + std::to_string(layout.n) + "x" +
         std::to_string(layout.k);
}

// Weights about as large as a model's (standard deviation near 0.02), codes uniform.
inline PackedMatrix random_matrix(PackedLayout layout, std::int64_t n, std::int64_t k, std::uint64_t seed) {
  layout.n = n;
  layout.k = k;
  ThreadPool pool(1);  // one thread: the order of the draws fixes the values
  Random random(seed);
  return pack_to_buffer(layout, [&](std::uint8_t* dst) {
    if (layout.format == WeightFormat::bf16) {
      pack_bf16_units(layout, dst, pool, [&](std::int64_t, std::uint16_t* out) {
        for (std::int64_t i = 0; i < k; ++i) out[i] = float_to_bf16(0.02f * random.gaussian());
      });
    } else {
      pack_integer_units(layout, dst, pool, [&](std::int64_t, std::int64_t, ColumnRecord& column) {
        fill_column(layout, random, column);
      });
    }
  });
}

// Gaussian activations with one outlier, 20 times as large, in about 100.
inline std::vector<float> random_rows(std::int64_t rows, std::int64_t k, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> x(static_cast<std::size_t>(rows * k));
  for (float& value : x) value = random.gaussian() * (random.below(100) == 0 ? 20.0f : 1.0f);
  return x;
}

// The whole matrix in float32, [n, k].
inline std::vector<float> dequantized(const PackedMatrix& matrix) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(matrix.n()));
  std::iota(rows.begin(), rows.end(), 0);
  std::vector<float> out(static_cast<std::size_t>(matrix.n() * matrix.k()));
  matrix.dequantize(rows, out.data());
  return out;
}

// [rows, n] in float64.
inline std::vector<double> reference_product(const PackedMatrix& matrix, const std::vector<float>& x,
                                             std::int64_t rows) {
  const std::vector<float> w = dequantized(matrix);
  const auto n = static_cast<std::size_t>(matrix.n()), k = static_cast<std::size_t>(matrix.k());
  std::vector<double> y(static_cast<std::size_t>(rows) * n);
  for (std::size_t i = 0; i < y.size(); ++i) {
    const float *x_row = x.data() + i / n * k, *w_row = w.data() + i % n * k;
    for (std::size_t j = 0; j < k; ++j) y[i] += double{x_row[j]} * w_row[j];
  }
  return y;
}

// y of a call with these rows; starts as NaN, so that a value left unwritten shows.
inline std::vector<float> product(const PackedMatrix& matrix, const float* x, std::int64_t rows, ThreadPool& pool,
                                  Isa isa) {
  std::vector<float> y(static_cast<std::size_t>(rows * matrix.n()), std::numeric_limits<float>::quiet_NaN());
  QuantizedRows workspace;
  gemm(matrix, x, matrix.k(), rows, y.data(), matrix.n(), pool, workspace, isa);
  return y;
}

// Frobenius norm of (a - b) over that of b; NaN if a holds one.
inline double relative_error(const std::vector<float>& a, const std::vector<double>& b) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    error += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(error / norm);
}

inline std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::amx}) {
    if (isa_available(isa)) isas.push_back(isa);
  }
  return isas;
}

}  // namespace outrider::test
