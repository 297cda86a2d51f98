// Kernels for AVX2 with FMA and F16C. A register holds 8 columns, a quarter of a unit.
#include <immintrin.h>

#include <cstring>
#include <utility>

#include "gemm/bf16_tiles.h"
#include "gemm/half.h"
#include "gemm/kernels.h"
#include "gemm/variants.h"

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "compile with -mavx2 -mfma -mf16c"
#endif

namespace outrider {
namespace {

using Byte = std::uint8_t;

constexpr int kPrefetchBytes = 4096;

template <int Bytes>
inline void prefetch_ahead(const Byte* p) {
  for (int i = 0; i < Bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + kPrefetchBytes + i), _MM_HINT_T0);
}

inline __m256i load(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }
// One group of 32 k of eight columns, in registers. codes, scales: where the octet's own begin.
struct Octet {
  __m256i code[8];  // [quad]
  __m256 scale[2];  // [part of the group]
  __m256 min;
};

// Bits `Place`, Place + 1, … of each byte moved to bit 4.
template <int Place>
inline __m256i to_bit_4(__m256i v) {
  if constexpr (Place < 4) {
    return _mm256_slli_epi16(v, 4 - Place);
  } else {
    return _mm256_srli_epi16(v, Place - 4);
  }
}

template <typename V, int Quad>
inline __m256i decode_quad(const Byte* codes, int half) {
  if constexpr (V::format == WeightFormat::int8) {
    // Signed: maddubs would saturate on 8-bit codes, so these are multiplied by sign and magnitude.
    return _mm256_xor_si256(load(codes + (8 * half + Quad) * 64), _mm256_set1_epi8(-128));
  }
  __m256i code = load(codes + (4 * half + Quad / 2) * 64);
  code = _mm256_and_si256(Quad % 2 == 0 ? code : _mm256_srli_epi16(code, 4), _mm256_set1_epi8(15));
  if constexpr (V::format == WeightFormat::int5) {
    const __m256i high = to_bit_4<Quad>(load(codes + 512 + half * 64));
    code = _mm256_or_si256(code, _mm256_and_si256(high, _mm256_set1_epi8(16)));
  }
  if constexpr (V::format == WeightFormat::int6) {
    const __m256i high = to_bit_4<2 * (Quad % 4)>(load(codes + 512 + (2 * half + Quad / 4) * 64));
    code = _mm256_or_si256(code, _mm256_and_si256(high, _mm256_set1_epi8(48)));
  }
  return code;
}

inline __m256 load_halves(const Byte* p) {
  return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m256 load_u8(const Byte* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline __m256 load_i8(const Byte* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// The octet of columns c … c + 7.
template <typename V>
inline Octet decode_octet(const Byte* header, const Byte* scales, int c) {
  Octet octet;
  if constexpr (V::scales == ScaleKind::f16) {
    octet.scale[0] = load_halves(scales + 2 * c);
    if constexpr (V::has_min) octet.min = load_halves(scales + 2 * (kUnit + c));
  } else if constexpr (V::scales == ScaleKind::f32) {
    octet.scale[0] = _mm256_load_ps(reinterpret_cast<const float*>(scales + 4 * c));
    if constexpr (V::has_min) octet.min = _mm256_load_ps(reinterpret_cast<const float*>(scales + 4 * (kUnit + c)));
  } else if constexpr (V::has_min) {
    const __m256 negative_dmin = _mm256_xor_ps(load_halves(header + 2 * (kUnit + c)), _mm256_set1_ps(-0.0f));
    octet.scale[0] = _mm256_mul_ps(load_halves(header + 2 * c), load_u8(scales + c));
    octet.min = _mm256_mul_ps(negative_dmin, load_u8(scales + kUnit + c));
  } else {
    const __m256 d = load_halves(header + 2 * c);
    octet.scale[0] = _mm256_mul_ps(d, load_i8(scales + c));
    octet.scale[1] = _mm256_mul_ps(d, load_i8(scales + kUnit + c));
  }
  const Byte* codes = scales + V::shape.scale_bytes + (c % 16) * 4;
  [&]<int... Quads>(std::integer_sequence<int, Quads...>) {
    ((octet.code[Quads] = decode_quad<V, Quads>(codes, c / 16)), ...);
  }(std::make_integer_sequence<int, 8>{});
  return octet;
}

inline __m256i broadcast_quad(const std::int8_t* q, int quad) {
  std::int32_t word;
  std::memcpy(&word, q + 4 * quad, 4);
  return _mm256_set1_epi32(word);
}

// How many products of pairs of codes and activations (at most 127 each) fit in 16 signed bits.
constexpr int pairs_in_16_bits(WeightFormat format) {
  switch (format) {
    case WeightFormat::int4:
      return 8;  // 8 * 2 * 15 * 127 = 30480
    case WeightFormat::int5:
      return 4;  // 4 * 2 * 31 * 127 = 31496
    case WeightFormat::int6:
      return 2;  // 2 * 2 * 63 * 127 = 32004
    default:
      return 1;  // 2 * 128 * 127 = 32512, of magnitudes
  }
}

template <typename V>
inline __m256i pair_products(__m256i code, __m256i values) {
  if constexpr (V::format == WeightFormat::int8) {
    return _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(values, code));
  } else {
    return _mm256_maddubs_epi16(code, values);
  }
}

// The octet's exact dot products over quads First … Last - 1, and start.
template <typename V, int First, int Last>
inline __m256i dot_product(const Octet& octet, const std::int8_t* q, __m256i start) {
  constexpr int step = pairs_in_16_bits(V::format) < Last - First ? pairs_in_16_bits(V::format) : Last - First;
#pragma GCC unroll 8
  for (int quad = First; quad < Last; quad += step) {
    __m256i pairs = pair_products<V>(octet.code[quad], broadcast_quad(q, quad));
#pragma GCC unroll 8
    for (int i = 1; i < step; ++i) {
      pairs = _mm256_add_epi16(pairs, pair_products<V>(octet.code[quad + i], broadcast_quad(q, quad + i)));
    }
    start = _mm256_add_epi32(start, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  return start;
}

// Adds a group's products to the octet's eight sums of one row.
template <typename V>
inline void accumulate_octet(const Octet& octet, const std::int8_t* q, const ActivationGroup& x, float* sums) {
  // int8 codes were made signed; the others still carry their offset.
  constexpr int zero = V::format == WeightFormat::int8 ? 0 : V::zero;
  __m256 value;
  if constexpr (scales_per_group(V::format) == 1) {
    const __m256i dot = dot_product<V, 0, 8>(octet, q, _mm256_set1_epi32(zero * x.negative_sum));
    value = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), octet.scale[0]);
  } else {
    const std::int32_t low = zero * x.negative_low, high = zero * x.negative_sum - low;
    const __m256i first = dot_product<V, 0, 4>(octet, q, _mm256_set1_epi32(low));
    const __m256i second = dot_product<V, 4, 8>(octet, q, _mm256_set1_epi32(high));
    value = _mm256_mul_ps(_mm256_cvtepi32_ps(first), octet.scale[0]);
    value = _mm256_fmadd_ps(_mm256_cvtepi32_ps(second), octet.scale[1], value);
  }
  __m256 sum = _mm256_fmadd_ps(value, _mm256_set1_ps(x.scale), _mm256_load_ps(sums));
  if constexpr (V::has_min) sum = _mm256_fmadd_ps(octet.min, _mm256_set1_ps(x.sum), sum);
  _mm256_store_ps(sums, sum);
}

template <typename V>
void multiply(const Byte* weights, std::int64_t units, std::int64_t k, const RowBlock& rows, const Output& out) {
  alignas(64) float sums[QuantizedRows::kBlock][kUnit];
  for (std::int64_t unit = 0; unit < units; ++unit) {
    clear(sums, rows.rows);
    const std::int8_t* q = rows.q;
    const ActivationGroup* x = rows.groups;
    for (std::int64_t record = 0; record < k / (V::shape.groups * kGroup); ++record) {
      const Byte* header = weights;
      prefetch_ahead<V::shape.header_bytes>(weights);
      weights += V::shape.header_bytes;
      for (int g = 0; g < V::shape.groups; ++g, weights += V::shape.group_bytes) {
        prefetch_ahead<V::shape.group_bytes>(weights);
        for (int c = 0; c < kUnit; c += 8) {
          const Octet octet = decode_octet<V>(header, weights, c);
          for (int r = 0; r < rows.rows; ++r) accumulate_octet<V>(octet, q + r * kGroup, x[r], sums[r] + c);
        }
        q += rows.rows * kGroup;
        x += rows.rows;
      }
    }
    store_unit(sums, rows.rows, unit, out);
  }
}

// A register of pairs is split into even and odd k, whose products are exact.
struct SplitPairs {
  static constexpr int kColumns = 8, kRows = 4;
  using Vector = __m256;
  static Vector load(const float* p) { return _mm256_load_ps(p); }
  static void store(float* p, Vector v) { _mm256_store_ps(p, v); }
  static Vector even(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
  static Vector odd(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }

  struct Pairs {
    explicit Pairs(const Byte* p) : weights(_mm256_load_si256(reinterpret_cast<const __m256i*>(p))) {}
    Vector operator()(std::int32_t word, Vector sum) const {
      const __m256i values = _mm256_set1_epi32(word);
      sum = _mm256_fmadd_ps(even(weights), even(values), sum);
      return _mm256_fmadd_ps(odd(weights), odd(values), sum);
    }
    __m256i weights;
  };
};

GemmKernel find(const PackedLayout& layout) {
  GemmKernel kernel = multiply_bf16<SplitPairs>;
  IntegerVariants::visit(layout, [&]<typename V>() { kernel = multiply<V>; });
  return kernel;
}

inline std::uint32_t largest_lane(__m256i v) {
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(m));
}

inline std::int32_t sum_of_lanes(__m256i v) {
  __m128i m = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_add_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_add_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return _mm_cvtsi128_si32(m);
}

void quantize(const float* x, std::int8_t* q, ActivationGroup* group) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i largest = _mm256_setzero_si256();
  for (int i = 0; i < kGroup; i += 8) {
    largest = _mm256_max_epu32(largest, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), magnitude));
  }
  const QuantizerScale scale = quantizer_scale(largest_lane(largest));
  __m256i value[4] = {};
  if (scale.inverse != 0) {
    for (int i = 0; i < 4; ++i) {
      value[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(scale.inverse)));
    }
  }
  const __m256i words_low = _mm256_packs_epi32(value[0], value[1]), words_high = _mm256_packs_epi32(value[2], value[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // undoes the packs' interleaving of lanes
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words_low, words_high), order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), bytes);
  const std::int32_t low = sum_of_lanes(_mm256_add_epi32(value[0], value[1]));
  const std::int32_t sum = low + sum_of_lanes(_mm256_add_epi32(value[2], value[3]));
  *group = {scale.scale, scale.scale * static_cast<float>(sum), -sum, -low};
}

void round_to_bf16(const float* x, std::uint16_t* out) {
  for (int i = 0; i < kGroup; ++i) out[i] = float_to_bf16(x[i]);
}

}  // namespace

const KernelSet& avx2_kernels() {
  static constexpr KernelSet kernels{find, quantize, round_to_bf16};
  return kernels;
}

}  // namespace outrider
