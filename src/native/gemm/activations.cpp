#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

#include "gemm/kernels.h"

namespace outrider {
namespace {

template <typename T>
std::shared_ptr<T> allocate(std::int64_t count) {
  const std::size_t bytes = (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
  auto* memory = static_cast<T*>(std::aligned_alloc(64, bytes));
  if (memory == nullptr) throw std::bad_alloc();
  return {memory, [](T* p) { std::free(p); }};
}

// Groups that one item of the pool's work converts, and from how many on the pool is worth waking. An item is a piece
// of a block's stretch of memory: were it a row, threads would write to the same cache lines.
constexpr std::int64_t kGroupsPerItem = 256, kParallelGroups = 2048;

}  // namespace

void QuantizedRows::reserve() {
  const std::int64_t values = rows_ * k_;
  if (forms_.int8 && values > capacity_int8_) {
    q_ = allocate<std::int8_t>(values);
    groups_ = allocate<ActivationGroup>(values / kGroup);
    capacity_int8_ = values;
  }
  if (forms_.bf16 && values > capacity_bf16_) {
    bf16_ = allocate<std::uint16_t>(values);
    capacity_bf16_ = values;
  }
}

void QuantizedRows::assign(const float* x, std::int64_t ldx, std::int64_t rows, std::int64_t k, ActivationForms forms,
                           ThreadPool& pool, Isa isa) {
  if (k < kGroup || k % kGroup != 0 || rows < 0) {
    throw std::invalid_argument("activations of " + std::to_string(rows) + " x " + std::to_string(k) +
                                ": the second size must be a multiple of 32");
  }
  const KernelSet& kernels = kernels_for(isa);
  rows_ = rows;
  k_ = k;
  forms_ = forms;
  reserve();
  const std::int64_t groups = k / kGroup;
  const auto convert = [&](std::int64_t block, std::int64_t first, std::int64_t last) {
    const std::int64_t in_block = std::min(kBlock, rows - block);
    for (std::int64_t row = 0; row < in_block; ++row) {
      for (std::int64_t g = first; g < last; ++g) {
        const std::int64_t index = block * groups + g * in_block + row;
        const float* values = x + (block + row) * ldx + g * kGroup;
        if (forms.int8) kernels.quantize(values, q_.get() + index * kGroup, groups_.get() + index);
        if (forms.bf16) kernels.round_to_bf16(values, bf16_.get() + index * kGroup);
      }
    }
  };
  const std::int64_t blocks = (rows + kBlock - 1) / kBlock;
  if (rows * groups < kParallelGroups) {
    for (std::int64_t b = 0; b < blocks; ++b) convert(b * kBlock, 0, groups);
    return;
  }
  const std::int64_t step = std::max<std::int64_t>(1, kGroupsPerItem / std::min(kBlock, rows));
  const std::int64_t pieces = (groups + step - 1) / step;
  pool.parallel_for(blocks * pieces, [&](std::int64_t item) {
    const std::int64_t first = item % pieces * step;
    convert(item / pieces * kBlock, first, std::min(first + step, groups));
  });
}

}  // namespace outrider
