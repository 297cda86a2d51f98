// The row operations for avx512; every file of kernels is compiled once per ISA, in a namespace of its own.
#define OUTRIDER_OPS ops_avx512
#include "ops/simd_avx512.h"
// clang-format off: the kernels use the Vec above
#include "ops/math.h"
#include "ops/rows.h"
#include "ops/vocabulary.h"
#include "ops/kv.h"
#include "ops/attention_kernels.h"
#include "ops/attention.h"
#include "ops/table.h"
// clang-format on
