// The matrix product at the edges: rows that are empty, zero, tiny, huge or not finite; shared inputs; wrong calls; and
// the choice of the instruction set.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "check.h"
#include "gemm_cases.h"

namespace outrider::test {
namespace {

bool all_finite(const float* y, std::int64_t count) {
  return std::all_of(y, y + count, [](float v) { return std::isfinite(v); });
}

// A row that holds a NaN or an infinity gives NaN in every column that sees it, and leaves its neighbours alone.
void check_not_finite(const PackedMatrix& matrix, Isa isa) {
  ThreadPool pool(1);
  const std::int64_t k = matrix.k(), n = matrix.n();
  const std::vector<float> clean = random_rows(5, k, 1);
  const std::vector<float> expected = product(matrix, clean.data(), 5, pool, isa);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    std::vector<float> x = clean;
    x[static_cast<std::size_t>(2 * k + 40)] = bad;
    const std::vector<float> y = product(matrix, x.data(), 5, pool, isa);
    for (std::int64_t row = 0; row < 5; ++row) {
      const float *found = y.data() + row * n, *wanted = expected.data() + row * n;
      if (row != 2) {
        CHECK(std::memcmp(found, wanted, static_cast<std::size_t>(n) * sizeof(float)) == 0);
      } else {
        CHECK(std::none_of(found, found + n, [](float v) { return std::isfinite(v); }));
      }
    }
  }
}

void check_magnitudes(const PackedMatrix& matrix, Isa isa) {
  ThreadPool pool(2);
  const std::int64_t k = matrix.k(), n = matrix.n();
  const std::vector<float> zeros(static_cast<std::size_t>(3 * k));
  const std::vector<float> y = product(matrix, zeros.data(), 3, pool, isa);
  CHECK(std::all_of(y.begin(), y.end(), [](float v) { return v == 0.0f; }));

  // Scaling the input by a power of two scales the output exactly, far from the ends of the range.
  const std::vector<float> x = random_rows(3, k, 2);
  const std::vector<float> base = product(matrix, x.data(), 3, pool, isa);
  for (const float factor : {0x1p-60f, 0x1p60f, 0x1p100f}) {
    std::vector<float> scaled = x;
    for (float& value : scaled) value *= factor;
    std::vector<float> found = product(matrix, scaled.data(), 3, pool, isa);
    for (float& value : found) value /= factor;
    CHECK_THAT(std::memcmp(found.data(), base.data(), base.size() * sizeof(float)) == 0,
               describe(matrix.layout()) + " on " + std::string(isa_name(isa)) + " times " +
                   std::to_string(std::log2(factor)));
  }

  std::vector<float> tiny(static_cast<std::size_t>(k), 1e-40f);
  CHECK(all_finite(product(matrix, tiny.data(), 1, pool, isa).data(), n));
}

// Codes and activations all at their extremes: sums of products as large as they get.
void check_extremes(const PackedLayout& form, Isa isa) {
  if (form.format == WeightFormat::bf16) return;
  PackedLayout layout = form;
  layout.n = 32;
  layout.k = 256;
  ThreadPool pool(1);
  for (const std::uint8_t code : {std::uint8_t{0}, static_cast<std::uint8_t>((1 << format_bits(form.format)) - 1)}) {
    const PackedMatrix matrix = pack_to_buffer(layout, [&](std::uint8_t* dst) {
      pack_integer_units(layout, dst, pool, [&](std::int64_t, std::int64_t, ColumnRecord& column) {
        std::fill(std::begin(column.codes), std::end(column.codes), code);
        std::fill(std::begin(column.scale_codes), std::end(column.scale_codes), std::uint8_t{1});
        column.scale = 1.0f;
        column.d = float_to_half(1.0f);
      });
    });
    std::vector<float> x(256, 127.0f);
    for (const int sign : {1, -1}) {
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = 127.0f * static_cast<float>(sign);
      const float value = static_cast<float>(code - zero_point(form.format, form.has_min)) * 127.0f * 256.0f;
      const std::vector<float> y = product(matrix, x.data(), 1, pool, isa);
      CHECK_THAT(y[0] == value * static_cast<float>(sign) && y[31] == y[0],
                 describe(layout) + " on " + std::string(isa_name(isa)));
    }
  }
}

// Several products that share rows, in one call, into strided outputs: as one by one, and nothing else is touched.
void check_shared_input() {
  ThreadPool pool(2);
  const std::int64_t k = 512, rows = 35;
  const std::vector<float> x = random_rows(rows, k + 7, 3);
  const std::vector<PackedLayout> layouts = all_layouts();
  std::vector<PackedMatrix> matrices;
  ActivationForms forms;
  for (std::size_t i = 0; i < layouts.size(); ++i) {
    matrices.push_back(random_matrix(layouts[i], 16 + 11 * static_cast<std::int64_t>(i), k, i));
    forms.add(matrices.back());
  }
  QuantizedRows shared;
  shared.assign(x.data(), k + 7, rows, k, forms, pool);
  constexpr float untouched = 1234.5f;
  std::vector<std::vector<float>> outputs;
  std::vector<GemmTask> tasks;
  for (const PackedMatrix& matrix : matrices) {
    outputs.emplace_back(static_cast<std::size_t>(rows * (matrix.n() + 3)), untouched);
    tasks.push_back({&matrix, outputs.back().data(), matrix.n() + 3});
  }
  gemm(tasks, shared, pool);
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const std::int64_t n = matrices[i].n();
    std::vector<float> alone(static_cast<std::size_t>(rows * n));
    QuantizedRows workspace;
    gemm(matrices[i], x.data(), k + 7, rows, alone.data(), n, pool, workspace);
    for (std::int64_t row = 0; row < rows; ++row) {
      const float* found = outputs[i].data() + row * (n + 3);
      CHECK(std::memcmp(found, alone.data() + row * n, static_cast<std::size_t>(n) * sizeof(float)) == 0);
      CHECK(std::all_of(found + n, found + n + 3, [](float v) { return v == untouched; }));
    }
  }
}

