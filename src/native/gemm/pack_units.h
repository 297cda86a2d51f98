// Drivers that lay a matrix out unit by unit, in parallel.
#pragma once

#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "gemm/record.h"

namespace outrider {

inline std::int64_t source_row(std::span<const std::int64_t> row_index, std::int64_t row) {
  return row_index.empty() ? row : row_index[static_cast<std::size_t>(row)];
}

inline void check_row_index(std::span<const std::int64_t> row_index, std::int64_t n) {
  if (!row_index.empty() && static_cast<std::int64_t>(row_index.size()) != n) {
    throw std::invalid_argument("row_index has " + std::to_string(row_index.size()) + " entries for " +
                                std::to_string(n) + " rows");
  }
}

// fill(row, record, ColumnRecord&) provides packed row `row`'s values of record number `record`.
template <typename Fill>
void pack_integer_units(const PackedLayout& layout, std::uint8_t* dst, ThreadPool& pool, Fill&& fill) {
  const RecordShape shape = record_shape(layout);
  const std::int64_t records = layout.k / (shape.groups * kGroup);
  pool.parallel_for(layout.units(), [&](std::int64_t unit) {
    std::uint8_t* out = dst + static_cast<std::size_t>(unit) * layout.unit_bytes();
    std::vector<ColumnRecord> columns(kUnit);
    for (std::int64_t record = 0; record < records; ++record, out += shape.record_bytes()) {
      for (int c = 0; c < kUnit; ++c) {
        const std::int64_t row = unit * kUnit + c;
        if (row < layout.n) fill(row, record, columns[static_cast<std::size_t>(c)]);
      }
      write_record(layout, columns.data(), out);
    }
  });
}

// fill(row, std::uint16_t* out) provides packed row `row` as k bf16 values.
template <typename Fill>
void pack_bf16_units(const PackedLayout& layout, std::uint8_t* dst, ThreadPool& pool, Fill&& fill) {
  const std::int64_t pairs = layout.k / 2;
  pool.parallel_for(layout.units(), [&](std::int64_t unit) {
    std::uint8_t* out = dst + static_cast<std::size_t>(unit) * layout.unit_bytes();
    std::vector<std::uint16_t> values(static_cast<std::size_t>(layout.k));
    for (int c = 0; c < kUnit; ++c) {
      const std::int64_t row = unit * kUnit + c;
      if (row < layout.n) {
        fill(row, values.data());
      } else {
        std::fill(values.begin(), values.end(), std::uint16_t{0});
      }
      for (std::int64_t pair = 0; pair < pairs; ++pair) {
        std::uint8_t* group = out + pair / 16 * (kUnit * kGroup * 2);
        std::memcpy(group + (c / 16) * 1024 + pair % 16 * 64 + (c % 16) * 4, values.data() + 2 * pair, 4);
      }
    }
  });
}

// Memory for a matrix of that layout, and the matrix over it once fill(std::uint8_t*) has written it.
template <typename Fill>
PackedMatrix pack_to_buffer(const PackedLayout& layout, Fill&& fill) {
  layout.check();
  Buffer buffer(layout.bytes());
  fill(buffer.data());
  return PackedMatrix(layout, buffer.share());
}

}  // namespace outrider
