// One chunk of rows on its way through the layers.
#pragma once

#include <span>

#include "model/scratch.h"
#include "outrider/model.h"

namespace outrider {

// Below this many floats to go through, waking the other threads costs more than it saves.
constexpr std::int64_t kParallelFloats = 16384;

struct Row {
  int sequence;
  int number;  // among the sequence's pending rows
  std::int32_t token;
};

class Runner::Pass {
 public:
  // first_row: number of rows[0] in the whole forward pass. The rows have been appended to the cache.
  // features: [rows, hidden_size], of these rows; null if the model takes none.
  Pass(Runner&, KvCache&, std::span<const Row> rows, int first_row, const float* features);

  void run(const ForwardOutput&);

 private:
  void plan_rows();
  void plan_tiles();
  void rotate_angles();

  void embed();
  void project();
  void look_up(int row, float* out);
  // out = [norm(embedding), norm(feature)], 2 * hidden_size floats.
  void join(int row, float* out);
  void norm_first(int row);
  void attention_block(int layer);
  void mlp_block(int layer);
  void finish_projections(const LayerWeights&, int layer, int row);
  void attend(const LayerWeights&, int layer);
  void attend_tile(const LayerWeights&, int layer, const RowTile&, int kv_head, float* scratch);
  void copy_hidden(const ForwardOutput&, int layer);
  void logits(const ForwardOutput&);

  // x += projected (+ bias), then normed = norm(x), row by row; ``norm`` null: no norm follows.
  void add_and_norm(const std::vector<float>* bias, const std::vector<float>* norm);
  // out = norm(x), or x itself where the model has no norm.
  void norm(const std::vector<float>& weight, const float* x, float* out);
  // Prepares rows x [rows, k], stride ldx, for products with these matrices.
  void quantize(const float* x, std::int64_t ldx, std::int64_t k, std::initializer_list<const PackedMatrix*> matrices);
  template <typename F>
  void each_row(std::int64_t cost, F&& fn) {
    if (num_rows_ * cost < kParallelFloats)
      for (int row = 0; row < num_rows_; ++row) fn(row);
    else
      pool_.parallel_for(num_rows_, [&](std::int64_t row) { fn(static_cast<int>(row)); });
  }

  float* x(int row) { return scratch_.x.data() + std::ptrdiff_t{row} * hidden_; }
  float* normed(int row) { return scratch_.normed.data() + std::ptrdiff_t{row} * hidden_; }
  const float* feature(int row) const { return features_ + std::ptrdiff_t{row} * hidden_; }

  const Model& model_;
  const ModelShape& shape_;
  KvCache& cache_;
  ThreadPool& pool_;
  Scratch& scratch_;
  const Ops& ops_;
  Isa isa_;
  std::span<const Row> rows_;
  int first_row_;
  const float* features_;
  int num_rows_;
  int hidden_, q_size_, kv_size_, qkv_size_, inner_;
};

}  // namespace outrider
