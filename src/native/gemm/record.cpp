#include "gemm/record.h"

#include <cstring>

#include "gemm/half.h"

namespace outrider {
namespace {

using Codes = std::uint8_t[2][8][16][4];  // [half][quad][column][k]

void put_half(std::uint8_t* p, int index, std::uint16_t value) { std::memcpy(p + 2 * index, &value, 2); }
void put_float(std::uint8_t* p, int index, float value) { std::memcpy(p + 4 * index, &value, 4); }

float get_half(const std::uint8_t* p, int index) {
  std::uint16_t value;
  std::memcpy(&value, p + 2 * index, 2);
  return half_to_float(value);
}

float get_float(const std::uint8_t* p, int index) {
  float value;
  std::memcpy(&value, p + 4 * index, 4);
  return value;
}

void write_scales(const PackedLayout& layout, const ColumnRecord* columns, int group, std::uint8_t* out) {
  for (int c = 0; c < kUnit; ++c) {
    const ColumnRecord& column = columns[c];
    switch (layout.scales) {
      case ScaleKind::none:
        break;
      case ScaleKind::f16:
        put_half(out, c, float_to_half(column.scale));
        if (layout.has_min) put_half(out, kUnit + c, float_to_half(column.min));
        break;
      case ScaleKind::f32:
        put_float(out, c, column.scale);
        if (layout.has_min) put_float(out, kUnit + c, column.min);
        break;
      case ScaleKind::kquant:
        if (layout.has_min) {
          out[c] = column.scale_codes[group];
          out[kUnit + c] = column.min_codes[group];
        } else {
          out[c] = column.scale_codes[2 * group];
          out[kUnit + c] = column.scale_codes[2 * group + 1];
        }
        break;
    }
  }
}

// The vectors' bytes: [2 halves][vectors][64].
void write_codes(WeightFormat format, const Codes& codes, std::uint8_t* out) {
  if (format == WeightFormat::int8) {
    std::memcpy(out, codes, sizeof codes);
    return;
  }
  const auto at = [&](int half, int quad, int byte) { return (&codes[half][quad][0][0])[byte]; };
  std::uint8_t* high = out + 512;
  for (int half = 0; half < 2; ++half) {
    for (int byte = 0; byte < 64; ++byte) {
      for (int v = 0; v < 4; ++v) {
        out[(4 * half + v) * 64 + byte] =
            static_cast<std::uint8_t>((at(half, 2 * v, byte) & 15) | (at(half, 2 * v + 1, byte) & 15) << 4);
      }
      for (int quad = 0; quad < 8; ++quad) {
        const int top = at(half, quad, byte) >> 4;
        if (format == WeightFormat::int5) high[half * 64 + byte] |= static_cast<std::uint8_t>(top << quad);
        if (format == WeightFormat::int6) {
          high[(2 * half + quad / 4) * 64 + byte] |= static_cast<std::uint8_t>(top << (2 * (quad % 4)));
        }
      }
    }
  }
}

int read_code(WeightFormat format, const std::uint8_t* codes, int column, int k) {
  const int half = column / 16, quad = k / 4, byte = (column % 16) * 4 + k % 4;
  if (format == WeightFormat::int8) return codes[(8 * half + quad) * 64 + byte];
  const int low = codes[(4 * half + quad / 2) * 64 + byte] >> (4 * (quad % 2)) & 15;
  const std::uint8_t* high = codes + 512;
  if (format == WeightFormat::int5) return low | (high[half * 64 + byte] >> quad & 1) << 4;
  if (format == WeightFormat::int6) {
    return low | (high[(2 * half + quad / 4) * 64 + byte] >> (2 * (quad % 4)) & 3) << 4;
  }
  return low;
}

struct ScaleAndMin {
  float scale, min;
};

ScaleAndMin read_scale(const PackedLayout& layout, const std::uint8_t* header, const std::uint8_t* scales, int column,
                       int half_group) {
  const bool has_min = layout.has_min;
  switch (layout.scales) {
    case ScaleKind::none:
      break;
    case ScaleKind::f16:
      return {get_half(scales, column), has_min ? get_half(scales, kUnit + column) : 0.0f};
    case ScaleKind::f32:
      return {get_float(scales, column), has_min ? get_float(scales, kUnit + column) : 0.0f};
    case ScaleKind::kquant: {
      const float d = get_half(header, column);
      if (!has_min)
        return {d * static_cast<float>(static_cast<std::int8_t>(scales[half_group * kUnit + column])), 0.0f};
      const float dmin = get_half(header, kUnit + column);
      return {d * static_cast<float>(scales[column]), -(dmin * static_cast<float>(scales[kUnit + column]))};
    }
  }
  return {0.0f, 0.0f};
}

}  // namespace

void write_record(const PackedLayout& layout, const ColumnRecord* columns, std::uint8_t* record) {
  const RecordShape shape = record_shape(layout);
  std::memset(record, 0, static_cast<std::size_t>(shape.record_bytes()));
  if (layout.scales == ScaleKind::kquant) {
    for (int c = 0; c < kUnit; ++c) {
      put_half(record, c, columns[c].d);
      if (layout.has_min) put_half(record, kUnit + c, columns[c].dmin);
    }
  }
  for (int g = 0; g < shape.groups; ++g) {
    std::uint8_t* out = record + shape.header_bytes + g * shape.group_bytes;
    write_scales(layout, columns, g, out);
    Codes codes;
    for (int c = 0; c < kUnit; ++c) {
      for (int quad = 0; quad < 8; ++quad)
        std::memcpy(codes[c / 16][quad][c % 16], columns[c].codes + g * kGroup + 4 * quad, 4);
    }
    write_codes(layout.format, codes, out + shape.scale_bytes);
  }
}

void read_record(const PackedLayout& layout, const std::uint8_t* record, int column, float* out) {
  const RecordShape shape = record_shape(layout);
  const int zero = zero_point(layout.format, layout.has_min);
  for (int g = 0; g < shape.groups; ++g, out += kGroup) {
    const std::uint8_t* scales = record + shape.header_bytes + g * shape.group_bytes;
    if (layout.format == WeightFormat::bf16) {
      for (int k = 0; k < kGroup; ++k) {
        std::uint16_t value;
        std::memcpy(&value, scales + (column / 16) * 1024 + (k / 2) * 64 + (column % 16) * 4 + (k % 2) * 2, 2);
        out[k] = bf16_to_float(value);
      }
      continue;
    }
    for (int k = 0; k < kGroup; ++k) {
      const auto [scale, min] = read_scale(layout, record, scales, column, k / 16);
      const int code = read_code(layout.format, scales + shape.scale_bytes, column, k) - zero;
      out[k] = scale * static_cast<float>(code);
      if (layout.has_min) out[k] += min;
    }
  }
}

}  // namespace outrider
