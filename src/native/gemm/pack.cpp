// Packing from the neutral form.
#include <algorithm>

#include "gemm/half.h"
#include "gemm/pack_units.h"

namespace outrider {
namespace {

bool all_halves(const float* values, std::int64_t count) {
  return std::all_of(values, values + count, [](float v) { return half_to_float(float_to_half(v)) == v; });
}

ScaleKind scale_kind(const GroupedSource& source) {
  const std::int64_t count = source.n * (source.k / kGroup);
  const bool halves = all_halves(source.scale, count) && (source.min == nullptr || all_halves(source.min, count));
  return halves ? ScaleKind::f16 : ScaleKind::f32;
}

}  // namespace

PackedMatrix pack(const GroupedSource& source, ThreadPool& pool) {
  PackedLayout layout{source.format, ScaleKind::none, source.min != nullptr, source.n, source.k};
  if (source.format == WeightFormat::bf16) {
    return pack_to_buffer(layout, [&](std::uint8_t* dst) {
      pack_bf16_units(layout, dst, pool, [&](std::int64_t row, std::uint16_t* out) {
        std::copy_n(source.bf16 + row * source.k, source.k, out);
      });
    });
  }
  layout.scales = scale_kind(source);
  const int zero = zero_point(layout.format, layout.has_min);
  return pack_to_buffer(layout, [&](std::uint8_t* dst) {
    pack_integer_units(layout, dst, pool, [&](std::int64_t row, std::int64_t group, ColumnRecord& column) {
      const std::int64_t index = row * (source.k / kGroup) + group;
      column.scale = source.scale[index];
      if (source.min != nullptr) column.min = source.min[index];
      const std::int8_t* q = source.q + index * kGroup;
      std::transform(q, q + kGroup, column.codes, [&](int v) { return static_cast<std::uint8_t>(v + zero); });
    });
  });
}

}  // namespace outrider
