// Kernels for AMX: the processor's tiles under amx_kernels.h.
#include "gemm/amx_kernels.h"

namespace outrider {
namespace {

// In assembly: GCC's intrinsics leave out that loads and stores touch memory, and want the register as a literal.
struct HardwareTiles {
  static void configure(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" : : "m"(config)); }
  static void release() { __asm__ volatile("tilerelease"); }

  template <int T>
  static void zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  template <int T>
  static void load(const void* address, std::int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(address), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  static void store(void* address, std::int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(address), "r"(stride), "i"(T) : "memory");
  }
  // AT&T order: weights, activations, sums.
  template <int Sum, int Activations, int Weights>
  static void dot_int8() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(Activations), "i"(Weights));
  }
  template <int Sum, int Activations, int Weights>
  static void dot_bf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(Activations), "i"(Weights));
  }
};

GemmKernel find(const PackedLayout& layout) {
  GemmKernel kernel = multiply_tiles_bf16<HardwareTiles>;
  IntegerVariants::visit(layout, [&]<typename V>() { kernel = multiply_tiles<HardwareTiles, V>; });
  return kernel;
}

// A product of small whole numbers, which every order of addition gets exactly: 17 rows, one unit, k = 64.
struct Trial {
  static constexpr int kRows = 17, kGroups = 2;
  alignas(64) Byte weights[kGroups * 2 * kUnit * kGroup] = {};
  alignas(64) std::int8_t q[kRows * kGroups * kGroup];
  alignas(64) std::uint16_t bf16[kRows * kGroups * kGroup];
  ActivationGroup groups[kRows * kGroups];

  Trial() {
    for (int i = 0; i < kRows * kGroups * kGroup; ++i) {
      const int value = i * 37 % 31 - 15;
      const auto as_float = static_cast<float>(value);
      std::uint32_t bits;
      std::memcpy(&bits, &as_float, 4);
      q[i] = static_cast<std::int8_t>(value);
      bf16[i] = static_cast<std::uint16_t>(bits >> 16);
    }
    for (int i = 0; i < kRows * kGroups; ++i) {
      int sum = 0;
      for (int k = 0; k < kGroup; ++k) sum += q[i * kGroup + k];
      groups[i] = {1.0f, static_cast<float>(sum), -sum, 0};
    }
  }

  bool agrees(const PackedLayout& layout) const {
    float expected[kRows][kUnit] = {}, found[kRows][kUnit] = {};
    const RowBlock rows{kRows, q, groups, bf16};
    avx512_kernels().find(layout)(weights, 1, kGroups * kGroup, rows, {expected[0], kUnit, kUnit});
    find(layout)(weights, 1, kGroups * kGroup, rows, {found[0], kUnit, kUnit});
    return std::memcmp(expected, found, sizeof expected) == 0;
  }

  bool int8_agrees() {
    constexpr RecordShape shape = record_shape(WeightFormat::int8, ScaleKind::f32, false);
    for (int i = 0; i < kGroups * shape.group_bytes; ++i) weights[i] = static_cast<Byte>(i * 89 % 251);
    const float one = 1.0f;
    for (int g = 0; g < kGroups; ++g) {
      for (int c = 0; c < kUnit; ++c) std::memcpy(weights + g * shape.group_bytes + 4 * c, &one, 4);
    }
    return agrees({WeightFormat::int8, ScaleKind::f32, false, kUnit, kGroups * kGroup});
  }

  bool bf16_agrees() {
    for (int i = 0; i < kGroups * kUnit * kGroup; ++i) std::memcpy(weights + 2 * i, bf16 + i % (kRows * kGroup), 2);
    return agrees({WeightFormat::bf16, ScaleKind::none, false, kUnit, kGroups * kGroup});
  }
};

}  // namespace

const KernelSet& amx_kernels() {
  static const KernelSet kernels{find, avx512_kernels().quantize, avx512_kernels().round_to_bf16};
  return kernels;
}

bool amx_agrees_with_avx512() {
  Trial trial;
  return trial.int8_agrees() && trial.bf16_agrees();
}

}  // namespace outrider
