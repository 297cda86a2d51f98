// The matrix product: every row bit-identical whatever else is in the call, on every instruction set; the instruction
// sets equal to each other on integer weights; and close to float64.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "check.h"
#include "gemm_cases.h"

namespace outrider::test {
namespace {

constexpr std::int64_t kRowCounts[] = {1, 2, 3, 7, 16, 17, 33, 64};

struct Shape {
  std::int64_t n, k;
};

// Equal bits, and no NaN on either side.
bool identical(const float* a, const float* b, std::size_t count) {
  return std::memcmp(a, b, count * sizeof(float)) == 0 &&
         std::none_of(a, a + count, [](float v) { return std::isnan(v); });
}

void check_row_invariance(const PackedMatrix& matrix, Isa isa) {
  constexpr std::int64_t total = 64;
  const std::string name = describe(matrix.layout()) + " on " + std::string(isa_name(isa));
  const std::vector<float> x = random_rows(total, matrix.k(), 1);
  ThreadPool pools[2] = {ThreadPool(1), ThreadPool(2)};
  const std::vector<float> all = product(matrix, x.data(), total, pools[0], isa);
  const auto n = static_cast<std::size_t>(matrix.n());
  for (const std::int64_t count : kRowCounts) {
    for (ThreadPool& pool : pools) {
      // The calls' first rows slide over the whole, so that a row falls into many places of a block.
      for (std::int64_t first = 0; first + count <= total; first += std::max<std::int64_t>(count - 1, 5)) {
        const std::vector<float> some = product(matrix, x.data() + first * matrix.k(), count, pool, isa);
        CHECK_THAT(identical(some.data(), all.data() + static_cast<std::size_t>(first) * n, some.size()),
                   name + ": rows " + std::to_string(first) + " + " + std::to_string(count) + ", " +
                       std::to_string(pool.size()) + " threads");
      }
    }
  }
}

// The bounds: groups of 32 quantised to 8 bits with 1% outliers measure 0.9 to 1.2%; bf16 rounding, 2^-9 at most.
void check_accuracy(const PackedMatrix& matrix, Isa isa) {
  ThreadPool pool(2);
  const std::vector<float> x = random_rows(5, matrix.k(), 2);
  const double error = relative_error(product(matrix, x.data(), 5, pool, isa), reference_product(matrix, x, 5));
  const double bound = matrix.is_bf16() ? 0.003 : 0.02;
  CHECK_THAT(error < bound,
             describe(matrix.layout()) + " on " + std::string(isa_name(isa)) + ": error " + std::to_string(error));
}

// The activations as the kernels see them: what is left of the error is float32 addition.
void check_exactness(const PackedMatrix& matrix, Isa isa) {
  ThreadPool pool(1);
  std::vector<float> x = random_rows(3, matrix.k(), 3);
  for (float& value : x) value = std::nearbyint(std::clamp(value * 20.0f, -127.0f, 127.0f));
  // Integers whose largest magnitude is 127 in every group are quantised, and rounded to bf16, without a loss.
  for (std::size_t i = 0; i < x.size(); i += kGroup) x[i] = 127.0f;
  const double error = relative_error(product(matrix, x.data(), 3, pool, isa), reference_product(matrix, x, 3));
  CHECK_THAT(error < 1e-6,
             describe(matrix.layout()) + " on " + std::string(isa_name(isa)) + ": error " + std::to_string(error));
}

void check_isas_agree(const PackedMatrix& matrix) {
  if (matrix.is_bf16()) return;
  ThreadPool pool(2);
  const std::vector<float> x = random_rows(19, matrix.k(), 4);
  const std::vector<float> expected = product(matrix, x.data(), 19, pool, Isa::portable);
  for (const Isa isa : available_isas()) {
    const std::vector<float> y = product(matrix, x.data(), 19, pool, isa);
    CHECK_THAT(identical(y.data(), expected.data(), y.size()),
               describe(matrix.layout()) + ": " + std::string(isa_name(isa)) + " differs from portable");
  }
}

void check_layouts() {
  // Widths of SmolLM2 and Qwen2.5, with fewer columns (the columns are independent) and some that fill no unit.
  constexpr Shape shapes[] = {{192, 576}, {70, 896}, {33, 1536}, {1, 256}, {65, 4864}, {40, 8960}};
  for (const PackedLayout& layout : all_layouts()) {
    for (const Shape shape : shapes) {
      if (layout.scales == ScaleKind::kquant && shape.k % 256 != 0) continue;
      const PackedMatrix matrix = random_matrix(layout, shape.n, shape.k, 5);
      check_isas_agree(matrix);
      for (const Isa isa : available_isas()) {
        check_accuracy(matrix, isa);
        check_exactness(matrix, isa);
        // The portable kernels are slow: the two smaller widths must do.
        if (isa != Isa::portable || shape.k < 600) check_row_invariance(matrix, isa);
      }
    }
  }
}

}  // namespace
}  // namespace outrider::test

int main() {
  outrider::test::check_layouts();
  return outrider::test::report();
}
