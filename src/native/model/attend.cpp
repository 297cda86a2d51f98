// Where the rows of a pass stand in their sequences, and attention over those.
#include <algorithm>
#include <cmath>

#include "model/pass.h"

namespace outrider {

void Runner::Pass::plan_rows() {
  scratch_.places.clear();
  scratch_.tails.clear();
  scratch_.tail_starts.clear();
  for (const Row& row : rows_) {
    scratch_.places.push_back(cache_.place(row.sequence, row.number));
    scratch_.tail_starts.push_back(scratch_.tails.size());
    cache_.append_tail(row.sequence, row.number, scratch_.tails);
  }
}

void Runner::Pass::plan_tiles() {
  // Smaller tiles read the keys more often, but from the cache; every thread should get one at least.
  int size = kAttentionRows;
  while (size > 4 && (num_rows_ + size - 1) / size * shape_.num_kv_heads < 2 * pool_.size()) size /= 2;
  scratch_.tiles.clear();
  for (int row = 0; row < num_rows_; ++row) {
    RowTile* last = scratch_.tiles.empty() ? nullptr : &scratch_.tiles.back();
    if (last != nullptr && last->sequence == rows_[row].sequence && last->count < size)
      ++last->count;
    else
      scratch_.tiles.push_back({rows_[row].sequence, row, 1});
  }
}

void Runner::Pass::rotate_angles() {
  const int half = shape_.head_dim / 2;
  for (int row = 0; row < num_rows_; ++row)
    for (int i = 0; i < half; ++i) {
      // The angle is rounded to float32, as in the reference: at long contexts that matters more than the cosine.
      const float angle = static_cast<float>(scratch_.places[row].position) * shape_.inverse_frequencies[i];
      const std::ptrdiff_t at = std::ptrdiff_t{row} * half + i;
      scratch_.cosine.data()[at] = static_cast<float>(std::cos(static_cast<double>(angle))) * shape_.rope_factor;
      scratch_.sine.data()[at] = static_cast<float>(std::sin(static_cast<double>(angle))) * shape_.rope_factor;
    }
}

void Runner::Pass::attend(const LayerWeights& w, int layer) {
  // The tails of a tile lie among its sequence's pending rows.
  int tail_slots = 0;
  for (const RowTile& tile : scratch_.tiles) tail_slots = std::max(tail_slots, cache_.pending(tile.sequence));
  const std::size_t floats =
      attention_scratch(cache_.shape().head, shape_.num_heads / shape_.num_kv_heads, kAttentionRows, tail_slots);
  for (Floats& scratch : scratch_.attention) scratch.reserve(floats);
  const auto tasks = static_cast<std::int64_t>(scratch_.tiles.size()) * shape_.num_kv_heads;
  pool_.parallel_for(
      tasks,
      [&](std::int64_t task, int thread) {
        attend_tile(w, layer, scratch_.tiles[static_cast<std::size_t>(task / shape_.num_kv_heads)],
                    static_cast<int>(task % shape_.num_kv_heads), scratch_.attention[thread].data());
      },
      ThreadPool::WithThread{});
}

void Runner::Pass::attend_tile(const LayerWeights& w, int layer, const RowTile& tile, int kv_head, float* scratch) {
  const int group = shape_.num_heads / shape_.num_kv_heads;
  const std::ptrdiff_t head = std::ptrdiff_t{kv_head} * group * shape_.head_dim;
  AttentionRow rows[kAttentionRows];
  for (int i = 0; i < tile.count; ++i) {
    const int row = tile.first_row + i;
    const RowPlace& place = scratch_.places[row];
    rows[i] = {
        .q = scratch_.qkv.data() + std::ptrdiff_t{row} * qkv_size_ + head,
        .out = scratch_.attended.data() + std::ptrdiff_t{row} * q_size_ + head,
        .tail = scratch_.tails.data() + scratch_.tail_starts[row],
        .first = w.window > 0 ? std::max(0, place.position + 1 - w.window) : 0,
        .dense = place.dense,
        .length = place.position + 1,
    };
  }
  const AttentionTask task{
      .shape = cache_.shape().head,
      .group = group,
      .scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)),
      .base = cache_.base(layer, kv_head),
      .tiles = cache_.tiles(tile.sequence).data(),
      .rows = rows,
      .num_rows = tile.count,
  };
  ops_.attention(task, scratch);
}

}  // namespace outrider
