// Decoding packed groups into AVX-512 registers, for the VNNI and the AMX kernels.
#pragma once

#include <immintrin.h>

#include "gemm/kernels.h"
#include "gemm/variants.h"

namespace outrider {
namespace {

using Byte = std::uint8_t;

// How far ahead of its use the stream is fetched: past the hardware prefetcher's stop at each page.
constexpr int kPrefetchBytes = 4096;

template <int Bytes>
inline void prefetch_ahead(const Byte* p) {
  for (int i = 0; i < Bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + kPrefetchBytes + i), _MM_HINT_T0);
}

// One group of 32 k of a unit, in registers.
struct Group {
  __m512i code[2][8];  // [half][quad]: unsigned
  __m512 scale[2][2];  // [half][part of the group]
  __m512 min[2];
};

template <typename V>
inline void decode_codes(const Byte* codes, Group& group) {
  const __m512i low_mask = _mm512_set1_epi8(15);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    __m512i* code = group.code[half];
    if constexpr (V::format == WeightFormat::int8) {
#pragma GCC unroll 8
      for (int quad = 0; quad < 8; ++quad) code[quad] = _mm512_load_si512(codes + (8 * half + quad) * 64);
      continue;
    }
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const __m512i both = _mm512_load_si512(codes + (4 * half + v) * 64);
      code[2 * v] = _mm512_and_si512(both, low_mask);
      code[2 * v + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_mask);
    }
    // low | (shifted & mask), as one ternary operation: the table of a | (b & c) is 0xf8.
    if constexpr (V::format == WeightFormat::int5) {
      const __m512i mask = _mm512_set1_epi8(16), high = _mm512_load_si512(codes + 512 + half * 64);
#pragma GCC unroll 8
      for (int quad = 0; quad < 8; ++quad) {
        const __m512i shifted = quad < 4 ? _mm512_slli_epi16(high, 4 - quad) : _mm512_srli_epi16(high, quad - 4);
        code[quad] = _mm512_ternarylogic_epi32(code[quad], shifted, mask, 0xf8);
      }
    }
    if constexpr (V::format == WeightFormat::int6) {
      const __m512i mask = _mm512_set1_epi8(48);
#pragma GCC unroll 8
      for (int quad = 0; quad < 8; ++quad) {
        const __m512i high = _mm512_load_si512(codes + 512 + (2 * half + quad / 4) * 64);
        const int place = 2 * (quad % 4);
        const __m512i shifted = place < 4 ? _mm512_slli_epi16(high, 4 - place) : _mm512_srli_epi16(high, place - 4);
        code[quad] = _mm512_ternarylogic_epi32(code[quad], shifted, mask, 0xf8);
      }
    }
  }
}

inline __m512 load_halves(const Byte* p) {
  return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512 load_u8(const Byte* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))));
}
inline __m512 load_i8(const Byte* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))));
}

// The halves that the groups of a record share.
struct Header {
  __m512 d[2], negative_dmin[2];
};

template <typename V>
inline void decode_header(const Byte* header, Header& out) {
  if constexpr (V::scales == ScaleKind::kquant) {
    for (int half = 0; half < 2; ++half) {
      out.d[half] = load_halves(header + 32 * half);
      if constexpr (V::has_min) {
        out.negative_dmin[half] = _mm512_xor_ps(load_halves(header + 64 + 32 * half), _mm512_set1_ps(-0.0f));
      }
    }
  }
}

template <typename V>
inline void decode_scales(const Header& header, const Byte* scales, Group& group) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    if constexpr (V::scales == ScaleKind::f16) {
      group.scale[half][0] = load_halves(scales + 32 * half);
      if constexpr (V::has_min) group.min[half] = load_halves(scales + 64 + 32 * half);
    } else if constexpr (V::scales == ScaleKind::f32) {
      group.scale[half][0] = _mm512_load_ps(scales + 64 * half);
      if constexpr (V::has_min) group.min[half] = _mm512_load_ps(scales + 128 + 64 * half);
    } else if constexpr (V::has_min) {
      group.scale[half][0] = _mm512_mul_ps(header.d[half], load_u8(scales + 16 * half));
      group.min[half] = _mm512_mul_ps(header.negative_dmin[half], load_u8(scales + 32 + 16 * half));
    } else {
      group.scale[half][0] = _mm512_mul_ps(header.d[half], load_i8(scales + 16 * half));
      group.scale[half][1] = _mm512_mul_ps(header.d[half], load_i8(scales + 32 + 16 * half));
    }
  }
}

// Scales one row's exact dot products with a group, [half][part], and adds them to its sums over the unit.
template <typename V>
inline void accumulate_dots(const Group& group, const __m512i (*dot)[scales_per_group(V::format)],
                            const ActivationGroup& x, float* sums) {
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[half][0]), group.scale[half][0]);
    if constexpr (scales_per_group(V::format) == 2) {
      value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[half][1]), group.scale[half][1], value);
    }
    __m512 sum = _mm512_fmadd_ps(value, _mm512_set1_ps(x.scale), _mm512_load_ps(sums + 16 * half));
    if constexpr (V::has_min) sum = _mm512_fmadd_ps(group.min[half], _mm512_set1_ps(x.sum), sum);
    _mm512_store_ps(sums + 16 * half, sum);
  }
}

}  // namespace
}  // namespace outrider
