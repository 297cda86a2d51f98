// The packed forms as types, so that each kernel is written once and compiled for every form.
#pragma once

#include "gemm/record.h"

namespace outrider {

template <WeightFormat Format, ScaleKind Scales, bool HasMin>
struct Variant {
  static constexpr WeightFormat format = Format;
  static constexpr ScaleKind scales = Scales;
  static constexpr bool has_min = HasMin;
  static constexpr int zero = zero_point(Format, HasMin);
  static constexpr RecordShape shape = record_shape(Format, Scales, HasMin);
  // Always inlined: see kernels.h.
  [[gnu::always_inline]] static bool matches(const PackedLayout& l) {
    return l.format == Format && l.scales == Scales && l.has_min == HasMin;
  }
};

template <typename... Variants>
struct VariantList {
  // Calls fn.operator()<Variant>() for the one that matches; false if none does.
  template <typename F>
  static bool visit(const PackedLayout& layout, F&& fn) {
    return ((Variants::matches(layout) && (fn.template operator()<Variants>(), true)) || ...);
  }
};

using IntegerVariants =
    VariantList<Variant<WeightFormat::int4, ScaleKind::f16, false>, Variant<WeightFormat::int4, ScaleKind::f16, true>,
                Variant<WeightFormat::int4, ScaleKind::f32, false>, Variant<WeightFormat::int4, ScaleKind::f32, true>,
                Variant<WeightFormat::int4, ScaleKind::kquant, true>,
                Variant<WeightFormat::int5, ScaleKind::f16, false>, Variant<WeightFormat::int5, ScaleKind::f16, true>,
                Variant<WeightFormat::int5, ScaleKind::f32, false>, Variant<WeightFormat::int5, ScaleKind::f32, true>,
                Variant<WeightFormat::int5, ScaleKind::kquant, true>,
                Variant<WeightFormat::int6, ScaleKind::kquant, false>,
                Variant<WeightFormat::int8, ScaleKind::f16, false>, Variant<WeightFormat::int8, ScaleKind::f16, true>,
                Variant<WeightFormat::int8, ScaleKind::f32, false>, Variant<WeightFormat::int8, ScaleKind::f32, true>>;

inline bool is_known_variant(const PackedLayout& layout) {
  if (layout.format == WeightFormat::bf16) return layout.scales == ScaleKind::none && !layout.has_min;
  return IntegerVariants::visit(layout, []<typename V>() {});
}

}  // namespace outrider
