// The packed stream. A unit is 32 columns over all of k, a sequence of records; a record covers one group of 32 k, or
// for kquant the eight groups of 256 that share their halves:
//
//   record  [header][group] x groups
//   header  kquant: half d [32 columns], and half dmin [32] where there is a minimum
//   group   [scales][codes], a multiple of 64 bytes
//   scales  f16:    half scale [32], then half min [32] if any;  f32: the same in floats
//           kquant: int4, int5: u8 scale [32], u8 min [32] (scale = d * u8, min = -dmin * u8)
//                   int6: i8 scale [2 halves of the group][32]
//   codes   u8, value + zero_point. The order is [2 halves of the unit][8 quads of k][16 columns][4 k]: a 64-byte
//           vector holds 4 consecutive k of 16 columns, as VNNI and AMX want them. int8: those 16 vectors.
//           int4, int5, int6: the codes' low 4 bits first: byte i of vector 4h + v holds quad 2v below and quad
//           2v + 1 above. Then the high bits: int5: one vector a half, bit j of a byte is quad j's; int6: two vectors
//           a half, bits 2t and 2t + 1 of vector v are quad 4v + t's.
//
// bf16 has neither header nor scales: a group is [2 halves][16 pairs of k][16 columns][2 k].
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "outrider/gemm.h"

namespace outrider {

static_assert(std::endian::native == std::endian::little, "packed streams and GGUF files are little-endian");

constexpr int format_bits(WeightFormat format) {
  switch (format) {
    case WeightFormat::int4:
      return 4;
    case WeightFormat::int5:
      return 5;
    case WeightFormat::int6:
      return 6;
    case WeightFormat::int8:
      return 8;
    case WeightFormat::bf16:
      return 16;
  }
  return 0;
}

// What is added to a value to make its code unsigned.
constexpr int zero_point(WeightFormat format, bool has_min) {
  const int bits = format_bits(format);
  return (has_min && bits < 8) || bits == 16 ? 0 : 1 << (bits - 1);
}

// Scales per group: int6 has one for each 16 values.
constexpr int scales_per_group(WeightFormat format) { return format == WeightFormat::int6 ? 2 : 1; }

struct RecordShape {
  int groups;  // per record
  int header_bytes;
  int scale_bytes;  // per group
  int group_bytes;  // scales and codes
  constexpr int record_bytes() const { return header_bytes + groups * group_bytes; }
};

constexpr RecordShape record_shape(WeightFormat format, ScaleKind scales, bool has_min) {
  const int fields = has_min ? 2 : 1;
  RecordShape shape{1, 0, 0, kUnit * kGroup / 8 * format_bits(format)};
  if (scales == ScaleKind::f16) shape.scale_bytes = fields * 2 * kUnit;
  if (scales == ScaleKind::f32) shape.scale_bytes = fields * 4 * kUnit;
  if (scales == ScaleKind::kquant) {
    shape.groups = 8;
    shape.header_bytes = fields * 2 * kUnit;
    shape.scale_bytes = 2 * kUnit;
  }
  shape.group_bytes += shape.scale_bytes;
  return shape;
}

inline RecordShape record_shape(const PackedLayout& layout) {
  return record_shape(layout.format, layout.scales, layout.has_min);
}

// One column of a record while it is being packed.
struct ColumnRecord {
  float scale = 0, min = 0;             // f16 (must be halves) and f32
  std::uint16_t d = 0, dmin = 0;        // kquant
  std::uint8_t scale_codes[16] = {};    // kquant, one per group, int6: two per group (as signed)
  std::uint8_t min_codes[8] = {};       // kquant
  std::uint8_t codes[8 * kGroup] = {};  // value + zero_point
};

// Writes one record from its 32 columns.
void write_record(const PackedLayout& layout, const ColumnRecord* columns, std::uint8_t* record);

// Dequantises one column of one record: 32 values, or 256 for kquant.
void read_record(const PackedLayout& layout, const std::uint8_t* record, int column, float* out);

}  // namespace outrider
