// The AMX kernels over an emulation of the tile registers, so that their logic is tested on machines without AMX.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's headers; see CMakeLists.txt
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include "check.h"
#include "gemm/amx_kernels.h"
#include "gemm_cases.h"

namespace outrider::test {
namespace {

// Tiles as Intel's manual defines them. Whatever lies beyond a tile's rows and bytes reads as zero.
struct EmulatedTiles {
  static inline TileConfig config;
  static inline bool configured = false;
  static inline std::uint8_t bytes[8][16][64];

  static void configure(const TileConfig& c) {
    config = c;
    configured = true;
    std::memset(bytes, 0, sizeof bytes);
    for (int t = 0; t < 8; ++t) CHECK(config.rows[t] <= 16 && config.row_bytes[t] <= 64);
  }
  static void release() { configured = false; }

  template <int T>
  static void zero() {
    CHECK(configured && config.rows[T] > 0);
    std::memset(bytes[T], 0, sizeof bytes[T]);
  }
  template <int T>
  static void load(const void* address, std::int64_t stride) {
    zero<T>();
    for (int r = 0; r < config.rows[T]; ++r) {
      std::memcpy(bytes[T][r], static_cast<const std::uint8_t*>(address) + r * stride, config.row_bytes[T]);
    }
  }
  template <int T>
  static void store(void* address, std::int64_t stride) {
    CHECK(configured && config.rows[T] > 0);
    for (int r = 0; r < config.rows[T]; ++r) {
      std::memcpy(static_cast<std::uint8_t*>(address) + r * stride, bytes[T][r], config.row_bytes[T]);
    }
  }

  // Calls add(row, column, sum, activations' 4 bytes, weights' 4 bytes) for every step of C += A * B.
  template <int Sum, int Activations, int Weights, typename Add>
  static void dot(Add&& add) {
    CHECK(configured && config.rows[Sum] == config.rows[Activations] &&
          config.row_bytes[Sum] == config.row_bytes[Weights] &&
          config.row_bytes[Activations] == 4 * config.rows[Weights]);
    for (int r = 0; r < config.rows[Sum]; ++r) {
      for (int k = 0; k < config.rows[Weights]; ++k) {
        for (int c = 0; c < 16; ++c)
          add(bytes[Sum][r] + 4 * c, bytes[Activations][r] + 4 * k, bytes[Weights][k] + 4 * c);
      }
    }
  }
  template <int Sum, int Activations, int Weights>
  static void dot_int8() {
    dot<Sum, Activations, Weights>([](std::uint8_t* sum, const std::uint8_t* a, const std::uint8_t* b) {
      std::int32_t total;
      std::memcpy(&total, sum, 4);
      for (int i = 0; i < 4; ++i) total += static_cast<std::int8_t>(a[i]) * static_cast<std::int8_t>(b[i]);
      std::memcpy(sum, &total, 4);
    });
  }
  template <int Sum, int Activations, int Weights>
  static void dot_bf16() {
    dot<Sum, Activations, Weights>([](std::uint8_t* sum, const std::uint8_t* a, const std::uint8_t* b) {
      float total;
      std::uint16_t x[2], w[2];
      std::memcpy(&total, sum, 4);
      std::memcpy(x, a, 4);
      std::memcpy(w, b, 4);
      for (int i = 0; i < 2; ++i) total += bf16_to_float(x[i]) * bf16_to_float(w[i]);
      std::memcpy(sum, &total, 4);
    });
  }
};

std::vector<float> emulated_product(const PackedMatrix& matrix, const QuantizedRows& rows) {
  std::vector<float> y(static_cast<std::size_t>(rows.rows() * matrix.n()), std::numeric_limits<float>::quiet_NaN());
  GemmKernel kernel = multiply_tiles_bf16<EmulatedTiles>;
  IntegerVariants::visit(matrix.layout(), [&]<typename V>() { kernel = multiply_tiles<EmulatedTiles, V>; });
  const RowBlock block{static_cast<int>(rows.rows()), rows.q(0), rows.groups(0), rows.bf16(0)};
  kernel(matrix.data(), matrix.layout().units(), matrix.k(), block, {y.data(), matrix.n(), matrix.n()});
  CHECK(!EmulatedTiles::configured);
  return y;
}

void check_layout(const PackedLayout& layout, std::int64_t n, std::int64_t k) {
  const PackedMatrix matrix = random_matrix(layout, n, k, 11);
  ThreadPool pool(1);
  for (const std::int64_t count : {1, 2, 15, 16, 17, 31, 32}) {
    const std::vector<float> x = random_rows(count, k, 12);
    QuantizedRows rows;
    rows.assign(x.data(), k, count, k, {true, true}, pool, Isa::avx512);
    const std::vector<float> y = emulated_product(matrix, rows);
    const std::string name = describe(matrix.layout()) + ", " + std::to_string(count) + " rows";
    if (matrix.is_bf16()) {
      CHECK_THAT(relative_error(y, reference_product(matrix, x, count)) < 0.003, name);
    } else {
      const std::vector<float> expected = product(matrix, x.data(), count, pool, Isa::avx512);
      CHECK_THAT(std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)) == 0, name + " differs from avx512");
    }
  }
}

}  // namespace
}  // namespace outrider::test

int main() {
  using namespace outrider::test;
  if (!outrider::isa_available(outrider::Isa::avx512)) {
    std::fprintf(stderr, "skipped: the emulation needs AVX-512 around its tiles\n");
    return 0;
  }
  for (const outrider::PackedLayout& layout : all_layouts()) {
    check_layout(layout, 32, 256);  // fewer units than the pipeline is deep
    check_layout(layout, 70, 1536);
  }
  return report();
}

#else

int main() { return 0; }

#endif
