// Kernels for AVX2 with FMA and F16C. A register holds 8 columns, a quarter of a unit.
#include <immintrin.h>

#include <cstring>

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
inline void store(void* p, __m256i v) { _mm256_store_si256(static_cast<__m256i*>(p), v); }

// One group of 32 k of a unit, decoded into the first-level cache: codes in their order, [half][quad][64 bytes].
struct alignas(64) Group {
  Byte code[2][8][64];
  float scale[2][kUnit];  // [part of the group]
  float min[kUnit];
};

// Bits `place`, place + 1, … of each byte moved to bit 4.
template <int Place>
inline __m256i to_bit_4(__m256i v) {
  if constexpr (Place < 4) {
    return _mm256_slli_epi16(v, 4 - Place);
  } else {
    return _mm256_srli_epi16(v, Place - 4);
  }
}

template <typename V, int Quad>
inline void decode_quad(const Byte* codes, int half, Group& group) {
  const __m256i mask = _mm256_set1_epi8(15);
  for (int i = 0; i < 64; i += 32) {
    __m256i code = load(codes + (4 * half + Quad / 2) * 64 + i);
    code = _mm256_and_si256(Quad % 2 == 0 ? code : _mm256_srli_epi16(code, 4), mask);
    if constexpr (V::format == WeightFormat::int5) {
      const __m256i high = to_bit_4<Quad>(load(codes + 512 + half * 64 + i));
      code = _mm256_or_si256(code, _mm256_and_si256(high, _mm256_set1_epi8(16)));
    }
    if constexpr (V::format == WeightFormat::int6) {
      const __m256i high = to_bit_4<2 * (Quad % 4)>(load(codes + 512 + (2 * half + Quad / 4) * 64 + i));
      code = _mm256_or_si256(code, _mm256_and_si256(high, _mm256_set1_epi8(48)));
    }
    store(group.code[half][Quad] + i, code);
  }
}

