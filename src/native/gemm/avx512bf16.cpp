// bf16 weights with AVX-512's own bf16 instruction, which takes both products of a pair at once.
#include "gemm/bf16_avx512.h"

#if !defined(__AVX512BF16__)
#error "compile with the flags of avx512.cpp and -mavx512bf16"
#endif

namespace outrider {
namespace {

struct DotPair {
  explicit DotPair(__m512i weights) : weights((__m512bh)weights) {}
  __m512 operator()(__m512i values, __m512 sum) const { return _mm512_dpbf16_ps(sum, weights, (__m512bh)values); }
  __m512bh weights;
};

}  // namespace

GemmKernel avx512_bf16_kernel() { return multiply_bf16_units<DotPair>; }

}  // namespace outrider
