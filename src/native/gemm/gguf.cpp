// GGUF's quantised blocks, straight to the packed form. Block layouts as ggml documents them in ggml-common.h.
#include <algorithm>

#include "gemm/float_rows.h"
#include "gemm/half.h"
#include "gemm/pack_units.h"

namespace outrider {
namespace {

using Byte = std::uint8_t;

std::uint16_t load_half(const Byte* p) {
  std::uint16_t value;
  std::memcpy(&value, p, 2);
  return value;
}

// Values 0…15 of a block are the low nibbles of its 16 bytes, 16…31 the high ones.
void split_nibbles(const Byte* packed, Byte* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = packed[i] & 15;
    codes[16 + i] = packed[i] >> 4;
  }
}

void add_fifth_bits(const Byte* packed, Byte* codes) {
  std::uint32_t bits;
  std::memcpy(&bits, packed, 4);
  for (int i = 0; i < kGroup; ++i) codes[i] |= static_cast<Byte>((bits >> i & 1) << 4);
}

// { half d; nibbles[16] }
void read_q4_0(const Byte* block, ColumnRecord& out) {
  out.scale = half_to_float(load_half(block));
  split_nibbles(block + 2, out.codes);
}

// { half d, m; nibbles[16] }
void read_q4_1(const Byte* block, ColumnRecord& out) {
  out.scale = half_to_float(load_half(block));
  out.min = half_to_float(load_half(block + 2));
  split_nibbles(block + 4, out.codes);
}

// { half d; u32 fifth bits; nibbles[16] }
void read_q5_0(const Byte* block, ColumnRecord& out) {
  out.scale = half_to_float(load_half(block));
  split_nibbles(block + 6, out.codes);
  add_fifth_bits(block + 2, out.codes);
}

// { half d, m; u32 fifth bits; nibbles[16] }
void read_q5_1(const Byte* block, ColumnRecord& out) {
  out.scale = half_to_float(load_half(block));
  out.min = half_to_float(load_half(block + 2));
  split_nibbles(block + 8, out.codes);
  add_fifth_bits(block + 4, out.codes);
}

// { half d; i8[32] }
void read_q8_0(const Byte* block, ColumnRecord& out) {
  out.scale = half_to_float(load_half(block));
  for (int i = 0; i < kGroup; ++i) out.codes[i] = block[2 + i] ^ 0x80;  // + 128
}

// Eight 6-bit scales and eight 6-bit minima in 12 bytes: the first four of each in bytes 0…7, the last four's low
// nibbles in bytes 8…11 and their upper two bits on top of bytes 0…7.
void read_k_scales(const Byte* packed, ColumnRecord& out) {
  for (int g = 0; g < 4; ++g) {
    out.scale_codes[g] = packed[g] & 63;
    out.min_codes[g] = packed[4 + g] & 63;
    out.scale_codes[4 + g] = static_cast<Byte>((packed[8 + g] & 15) | packed[g] >> 6 << 4);
    out.min_codes[4 + g] = static_cast<Byte>(packed[8 + g] >> 4 | packed[4 + g] >> 6 << 4);
  }
}

// 64 values at a time: the low nibbles of 32 bytes, then their high nibbles.
void read_k_nibbles(const Byte* packed, Byte* codes) {
  for (int pair = 0; pair < 4; ++pair, packed += 32, codes += 64) {
    for (int i = 0; i < 32; ++i) {
      codes[i] = packed[i] & 15;
      codes[32 + i] = packed[i] >> 4;
    }
  }
}

// { half d, dmin; scales[12]; nibbles[128] }
void read_q4_k(const Byte* block, ColumnRecord& out) {
  out.d = load_half(block);
  out.dmin = load_half(block + 2);
  read_k_scales(block + 4, out);
  read_k_nibbles(block + 16, out.codes);
}

// { half d, dmin; scales[12]; fifth bits[32]; nibbles[128] }: bit g of byte i belongs to value i of group g.
void read_q5_k(const Byte* block, ColumnRecord& out) {
  out.d = load_half(block);
  out.dmin = load_half(block + 2);
  read_k_scales(block + 4, out);
  read_k_nibbles(block + 48, out.codes);
  for (int g = 0; g < 8; ++g) {
    for (int i = 0; i < 32; ++i) out.codes[32 * g + i] |= static_cast<Byte>((block[16 + i] >> g & 1) << 4);
  }
}

// { low nibbles[128]; upper two bits[64]; i8 scales[16]; half d }. Each half of the block: 64 bytes of nibbles, whose
// low ones are values 0…63 and high ones 64…127; bits 2t, 2t + 1 of 32 bytes belong to values 32t…32t + 31.
void read_q6_k(const Byte* block, ColumnRecord& out) {
  const Byte *low = block, *high = block + 128;
  std::memcpy(out.scale_codes, block + 192, 16);
  out.d = load_half(block + 208);
  for (Byte* codes = out.codes; codes < out.codes + 256; codes += 128, low += 64, high += 32) {
    for (int i = 0; i < 32; ++i) {
      codes[i] = static_cast<Byte>((low[i] & 15) | (high[i] & 3) << 4);
      codes[32 + i] = static_cast<Byte>((low[32 + i] & 15) | (high[i] >> 2 & 3) << 4);
      codes[64 + i] = static_cast<Byte>(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
      codes[96 + i] = static_cast<Byte>(low[32 + i] >> 4 | high[i] >> 6 << 4);
    }
  }
}

struct BlockType {
  GgmlType type;
  int values, bytes;
  WeightFormat format;
  ScaleKind scales;
  bool has_min;
  void (*read)(const Byte* block, ColumnRecord& out);
};

constexpr BlockType kBlockTypes[] = {
    {GgmlType::q4_0, 32, 18, WeightFormat::int4, ScaleKind::f16, false, read_q4_0},
    {GgmlType::q4_1, 32, 20, WeightFormat::int4, ScaleKind::f16, true, read_q4_1},
    {GgmlType::q5_0, 32, 22, WeightFormat::int5, ScaleKind::f16, false, read_q5_0},
    {GgmlType::q5_1, 32, 24, WeightFormat::int5, ScaleKind::f16, true, read_q5_1},
    {GgmlType::q8_0, 32, 34, WeightFormat::int8, ScaleKind::f16, false, read_q8_0},
    {GgmlType::q4_k, 256, 144, WeightFormat::int4, ScaleKind::kquant, true, read_q4_k},
    {GgmlType::q5_k, 256, 176, WeightFormat::int5, ScaleKind::kquant, true, read_q5_k},
    {GgmlType::q6_k, 256, 210, WeightFormat::int6, ScaleKind::kquant, false, read_q6_k},
    {GgmlType::f32, 1, 4, WeightFormat::bf16, ScaleKind::none, false, nullptr},
    {GgmlType::f16, 1, 2, WeightFormat::bf16, ScaleKind::none, false, nullptr},
    {GgmlType::bf16, 1, 2, WeightFormat::bf16, ScaleKind::none, false, nullptr},
};

const BlockType& block_type(GgmlType type) {
  for (const BlockType& candidate : kBlockTypes) {
    if (candidate.type == type) return candidate;
  }
  throw std::invalid_argument("GGUF tensor type " + std::to_string(static_cast<int>(type)) + " cannot be packed");
}

FloatType float_type(GgmlType type) {
  if (type == GgmlType::f32) return FloatType::f32;
  return type == GgmlType::f16 ? FloatType::f16 : FloatType::bf16;
}

}  // namespace

std::size_t gguf_row_bytes(GgmlType type, std::int64_t k) {
  const BlockType& block = block_type(type);
  if (k % block.values != 0) {
    throw std::invalid_argument("a GGUF row of " + std::to_string(k) + " values is no multiple of its block of " +
                                std::to_string(block.values));
  }
  return static_cast<std::size_t>(k / block.values * block.bytes);
}

PackedLayout gguf_layout(GgmlType type, std::int64_t n, std::int64_t k) {
  const BlockType& block = block_type(type);
  PackedLayout layout{block.format, block.scales, block.has_min, n, k};
  layout.check();
  return layout;
}

void pack_gguf(GgmlType type, const void* blocks, std::int64_t n, std::int64_t k,
               std::span<const std::int64_t> row_index, std::uint8_t* dst, ThreadPool& pool) {
  const BlockType& block = block_type(type);
  const PackedLayout layout = gguf_layout(type, n, k);
  check_row_index(row_index, n);
  const std::size_t row_bytes = gguf_row_bytes(type, k);
  const auto* bytes = static_cast<const Byte*>(blocks);
  const auto row_start = [&](std::int64_t row) {
    return bytes + static_cast<std::size_t>(source_row(row_index, row)) * row_bytes;
  };
  if (block.read == nullptr) {
    pack_bf16_units(layout, dst, pool, [&](std::int64_t row, std::uint16_t* out) {
      convert_to_bf16(float_type(type), row_start(row), k, out);
    });
    return;
  }
  pack_integer_units(layout, dst, pool, [&](std::int64_t row, std::int64_t record, ColumnRecord& column) {
    block.read(row_start(row) + record * block.bytes, column);
  });
}

PackedMatrix pack_gguf(GgmlType type, const void* blocks, std::int64_t n, std::int64_t k,
                       std::span<const std::int64_t> row_index, ThreadPool& pool) {
  return pack_to_buffer(gguf_layout(type, n, k),
                        [&](std::uint8_t* dst) { pack_gguf(type, blocks, n, k, row_index, dst, pool); });
}

}  // namespace outrider
