// bf16 weights with AVX-512's own bf16 instruction, which takes both products of a pair at once.
#include "gemm/bf16_tiles.h"

#if !defined(__AVX512BF16__)
#error "compile with the flags of avx512.cpp and -mavx512bf16"
#endif

namespace outrider {
namespace {

struct DotPairs {
  static constexpr int kColumns = 16, kRows = 8;
  using Vector = __m512;
  static Vector load(const float* p) { return _mm512_load_ps(p); }
  static void store(float* p, Vector v) { _mm512_store_ps(p, v); }

  struct Pairs {
    explicit Pairs(const std::uint8_t* p) : weights((__m512bh)_mm512_load_si512(p)) {}
    Vector operator()(std::int32_t word, Vector sum) const {
      return _mm512_dpbf16_ps(sum, weights, (__m512bh)_mm512_set1_epi32(word));
    }
    __m512bh weights;
  };
};

}  // namespace

GemmKernel avx512_bf16_kernel() { return multiply_bf16<DotPairs>; }

}  // namespace outrider
