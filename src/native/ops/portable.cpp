// The row operations for portable; every file of kernels is compiled once per ISA, in a namespace of its own.
#define OUTRIDER_OPS ops_portable
#include "ops/simd_portable.h"
// clang-format off: the kernels use the Vec above
#include "ops/math.h"
#include "ops/rows.h"
#include "ops/vocabulary.h"
#include "ops/kv.h"
#include "ops/attention_kernels.h"
#include "ops/attention.h"
#include "ops/table.h"
// clang-format on
