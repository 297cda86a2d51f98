#include "model/pass.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace outrider {

Runner::Pass::Pass(Runner& runner, KvCache& cache, std::span<const Row> rows, int first_row, const float* features)
    : model_(*runner.model_),
      shape_(model_.shape),
      cache_(cache),
      pool_(runner.pool_),
      scratch_(*runner.scratch_),
      ops_(ops_for(runner.isa_)),
      isa_(runner.isa_),
      rows_(rows),
      first_row_(first_row),
      features_(features),
      num_rows_(static_cast<int>(rows.size())),
      hidden_(shape_.hidden_size),
      q_size_(shape_.num_heads * shape_.head_dim),
      kv_size_(shape_.num_kv_heads * shape_.head_dim),
      qkv_size_(q_size_ + 2 * kv_size_),
      inner_(shape_.intermediate_size) {
  const auto n = static_cast<std::size_t>(num_rows_);
  scratch_.x.reserve(n * hidden_);
  scratch_.normed.reserve(n * model_.first_inputs());
  scratch_.qkv.reserve(n * qkv_size_);
  scratch_.attended.reserve(n * q_size_);
  scratch_.gate_up.reserve(n * 2 * inner_);
  scratch_.projected.reserve(n * hidden_);
  scratch_.cosine.reserve(n * shape_.head_dim / 2);
  scratch_.sine.reserve(n * shape_.head_dim / 2);
}

void Runner::Pass::run(const ForwardOutput& output) {
  plan_rows();
  plan_tiles();
  rotate_angles();
  embed();
  const int layers = static_cast<int>(model_.layers.size());
  for (int layer = 0; layer < layers; ++layer) {
    copy_hidden(output, layer);
    attention_block(layer);
    mlp_block(layer);
  }
  copy_hidden(output, layers);
  logits(output);
}

void Runner::Pass::norm(const std::vector<float>& weight, const float* x, float* out) {
  if (weight.empty())
    std::copy_n(x, hidden_, out);
  else
    ops_.rms_norm(x, weight.data(), shape_.rms_norm_eps, hidden_, out);
}

void Runner::Pass::quantize(const float* x, std::int64_t ldx, std::int64_t k,
                            std::initializer_list<const PackedMatrix*> matrices) {
  ActivationForms forms;
  for (const PackedMatrix* matrix : matrices) forms.add(*matrix);
  scratch_.quantized.assign(x, ldx, num_rows_, k, forms, pool_, isa_);
}

void Runner::Pass::attention_block(int layer) {
  const LayerWeights& w = model_.layers[layer];
  quantize(scratch_.normed.data(), w.q.k(), w.q.k(), {&w.q, &w.k, &w.v});
  float* qkv = scratch_.qkv.data();
  const GemmTask tasks[] = {
      {&w.q, qkv, qkv_size_}, {&w.k, qkv + q_size_, qkv_size_}, {&w.v, qkv + q_size_ + kv_size_, qkv_size_}};
  gemm(tasks, scratch_.quantized, pool_, isa_);
  each_row(4 * qkv_size_, [&](int row) { finish_projections(w, layer, row); });
  attend(w, layer);
  quantize(scratch_.attended.data(), q_size_, q_size_, {&w.o});
  const GemmTask out{&w.o, scratch_.projected.data(), hidden_};
  gemm({&out, 1}, scratch_.quantized, pool_, isa_);
  add_and_norm(&w.o_bias, &w.post_attention_norm);
}