void check_wrong_calls() {
  ThreadPool pool(1);
  const PackedMatrix matrix = random_matrix({WeightFormat::int8, ScaleKind::f16, false, 0, 0}, 32, 64, 1);
  const std::vector<float> x = random_rows(2, 96, 1);
  std::vector<float> y(64);
  QuantizedRows rows;
  const GemmTask task{&matrix, y.data(), 32};
  rows.assign(x.data(), 96, 2, 96, {true, false}, pool);
  CHECK(throws<std::invalid_argument>([&] { gemm(std::span(&task, 1), rows, pool); }));  // another k
  rows.assign(x.data(), 64, 2, 64, {false, true}, pool);
  CHECK(throws<std::invalid_argument>([&] { gemm(std::span(&task, 1), rows, pool); }));  // another form
  CHECK(throws<std::invalid_argument>([&] { rows.assign(x.data(), 40, 2, 40, {true, false}, pool); }));
  rows.assign(x.data(), 64, 0, 64, {true, false}, pool);
  gemm(std::span(&task, 1), rows, pool);  // no rows: nothing to do
}

void check_isa_choice() {
  CHECK(choose_isa(nullptr) == available_isas().back());
  CHECK(choose_isa("") == available_isas().back());
  for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::amx}) {
    const std::string name(isa_name(isa));
    if (isa_available(isa)) {
      CHECK(choose_isa(name.c_str()) == isa);
    } else {
      CHECK(throws<std::invalid_argument>([&] { choose_isa(name.c_str()); }));
    }
  }
  CHECK(throws<std::invalid_argument>([] { choose_isa("sse9"); }));
}

}  // namespace
}  // namespace outrider::test

int main() {
  using namespace outrider::test;
  for (const outrider::PackedLayout& layout : all_layouts()) {
    const outrider::PackedMatrix matrix = random_matrix(layout, 40, 256, 7);
    for (const outrider::Isa isa : available_isas()) {
      check_not_finite(matrix, isa);
      check_magnitudes(matrix, isa);
      check_extremes(layout, isa);
    }
  }
  check_shared_input();
  check_wrong_calls();
  check_isa_choice();
  return report();
}
