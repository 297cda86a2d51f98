// From tokens, and features where there are any, to the residual stream and to what the first block's attention reads.
#include <algorithm>

#include "model/pass.h"

namespace outrider {

void Runner::Pass::embed() {
  switch (model_.fusion.kind) {
    case FusionKind::none:
      each_row(hidden_, [&](int row) {
        look_up(row, x(row));
        norm_first(row);
      });
      break;
    case FusionKind::attend:
      each_row(2 * hidden_, [&](int row) {
        float* joined = scratch_.normed.data() + std::ptrdiff_t{row} * 2 * hidden_;
        join(row, joined);
        std::copy_n(model_.fusion.norm_before_residual ? joined + hidden_ : feature(row), hidden_, x(row));
      });
      break;
    case FusionKind::project:
      project();
      break;
  }
}

void Runner::Pass::project() {
  const Fusion& fusion = model_.fusion;
  const int size = 2 * hidden_;
  float* joined = scratch_.joined.reserve(static_cast<std::size_t>(num_rows_) * size);
  each_row(size, [&](int row) { join(row, joined + std::ptrdiff_t{row} * size); });
  quantize(joined, size, size, {&fusion.matrix});
  const GemmTask out{&fusion.matrix, scratch_.x.data(), hidden_};
  gemm({&out, 1}, scratch_.quantized, pool_, isa_);
  each_row(hidden_, [&](int row) {
    if (!fusion.bias.empty()) ops_.add(fusion.bias.data(), hidden_, x(row));
    norm_first(row);
  });
}

void Runner::Pass::look_up(int row, float* out) {
  const std::int64_t token = rows_[row].token;
  model_.embedding.dequantize({&token, 1}, out);
}

void Runner::Pass::join(int row, float* out) {
  const Fusion& fusion = model_.fusion;
  look_up(row, out);
  std::copy_n(feature(row), hidden_, out + hidden_);
  if (!fusion.embed_norm.empty()) ops_.rms_norm(out, fusion.embed_norm.data(), shape_.rms_norm_eps, hidden_, out);
  if (!fusion.feature_norm.empty())
    ops_.rms_norm(out + hidden_, fusion.feature_norm.data(), shape_.rms_norm_eps, hidden_, out + hidden_);
}

void Runner::Pass::norm_first(int row) {
  if (!model_.layers.empty()) norm(model_.layers.front().input_norm, x(row), normed(row));
}

}  // namespace outrider