// Biases, norms of queries and keys, rotation; then the row's key and value go into the cache.
void Runner::Pass::finish_projections(const LayerWeights& w, int layer, int row) {
  float* q = scratch_.qkv.data() + std::ptrdiff_t{row} * qkv_size_;
  float* k = q + q_size_;
  float* v = k + kv_size_;
  const int head_dim = shape_.head_dim;
  if (!w.q_bias.empty()) ops_.add(w.q_bias.data(), q_size_, q);
  if (!w.k_bias.empty()) ops_.add(w.k_bias.data(), kv_size_, k);
  if (!w.v_bias.empty()) ops_.add(w.v_bias.data(), kv_size_, v);
  if (!w.q_norm.empty())
    for (float* head = q; head < k; head += head_dim)
      ops_.rms_norm(head, w.q_norm.data(), shape_.rms_norm_eps, head_dim, head);
  if (!w.k_norm.empty())
    for (float* head = k; head < v; head += head_dim)
      ops_.rms_norm(head, w.k_norm.data(), shape_.rms_norm_eps, head_dim, head);
  if (w.rope) {
    const std::ptrdiff_t angles = std::ptrdiff_t{row} * (head_dim / 2);
    ops_.rope(q, shape_.num_heads + shape_.num_kv_heads, head_dim, scratch_.cosine.data() + angles,
              scratch_.sine.data() + angles);
  }
  const std::int32_t slot = scratch_.places[row].slot;
  const std::int32_t tile = cache_.tiles(rows_[row].sequence)[slot / kTile];
  for (int head = 0; head < shape_.num_kv_heads; ++head)
    ops_.store_kv(k + head * head_dim, v + head * head_dim, cache_.shape().head, cache_.tile(layer, head, tile),
                  slot % kTile);
}

void Runner::Pass::mlp_block(int layer) {
  const LayerWeights& w = model_.layers[layer];
  quantize(scratch_.normed.data(), hidden_, hidden_, {&w.gate, &w.up});
  float* gate_up = scratch_.gate_up.data();
  const int stride = 2 * inner_;
  const GemmTask tasks[] = {{&w.gate, gate_up, stride}, {&w.up, gate_up + inner_, stride}};
  gemm(tasks, scratch_.quantized, pool_, isa_);
  // The activated row overwrites the gate's, and the down projection reads it from there.
  each_row(4 * inner_, [&](int row) {
    float* gate = gate_up + std::ptrdiff_t{row} * stride;
    float* up = gate + inner_;
    if (!w.gate_bias.empty()) ops_.add(w.gate_bias.data(), inner_, gate);
    if (!w.up_bias.empty()) ops_.add(w.up_bias.data(), inner_, up);
    ops_.swiglu(gate, up, inner_, gate);
  });
  quantize(gate_up, stride, inner_, {&w.down});
  const GemmTask out{&w.down, scratch_.projected.data(), hidden_};
  gemm({&out, 1}, scratch_.quantized, pool_, isa_);
  const bool last = layer + 1 == static_cast<int>(model_.layers.size());
  add_and_norm(&w.down_bias, last ? nullptr : &model_.layers[layer + 1].input_norm);
}

void Runner::Pass::add_and_norm(const std::vector<float>* bias, const std::vector<float>* norm) {
  each_row(2 * hidden_, [&](int row) {
    float* projected = scratch_.projected.data() + std::ptrdiff_t{row} * hidden_;
    if (!bias->empty()) ops_.add(bias->data(), hidden_, projected);
    ops_.add(projected, hidden_, x(row));
    if (norm != nullptr) ops_.rms_norm(x(row), norm->data(), shape_.rms_norm_eps, hidden_, normed(row));
  });
}

void Runner::Pass::copy_hidden(const ForwardOutput& output, int layer) {
  const std::size_t count = static_cast<std::size_t>(num_rows_) * hidden_;
  for (const auto& [wanted, memory] : output.hidden)
    if (wanted == layer)
      std::memcpy(memory + std::ptrdiff_t{first_row_} * hidden_, scratch_.x.data(), count * sizeof(float));
}

void Runner::Pass::logits(const ForwardOutput& output) {
  const auto begin = std::lower_bound(output.logit_rows.begin(), output.logit_rows.end(), first_row_);
  const auto end = std::lower_bound(begin, output.logit_rows.end(), first_row_ + num_rows_);
  const auto count = end - begin;
  if (count == 0) return;
  float* rows = scratch_.final_rows.reserve(static_cast<std::size_t>(count) * hidden_);
  for (std::ptrdiff_t i = 0; i < count; ++i) norm(model_.final_norm, x(begin[i] - first_row_), rows + i * hidden_);
  float* first = output.logits + (begin - output.logit_rows.begin()) * shape_.num_logits;
  gemm(model_.lm_head, rows, hidden_, count, first, shape_.num_logits, pool_, scratch_.quantized, isa_);
}

}  // namespace outrider
