// Kernels for AVX-512 with VNNI. A register holds 16 columns; both halves of a unit share each broadcast activation.
#include <immintrin.h>

#include <cstring>

#include "gemm/bf16_avx512.h"
#include "gemm/kernels.h"
#include "gemm/variants.h"

#if !defined(__AVX512VNNI__) || !defined(__AVX512BW__)
#error "compile with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma -mf16c"
#endif

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

constexpr int log2_of(int power) { return power <= 1 ? 0 : 1 + log2_of(power / 2); }

// -zero * (sum of q), in every lane: what undoes the codes' offset.
template <typename V>
inline __m512i offset(std::int32_t negative_sum) {
  if constexpr (V::zero == 0) return _mm512_setzero_si512();
  return _mm512_slli_epi32(_mm512_set1_epi32(negative_sum), log2_of(V::zero));
}

inline __m512i broadcast_quad(const std::int8_t* q, int quad) {
  std::int32_t word;
  std::memcpy(&word, q + 4 * quad, 4);
  return _mm512_set1_epi32(word);
}

template <typename V>
inline void accumulate_group(const Group& group, const std::int8_t* q, const ActivationGroup& x, float* sums) {
  constexpr int parts = scales_per_group(V::format);
  __m512i dot[2][parts];
#pragma GCC unroll 2
  for (int part = 0; part < parts; ++part) {
    const __m512i whole = offset<V>(x.negative_sum);
    __m512i start = whole;
    if constexpr (parts == 2) {
      const __m512i low = offset<V>(x.negative_low);
      start = part == 0 ? low : _mm512_sub_epi32(whole, low);
    }
    dot[0][part] = dot[1][part] = start;
#pragma GCC unroll 8
    for (int quad = part * 8 / parts; quad < (part + 1) * 8 / parts; ++quad) {
      const __m512i values = broadcast_quad(q, quad);
      dot[0][part] = _mm512_dpbusd_epi32(dot[0][part], group.code[0][quad], values);
      dot[1][part] = _mm512_dpbusd_epi32(dot[1][part], group.code[1][quad], values);
    }
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[half][0]), group.scale[half][0]);
    if constexpr (parts == 2) value = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[half][1]), group.scale[half][1], value);
    __m512 sum = _mm512_fmadd_ps(value, _mm512_set1_ps(x.scale), _mm512_load_ps(sums + 16 * half));
    if constexpr (V::has_min) sum = _mm512_fmadd_ps(group.min[half], _mm512_set1_ps(x.sum), sum);
    _mm512_store_ps(sums + 16 * half, sum);
  }
}

template <typename V>
void multiply(const Byte* weights, std::int64_t units, std::int64_t k, const RowBlock& rows, const Output& out) {
  alignas(64) float sums[QuantizedRows::kBlock][kUnit];
  for (std::int64_t unit = 0; unit < units; ++unit) {
    clear(sums, rows.rows);
    const std::int8_t* q = rows.q;
    const ActivationGroup* x = rows.groups;
    for (std::int64_t record = 0; record < k / (V::shape.groups * kGroup); ++record) {
      Header header;
      prefetch_ahead<V::shape.header_bytes>(weights);
      decode_header<V>(weights, header);
      weights += V::shape.header_bytes;
      for (int g = 0; g < V::shape.groups; ++g, weights += V::shape.group_bytes) {
        prefetch_ahead<V::shape.group_bytes>(weights);
        Group group;
        decode_scales<V>(header, weights, group);
        decode_codes<V>(weights + V::shape.scale_bytes, group);
        for (int r = 0; r < rows.rows; ++r, q += kGroup, ++x) accumulate_group<V>(group, q, *x, sums[r]);
      }
    }
    store_unit(sums, rows.rows, unit, out);
  }
}

// Without the bf16 instruction: a register of pairs is split into even and odd k, whose products are exact.
struct SplitPair {
  explicit SplitPair(__m512i pairs) : even(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))), odd(upper(pairs)) {}
  static __m512 upper(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  __m512 operator()(__m512i values, __m512 sum) const {
    sum = _mm512_fmadd_ps(even, _mm512_castsi512_ps(_mm512_slli_epi32(values, 16)), sum);
    return _mm512_fmadd_ps(odd, upper(values), sum);
  }
  __m512 even, odd;
};

GemmKernel find(const PackedLayout& layout) {
  GemmKernel kernel = cpu_features().avx512_bf16 ? avx512_bf16_kernel() : multiply_bf16_units<SplitPair>;
  IntegerVariants::visit(layout, [&]<typename V>() { kernel = multiply<V>; });
  return kernel;
}

void quantize(const float* x, std::int8_t* q, ActivationGroup* group) {
  const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i largest = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(low), magnitude),
                                           _mm512_and_si512(_mm512_castps_si512(high), magnitude));
  const QuantizerScale scale = quantizer_scale(_mm512_reduce_max_epu32(largest));
  __m512i q_low = _mm512_setzero_si512(), q_high = q_low;
  if (scale.inverse != 0) {
    q_low = _mm512_cvtps_epi32(_mm512_mul_ps(low, _mm512_set1_ps(scale.inverse)));
    q_high = _mm512_cvtps_epi32(_mm512_mul_ps(high, _mm512_set1_ps(scale.inverse)));
  }
  _mm_store_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(q_low));
  _mm_store_si128(reinterpret_cast<__m128i*>(q + 16), _mm512_cvtepi32_epi8(q_high));
  const std::int32_t sum_low = _mm512_reduce_add_epi32(q_low), sum = sum_low + _mm512_reduce_add_epi32(q_high);
  *group = {scale.scale, scale.scale * static_cast<float>(sum), -sum, -sum_low};
}

void round_to_bf16(const float* x, std::uint16_t* out) {
  for (int i = 0; i < kGroup; i += 16) {
    const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(x + i));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(bits), _mm512_castsi512_ps(bits), _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                        _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet)));
  }
}

}  // namespace

const KernelSet& avx512_kernels() {
  static constexpr KernelSet kernels{find, quantize, round_to_bf16};
  return kernels;
}

}  // namespace outrider
