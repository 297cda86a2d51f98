// Attention of a few rows over their sequence (include one of simd_*.h, math.h and attention_kernels.h first).
//
// Keys are walked by position, in blocks of kBlock positions that start at multiples of kBlock; a running maximum
// rescales what was summed before (online softmax: Milakov and Gimelshein, 2018). Every row takes the same steps
// whichever way its keys are found: where all rows see a whole block in committed order they go through it together
// (`shared`), elsewhere each row goes on its own (`alone`), fetching the keys of pending ancestors by slot.
#pragma once

#include <cstddef>
#include <cstdint>

#include "outrider/ops.h"

namespace outrider::OUTRIDER_OPS {

constexpr int kBlockTiles = kBlock / kTile;
constexpr float kMinusInfinity = -__builtin_inff();

template <typename T>
class Attention {
 public:
  Attention(const AttentionTask& task, float* scratch)
      : task_(task), queries_(task.num_rows * task.group), columns_(task.shape.value_columns()) {
    best_ = scratch;
    total_ = best_ + queries_;
    sums_ = total_ + std::ptrdiff_t{queries_} * Vec::kLanes;
    tail_scores_ = sums_ + std::ptrdiff_t{queries_} * columns_;
    for (int i = 0; i < queries_; ++i) best_[i] = kMinusInfinity;
    for (std::ptrdiff_t i = 0; i < std::ptrdiff_t{queries_} * Vec::kLanes; ++i) total_[i] = 0.0f;
    for (std::ptrdiff_t i = 0; i < std::ptrdiff_t{queries_} * columns_; ++i) sums_[i] = 0.0f;
  }

  void run() {
    score_tails();
    int shared_first = 0, shared_last = task_.rows[0].dense / kBlock * kBlock;
    for (int r = 0; r < task_.num_rows; ++r) {
      const AttentionRow& row = task_.rows[r];
      const int first = (row.first + kBlock - 1) / kBlock * kBlock, last = row.dense / kBlock * kBlock;
      shared_first = first > shared_first ? first : shared_first;
      shared_last = last < shared_last ? last : shared_last;
    }
    if (shared_first > shared_last) shared_last = shared_first;
    for (int r = 0; r < task_.num_rows; ++r) alone(r, 0, shared_first);
    for (int block = shared_first; block < shared_last; block += kBlock) shared(block);
    for (int r = 0; r < task_.num_rows; ++r) alone(r, shared_last, task_.rows[r].length);
    finish();
  }

 private:
  struct Block {
    const T* keys[kBlockTiles];
    const T* values[kBlock];
    int first, last;  // positions within the block that are seen
  };

  const std::byte* tile(int slot) const {
    return task_.base + static_cast<std::size_t>(task_.tiles[slot / kTile]) * task_.shape.tile_bytes();
  }
  const T* value(int slot) const {
    return reinterpret_cast<const T*>(tile(slot) + task_.shape.key_bytes()) + std::ptrdiff_t{slot % kTile} * columns_;
  }
  const float* query(int i) const {
    return task_.rows[i / task_.group].q + std::ptrdiff_t{i % task_.group} * task_.shape.head_dim;
  }

  // Scores of every query against all tiles in which any tail lies: a tree's rows share most of them.
  void score_tails() {
    int lowest = INT32_MAX, highest = -1;
    for (int r = 0; r < task_.num_rows; ++r) {
      const AttentionRow& row = task_.rows[r];
      for (int i = 0; i < row.length - row.dense; ++i) {
        lowest = row.tail[i] < lowest ? row.tail[i] : lowest;
        highest = row.tail[i] > highest ? row.tail[i] : highest;
      }
    }
    if (highest < 0) return;
    tail_first_ = lowest / kTile * kTile;
    tail_stride_ = (highest / kTile + 1) * kTile - tail_first_;
    for (int slot = tail_first_; slot <= highest; slot += kTile) {
      const T* keys = reinterpret_cast<const T*>(tile(slot));
      each_chunk(0, queries_, [&](auto count, int i, const float* const* q) {
        score_tiles<T, count.value>(q, task_.shape.head_dim, task_.scale, &keys, 0, 1,
                                    tail_scores_ + i * std::ptrdiff_t{tail_stride_} + (slot - tail_first_),
                                    tail_stride_);
      });
    }
  }

  void shared(int start) {
    Block block;
    block.first = 0;
    block.last = kBlock;
    for (int t = 0; t < kBlockTiles; ++t) block.keys[t] = reinterpret_cast<const T*>(tile(start + t * kTile));
    for (int p = 0; p < kBlock; ++p) block.values[p] = value(start + p);
    each_chunk(0, queries_, [&](auto count, int i, const float* const* q) {
      alignas(64) float scores[count.value * kBlock];
      score_tiles<T, count.value>(q, task_.shape.head_dim, task_.scale, block.keys, 0, kBlockTiles, scores, kBlock);
      absorb<count.value>(block, i, scores);
    });
  }

