#include <stdexcept>
#include <string>

#include "gemm/record.h"
#include "gemm/variants.h"
#include "outrider/gemm.h"

namespace outrider {

std::size_t PackedLayout::unit_bytes() const {
  const RecordShape shape = record_shape(*this);
  return static_cast<std::size_t>(k / (shape.groups * kGroup)) * static_cast<std::size_t>(shape.record_bytes());
}

void PackedLayout::check() const {
  if (!is_known_variant(*this))
    throw std::invalid_argument("no packed form has this mix of format, scales and minimum");
  const int multiple = record_shape(*this).groups * kGroup;
  if (n < 1 || k < multiple || k % multiple != 0) {
    throw std::invalid_argument("a packed matrix of " + std::to_string(n) + " x " + std::to_string(k) +
                                ": the second size must be a multiple of " + std::to_string(multiple));
  }
}

PackedMatrix::PackedMatrix(const PackedLayout& layout, std::shared_ptr<const std::uint8_t> data)
    : layout_(layout), data_(std::move(data)) {
  layout.check();
  if (data_ == nullptr || reinterpret_cast<std::uintptr_t>(data_.get()) % 64 != 0) {
    throw std::invalid_argument("packed weights must lie at a multiple of 64 bytes");
  }
}

void PackedMatrix::dequantize(std::span<const std::int64_t> rows, float* out) const {
  const RecordShape shape = record_shape(layout_);
  const std::int64_t width = shape.groups * kGroup;
  for (const std::int64_t row : rows) {
    if (row < 0 || row >= n())
      throw std::out_of_range("row " + std::to_string(row) + " of a matrix of " + std::to_string(n()));
    const std::uint8_t* record = unit(row / kUnit);
    for (std::int64_t j = 0; j < k(); j += width, record += shape.record_bytes(), out += width) {
      read_record(layout_, record, static_cast<int>(row % kUnit), out);
    }
  }
}

}  // namespace outrider
