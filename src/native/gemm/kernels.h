// What an instruction set provides. Each file of kernels is compiled with its own flags and included by none.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "gemm/record.h"
#include "outrider/cpu.h"
#include "outrider/gemm.h"

namespace outrider {

// Up to QuantizedRows::kBlock rows: group g of row i is at index g * rows + i.
struct RowBlock {
  int rows;
  const std::int8_t* q;
  const ActivationGroup* groups;
  const std::uint16_t* bf16;
};

// Where the products of consecutive units go; y points at the first unit's first column.
struct Output {
  float* y;
  std::int64_t ldy;
  std::int64_t columns;  // how many of the units' columns exist
};

// Multiplies `units` units of packed weights, starting at `weights`, by a block of rows.
using GemmKernel = void (*)(const std::uint8_t* weights, std::int64_t units, std::int64_t k, const RowBlock& rows,
                            const Output& out);

struct KernelSet {
  // The kernel for that layout (whose check() has passed).
  GemmKernel (*find)(const PackedLayout& layout);
  // One group of 32 activations: to int8, and rounded to bf16 (to nearest even).
  void (*quantize)(const float* x, std::int8_t* q, ActivationGroup* group);
  void (*round_to_bf16)(const float* x, std::uint16_t* out);
};

// How a group of activations is quantised, from the bits of its largest magnitude.
struct QuantizerScale {
  float scale, inverse;  // inverse is 0 where every code is to be 0
};

// Functions that several kernel files share are static: were they merely inline, the linker could keep the copy that
// was compiled for the highest instruction set and give it to the code that must run everywhere.
static inline QuantizerScale quantizer_scale(std::uint32_t largest_bits) {
  const float largest = std::bit_cast<float>(largest_bits);
  if (largest_bits >= 0x7f800000u) return {std::numeric_limits<float>::quiet_NaN(), 0.0f};
  if (largest < 1e-35f) return {0.0f, 0.0f};  // 127 / largest would overflow
  return {largest / 127.0f, 127.0f / largest};
}

// Sums of a block of rows over the columns of one unit.
static inline void clear(float (*sums)[kUnit], int rows) {
  std::memset(sums, 0, sizeof *sums * static_cast<std::size_t>(rows));
}

static inline void store_unit(const float (*sums)[kUnit], int rows, std::int64_t unit, const Output& out) {
  const std::int64_t first = unit * kUnit, left = out.columns - first;
  const auto bytes = static_cast<std::size_t>(left < kUnit ? left : kUnit) * sizeof(float);
  for (int i = 0; i < rows; ++i) std::memcpy(out.y + i * out.ldy + first, sums[i], bytes);
}

const KernelSet& portable_kernels();
#if defined(__x86_64__)
const KernelSet& avx2_kernels();
const KernelSet& avx512_kernels();
const KernelSet& amx_kernels();
// Tries both kinds of tile product on whole numbers. A processor or hypervisor whose tiles fail is not to be trusted
// with them; amx_kernels() needs a true here.
bool amx_agrees_with_avx512();
GemmKernel avx512_bf16_kernel();  // for processors with the bf16 instructions
#endif

// Throws std::invalid_argument if this machine lacks it.
const KernelSet& kernels_for(Isa isa);

}  // namespace outrider
