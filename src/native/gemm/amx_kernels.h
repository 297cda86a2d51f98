// Kernels over tile registers, written against a type Tiles: the processor's (amx.cpp), or an emulation in the tests.
//
//   Tiles::configure(config), Tiles::release()
//   Tiles::zero<T>(), Tiles::load<T>(address, stride), Tiles::store<T>(address, stride)
//   Tiles::dot_int8<C, A, B>(), Tiles::dot_bf16<C, A, B>(): C += A * B, signed bytes to int32, or bf16 to float32
//
// A tile of activations is up to 16 rows of a group; a tile of weights is 16 columns, in the order of the packed codes.
// Integer dot products are exact, and scaled and added up by the very code of the VNNI kernels: both agree in every
// bit.
#pragma once

#include <cstring>

#include "gemm/decode_avx512.h"

namespace outrider {
namespace {

// The operand of LDTILECFG.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  void set(int tile, int tile_rows, int tile_row_bytes) {
    rows[tile] = static_cast<std::uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<std::uint16_t>(tile_row_bytes);
  }
};

// Tile registers: sums 0 … 3 as [block of 16 rows][half of the unit], weights 4 and 5 by half, activations 6 and 7 by
// block. A block of rows that is not there costs nothing.
TileConfig tile_config(int rows, int weight_rows, int activation_bytes) {
  TileConfig config;
  for (int block = 0; block < 2; ++block) {
    const int left = rows - 16 * block, here = left > 16 ? 16 : left;
    if (here <= 0) break;
    config.set(2 * block, here, 64);
    config.set(2 * block + 1, here, 64);
    config.set(6 + block, here, activation_bytes);
  }
  config.set(4, weight_rows, 64);
  config.set(5, weight_rows, 64);
  return config;
}

// Walks the groups of a packed stream, over the ends of records and units.
template <typename V>
struct GroupStream {
  const Byte* header;
  const Byte* group;
  int index = 0;

  explicit GroupStream(const Byte* weights) : header(weights), group(weights + V::shape.header_bytes) {}
  void next() {
    group += V::shape.group_bytes;
    if (++index < V::shape.groups) return;
    index = 0;
    header = group;
    group += V::shape.header_bytes;
  }
};

// One call of an integer kernel. Three stages run side by side over the groups of all its units, so that none waits
// for another: decoding runs kAhead groups before the tiles, and scaling one group behind them.
template <typename Tiles, typename V>
class TileProduct {
 public:
  TileProduct(const Byte* weights, std::int64_t k, const RowBlock& rows, const Output& out)
      : groups_(k / kGroup), rows_(rows), out_(out), to_decode_(weights), to_scale_(weights) {}

  void run(std::int64_t units) {
    const std::int64_t total = units * groups_;
    Tiles::configure(tile_config(rows_.rows, 8 / kParts, kGroup / kParts));
    for (std::int64_t i = 0; i < kAhead && i < total; ++i) decode(i);
    for (std::int64_t i = 0; i < total; ++i) {
      multiply(i);
      if (i + kAhead < total) decode(i + kAhead);
      if (i > 0) scale(i - 1);
    }
    scale(total - 1);
    Tiles::release();
  }

 private:
  static constexpr int kAhead = 4;
  static constexpr int kParts = scales_per_group(V::format);

  // Signed values, [half][quad][64], to memory: tiles load from nowhere else.
  void decode(std::int64_t i) {
    prefetch_ahead<V::shape.group_bytes>(to_decode_.group);
    Group group;
    decode_codes<V>(to_decode_.group + V::shape.scale_bytes, group);
    for (int half = 0; half < 2; ++half) {
      for (int quad = 0; quad < 8; ++quad) {
        const __m512i value = _mm512_sub_epi8(group.code[half][quad], _mm512_set1_epi8(static_cast<char>(V::zero)));
        _mm512_store_si512(values_[i % (2 * kAhead)][half][quad], value);
      }
    }
    to_decode_.next();
  }

