// Closes a per-ISA file: the functions compiled in it, as a table.
#pragma once

#include "outrider/ops.h"

#define OUTRIDER_TEXT_OF(x) #x
#define OUTRIDER_TEXT(x) OUTRIDER_TEXT_OF(x)

namespace outrider::OUTRIDER_OPS {

extern const Ops kTable;
const Ops kTable{OUTRIDER_TEXT(OUTRIDER_OPS), rms_norm, rope, swiglu, add, store_kv, copy_kv, attention, top_k};

}  // namespace outrider::OUTRIDER_OPS