template <typename V>
inline void decode_codes(const Byte* codes, Group& group) {
  for (int half = 0; half < 2; ++half) {
    if constexpr (V::format == WeightFormat::int8) {
      // Signed: maddubs would saturate on 8-bit codes, so these are multiplied by sign and magnitude.
      for (int i = 0; i < 512; i += 32) {
        store(&group.code[half][0][0] + i, _mm256_xor_si256(load(codes + half * 512 + i), _mm256_set1_epi8(-128)));
      }
    } else {
      decode_quad<V, 0>(codes, half, group);
      decode_quad<V, 1>(codes, half, group);
      decode_quad<V, 2>(codes, half, group);
      decode_quad<V, 3>(codes, half, group);
      decode_quad<V, 4>(codes, half, group);
      decode_quad<V, 5>(codes, half, group);
      decode_quad<V, 6>(codes, half, group);
      decode_quad<V, 7>(codes, half, group);
    }
  }
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

template <typename V>
inline void decode_scales(const Byte* header, const Byte* scales, Group& group) {
  for (int c = 0; c < kUnit; c += 8) {
    __m256 scale, min = _mm256_setzero_ps();
    if constexpr (V::scales == ScaleKind::f16) {
      scale = load_halves(scales + 2 * c);
      if constexpr (V::has_min) min = load_halves(scales + 2 * (kUnit + c));
    } else if constexpr (V::scales == ScaleKind::f32) {
      scale = _mm256_load_ps(reinterpret_cast<const float*>(scales + 4 * c));
      if constexpr (V::has_min) min = _mm256_load_ps(reinterpret_cast<const float*>(scales + 4 * (kUnit + c)));
    } else if constexpr (V::has_min) {
      const __m256 negative_dmin = _mm256_xor_ps(load_halves(header + 2 * (kUnit + c)), _mm256_set1_ps(-0.0f));
      scale = _mm256_mul_ps(load_halves(header + 2 * c), load_u8(scales + c));
      min = _mm256_mul_ps(negative_dmin, load_u8(scales + kUnit + c));
    } else {
      const __m256 d = load_halves(header + 2 * c);
      scale = _mm256_mul_ps(d, load_i8(scales + c));
      _mm256_store_ps(group.scale[1] + c, _mm256_mul_ps(d, load_i8(scales + kUnit + c)));
    }
    _mm256_store_ps(group.scale[0] + c, scale);
    if constexpr (V::has_min) _mm256_store_ps(group.min + c, min);
  }
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

// Eight columns' exact dot products over quads First … Last - 1. code: the first quad's 32 bytes.
template <typename V, int First, int Last>
inline __m256i dot_product(const Byte* code, const __m256i* values, __m256i start) {
  constexpr int step = pairs_in_16_bits(V::format) < Last - First ? pairs_in_16_bits(V::format) : Last - First;
#pragma GCC unroll 8
  for (int quad = First; quad < Last; quad += step) {
    __m256i pairs = pair_products<V>(load(code + quad * 64), values[quad]);
#pragma GCC unroll 8
    for (int i = 1; i < step; ++i) {
      pairs = _mm256_add_epi16(pairs, pair_products<V>(load(code + (quad + i) * 64), values[quad + i]));
    }
    start = _mm256_add_epi32(start, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  return start;
}

template <typename V>
inline void accumulate_group(const Group& group, const std::int8_t* q, const ActivationGroup& x, float* sums) {
  // int8 codes were made signed; the others still carry their offset.
  constexpr int zero = V::format == WeightFormat::int8 ? 0 : V::zero;
  constexpr int parts = scales_per_group(V::format);
  __m256i values[8];
#pragma GCC unroll 8
  for (int quad = 0; quad < 8; ++quad) {
    std::int32_t word;
    std::memcpy(&word, q + 4 * quad, 4);
    values[quad] = _mm256_set1_epi32(word);
  }
  const std::int32_t low = zero * x.negative_low, whole = zero * x.negative_sum;
  for (int c = 0; c < kUnit; c += 8) {
    const Byte* code = group.code[c / 16][0] + (c % 16) * 4;
    __m256 value;
    if constexpr (parts == 1) {
      const __m256i dot = dot_product<V, 0, 8>(code, values, _mm256_set1_epi32(whole));
      value = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), _mm256_load_ps(group.scale[0] + c));
    } else {
      const __m256i first = dot_product<V, 0, 4>(code, values, _mm256_set1_epi32(low));
      const __m256i second = dot_product<V, 4, 8>(code, values, _mm256_set1_epi32(whole - low));
      value = _mm256_mul_ps(_mm256_cvtepi32_ps(first), _mm256_load_ps(group.scale[0] + c));
      value = _mm256_fmadd_ps(_mm256_cvtepi32_ps(second), _mm256_load_ps(group.scale[1] + c), value);
    }
    __m256 sum = _mm256_fmadd_ps(value, _mm256_set1_ps(x.scale), _mm256_load_ps(sums + c));
    if constexpr (V::has_min) sum = _mm256_fmadd_ps(_mm256_load_ps(group.min + c), _mm256_set1_ps(x.sum), sum);
    _mm256_store_ps(sums + c, sum);
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
      const Byte* header = weights;
      prefetch_ahead<V::shape.header_bytes>(weights);
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

// Eight columns of one group; weights and activations are pairs of k.
inline __m256 accumulate_bf16(const Byte* weights, const std::uint16_t* x, __m256 sum) {
  const __m256i odd_mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  for (int pair = 0; pair < 16; ++pair) {
    const __m256i both = load(weights + pair * 64);
    const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(both, odd_mask));
    std::uint32_t values;
    std::memcpy(&values, x + 2 * pair, 4);
    sum = _mm256_fmadd_ps(even, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(values << 16))), sum);
    sum = _mm256_fmadd_ps(odd, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(values & 0xffff0000u))), sum);
  }
  return sum;
}

void multiply_bf16(const Byte* weights, std::int64_t units, std::int64_t k, const RowBlock& rows, const Output& out) {
  constexpr int group_bytes = 2 * kUnit * kGroup;
  alignas(64) float sums[QuantizedRows::kBlock][kUnit];
  for (std::int64_t unit = 0; unit < units; ++unit) {
    clear(sums, rows.rows);
    const std::uint16_t* x = rows.bf16;
    for (std::int64_t g = 0; g < k / kGroup; ++g, weights += group_bytes) {
      prefetch_ahead<group_bytes>(weights);
      for (int r = 0; r < rows.rows; ++r, x += kGroup) {
        for (int c = 0; c < kUnit; c += 8) {
          const Byte* columns = weights + c / 16 * 1024 + (c % 16) * 4;
          _mm256_store_ps(sums[r] + c, accumulate_bf16(columns, x, _mm256_load_ps(sums[r] + c)));
        }
      }
    }
    store_unit(sums, rows.rows, unit, out);
  }
}

GemmKernel find(const PackedLayout& layout) {
  GemmKernel kernel = multiply_bf16;
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