  void multiply(std::int64_t i) {
    const std::int8_t* q = rows_.q + i % groups_ * rows_.rows * kGroup;
    for (int part = 0; part < kParts; ++part) {
      const int quad = part * 8 / kParts;
      std::int32_t (*dots)[2][16][16] = dots_[i % 2][part];
      Tiles::template load<4>(values_[i % (2 * kAhead)][0][quad], 64);
      Tiles::template load<5>(values_[i % (2 * kAhead)][1][quad], 64);
      Tiles::template load<6>(q + 4 * quad, kGroup);
      product<0, 6, 4>(dots[0][0]);
      product<1, 6, 5>(dots[0][1]);
      if (rows_.rows > 16) {
        Tiles::template load<7>(q + 16 * kGroup + 4 * quad, kGroup);
        product<2, 7, 4>(dots[1][0]);
        product<3, 7, 5>(dots[1][1]);
      }
    }
  }

  template <int Sum, int Activations, int Weights>
  void product(std::int32_t (*dots)[16]) {
    Tiles::template zero<Sum>();
    Tiles::template dot_int8<Sum, Activations, Weights>();
    Tiles::template store<Sum>(dots, 64);
  }

  void scale(std::int64_t i) {
    const std::int64_t g = i % groups_;
    if (g == 0) clear(sums_, rows_.rows);
    Header header;
    Group group;
    decode_header<V>(to_scale_.header, header);
    decode_scales<V>(header, to_scale_.group, group);
    to_scale_.next();
    const ActivationGroup* x = rows_.groups + g * rows_.rows;
    for (int r = 0; r < rows_.rows; ++r) {
      __m512i dot[2][kParts];
      for (int half = 0; half < 2; ++half) {
        for (int part = 0; part < kParts; ++part) {
          dot[half][part] = _mm512_load_si512(dots_[i % 2][part][r / 16][half][r % 16]);
        }
      }
      accumulate_dots<V>(group, dot, x[r], sums_[r]);
    }
    if (g == groups_ - 1) store_unit(sums_, rows_.rows, i / groups_, out_);
  }

  const std::int64_t groups_;
  const RowBlock& rows_;
  const Output& out_;
  GroupStream<V> to_decode_, to_scale_;
  alignas(64) Byte values_[2 * kAhead][2][8][64];
  alignas(64) std::int32_t dots_[2][kParts][2][2][16][16];  // [turn][part][block][half][row][column]
  alignas(64) float sums_[QuantizedRows::kBlock][kUnit];
};

template <typename Tiles, typename V>
void multiply_tiles(const Byte* weights, std::int64_t units, std::int64_t k, const RowBlock& rows, const Output& out) {
  TileProduct<Tiles, V>(weights, k, rows, out).run(units);
}

// bf16 weights are tiles as they lie in the stream, and the sums of a unit stay in tiles over all of k.
template <typename Tiles>
void multiply_tiles_bf16(const Byte* weights, std::int64_t units, std::int64_t k, const RowBlock& rows,
                         const Output& out) {
  constexpr int group_bytes = 2 * kUnit * kGroup;
  alignas(64) float sums[2][2][16][16];  // [block][half][row][column]
  const bool second = rows.rows > 16;
  Tiles::configure(tile_config(rows.rows, 16, 2 * kGroup));
  for (std::int64_t unit = 0; unit < units; ++unit) {
    const std::uint16_t* x = rows.bf16;
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    if (second) {
      Tiles::template zero<2>();
      Tiles::template zero<3>();
    }
    for (std::int64_t g = 0; g < k / kGroup; ++g, weights += group_bytes, x += rows.rows * kGroup) {
      prefetch_ahead<group_bytes>(weights);
      Tiles::template load<4>(weights, 64);
      Tiles::template load<5>(weights + 1024, 64);
      Tiles::template load<6>(x, 2 * kGroup);
      Tiles::template dot_bf16<0, 6, 4>();
      Tiles::template dot_bf16<1, 6, 5>();
      if (second) {
        Tiles::template load<7>(x + 16 * kGroup, 2 * kGroup);
        Tiles::template dot_bf16<2, 7, 4>();
        Tiles::template dot_bf16<3, 7, 5>();
      }
    }
    Tiles::template store<0>(sums[0][0], 64);
    Tiles::template store<1>(sums[0][1], 64);
    if (second) {
      Tiles::template store<2>(sums[1][0], 64);
      Tiles::template store<3>(sums[1][1], 64);
    }
    alignas(64) float joined[QuantizedRows::kBlock][kUnit];
    for (int r = 0; r < rows.rows; ++r) {
      for (int half = 0; half < 2; ++half) std::memcpy(joined[r] + 16 * half, sums[r / 16][half][r % 16], 64);
    }
    store_unit(joined, rows.rows, unit, out);
  }
  Tiles::release();
}

}  // namespace
}  // namespace outrider
