// Kernels for AVX-512 with VNNI. A register holds 16 columns; both halves of a unit share each broadcast activation.
#include <immintrin.h>

#include <cstring>

#include "gemm/bf16_tiles.h"
#include "gemm/decode_avx512.h"

#if !defined(__AVX512VNNI__) || !defined(__AVX512BW__)
#error "compile with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma -mf16c"
#endif

namespace outrider {
namespace {

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
  constexpr int parts = scales_per_group(V::format), quads = 8 / parts;
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
    for (int i = 0; i < quads; ++i) {
      const int quad = part * quads + i;
      const __m512i values = broadcast_quad(q, quad);
      dot[0][part] = _mm512_dpbusd_epi32(dot[0][part], group.code[0][quad], values);
      dot[1][part] = _mm512_dpbusd_epi32(dot[1][part], group.code[1][quad], values);
    }
  }
  accumulate_dots<V>(group, dot, x, sums);
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

// bf16 without its instruction: a register of pairs is split into even and odd k, whose products are exact.
struct SplitPairs {
  static constexpr int kColumns = 16, kRows = 8;
  using Vector = __m512;
  static Vector load(const float* p) { return _mm512_load_ps(p); }
  static void store(float* p, Vector v) { _mm512_store_ps(p, v); }
  static Vector even(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
  static Vector odd(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }

  struct Pairs {
    explicit Pairs(const Byte* p) : weights(_mm512_load_si512(p)) {}
    Vector operator()(std::int32_t word, Vector sum) const {
      const __m512i values = _mm512_set1_epi32(word);
      sum = _mm512_fmadd_ps(even(weights), even(values), sum);
      return _mm512_fmadd_ps(odd(weights), odd(values), sum);
    }
    __m512i weights;
  };
};

GemmKernel find(const PackedLayout& layout) {
  GemmKernel kernel = cpu_features().avx512_bf16 ? avx512_bf16_kernel() : multiply_bf16<SplitPairs>;
  IntegerVariants::visit(layout, [&]<typename V>() { kernel = multiply<V>; });
  return kernel;
}

void quantize(const float* x, std::int8_t* q, ActivationGroup* group) {
  const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i largest = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(low), magnitude),
                                           _mm512_and_si512(_mm512_castps_si512(high), magnitude));
  const QuantizerScale scale = quantizer_scale(_mm512_reduce_max_epu32(largest));
  __m256i codes = _mm256_setzero_si256();
  if (scale.inverse != 0) {
    const __m512 inverse = _mm512_set1_ps(scale.inverse);
    const __m128i q_low = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)));
    const __m128i q_high = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(high, inverse)));
    codes = _mm256_set_m128i(q_high, q_low);
  }
  _mm256_store_si256(reinterpret_cast<__m256i*>(q), codes);
  // Sums of four codes a lane; then of the four lanes of either half.
  __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), codes);
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xb1));
  const std::int32_t sum_low = _mm256_extract_epi32(sums, 0), sum = sum_low + _mm256_extract_epi32(sums, 4);
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
