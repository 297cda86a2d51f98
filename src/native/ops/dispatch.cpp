#include <algorithm>
#include <stdexcept>
#include <string>

#include "outrider/ops.h"

namespace outrider {

#if defined(__x86_64__)
namespace ops_avx512 {
extern const Ops kTable;
}
namespace ops_avx2 {
extern const Ops kTable;
}
#endif
namespace ops_portable {
extern const Ops kTable;
}

const Ops& ops_for(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::amx:
    case Isa::avx512:
      return ops_avx512::kTable;
    case Isa::avx2:
      return ops_avx2::kTable;
#endif
    case Isa::portable:
      return ops_portable::kTable;
    default:
      throw std::invalid_argument("this build has no kernels for " + std::string(isa_name(isa)));
  }
}

std::size_t attention_scratch(const KvShape& shape, int group, int rows, int tail_slots) {
  constexpr int kMostLanes = 16;
  const int per_query = 1 + kMostLanes + shape.value_columns() + tail_slots + 2 * kTile;
  return static_cast<std::size_t>(std::min(rows, kAttentionRows)) * group * per_query;
}

}  // namespace outrider