  // Positions from … to-1 (as far as row r sees them), block by block.
  void alone(int r, int from, int to) {
    const AttentionRow& row = task_.rows[r];
    from = from > row.first ? from : row.first;
    to = to < row.length ? to : row.length;
    for (int start = from / kBlock * kBlock; start < to; start += kBlock) {
      Block block;
      block.first = from > start ? from - start : 0;
      block.last = to - start < kBlock ? to - start : kBlock;
      int dense = row.dense - start;
      dense = dense < 0 ? 0 : dense > block.last ? block.last : dense;
      const int first_tile = block.first / kTile, last_tile = (dense + kTile - 1) / kTile;
      for (int t = first_tile; t < last_tile; ++t) block.keys[t] = reinterpret_cast<const T*>(tile(start + t * kTile));
      for (int p = block.first; p < block.last; ++p)
        block.values[p] = value(p < dense ? start + p : row.tail[start + p - row.dense]);
      each_chunk(r * task_.group, (r + 1) * task_.group, [&](auto count, int i, const float* const* q) {
        alignas(64) float scores[count.value * kBlock];
        score_tiles<T, count.value>(q, task_.shape.head_dim, task_.scale, block.keys, first_tile, last_tile, scores,
                                    kBlock);
        for (int j = 0; j < count.value; ++j) {
          const float* tail_scores = tail_scores_ + (i + j) * std::ptrdiff_t{tail_stride_} - tail_first_;
          float* line = scores + j * kBlock;
          for (int p = 0; p < block.first; ++p) line[p] = kMinusInfinity;
          for (int p = dense > block.first ? dense : block.first; p < block.last; ++p)
            line[p] = tail_scores[row.tail[start + p - row.dense]];
          for (int p = block.last; p < kBlock; ++p) line[p] = kMinusInfinity;
        }
        absorb<count.value>(block, i, scores);
      });
    }
  }

  // Adds a block, whose scores are given, to the running softmax of queries first … first+NQ-1.
  template <int NQ>
  void absorb(const Block& block, int first, float* scores) {
    float rescale[NQ];
    for (int j = 0; j < NQ; ++j) {
      float* line = scores + j * kBlock;
      Vec highest = Vec::load(line);
      for (int p = Vec::kLanes; p < kBlock; p += Vec::kLanes) highest = max(highest, Vec::load(line + p));
      const float block_best = max_lanes(highest), best = best_[first + j];
      const float new_best = block_best > best ? block_best : best;
      best_[first + j] = new_best;
      Vec factor = exp(Vec::set(best - new_best));
      float lanes[Vec::kLanes];
      factor.store(lanes);
      rescale[j] = lanes[0];
      float* total = total_ + std::ptrdiff_t{first + j} * Vec::kLanes;
      Vec sum = Vec::load(total) * factor;
      for (int p = 0; p < kBlock; p += Vec::kLanes) {
        const Vec weight = exp(Vec::load(line + p) - Vec::set(new_best));
        weight.store(line + p);
        sum = sum + weight;
      }
      sum.store(total);
    }
    accumulate<T, NQ>(scores, rescale, block.values, block.first, block.last, columns_,
                      sums_ + std::ptrdiff_t{first} * columns_, columns_);
  }

  void finish() {
    for (int i = 0; i < queries_; ++i) {
      const float total = sum_lanes(Vec::load(total_ + std::ptrdiff_t{i} * Vec::kLanes));
      const int head_dim = task_.shape.head_dim;
      float* out = task_.rows[i / task_.group].out + std::ptrdiff_t{i % task_.group} * head_dim;
      write_columns(static_cast<const T*>(nullptr), sums_ + std::ptrdiff_t{i} * columns_, 1.0f / total, head_dim, out);
    }
  }

  // Calls fn(count, i, pointers to queries i … i+count-1) for queries first … last-1, count being a compile-time
  // number.
  template <typename F>
  void each_chunk(int first, int last, F&& fn) {
    for (int i = first; i < last; i += Vec::kQueries) {
      const int count = last - i < Vec::kQueries ? last - i : Vec::kQueries;
      const float* q[Vec::kQueries];
      for (int j = 0; j < count; ++j) q[j] = query(i + j);
      with_count<Vec::kQueries>(count, [&](auto number) { fn(number, i, q); });
    }
  }

  template <int N>
  struct Count {
    static constexpr int value = N;
  };

  template <int N, typename F>
  static void with_count(int count, F&& fn) {
    if constexpr (N > 1)
      if (count < N) return with_count<N - 1>(count, fn);
    fn(Count<N>{});
  }

  const AttentionTask& task_;
  int queries_, columns_;
  float* best_;         // [queries]
  float* total_;        // [queries][lanes], by position modulo the number of lanes
  float* sums_;         // [queries][columns]
  float* tail_scores_;  // [queries][tail_stride_], slots from tail_first_ on
  int tail_first_ = 0, tail_stride_ = 0;
};

inline void attention(const AttentionTask& task, float* scratch) {
  if (task.shape.type == KvType::bf16)
    Attention<std::uint16_t>(task, scratch).run();
  else
    Attention<float>(task, scratch).run();
}

}  // namespace outrider::OUTRIDER_OPS
