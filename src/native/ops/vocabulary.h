// What is asked of a row of logits (include one of simd_*.h and math.h first).
#pragma once

#include <cstdint>

namespace outrider::OUTRIDER_OPS {

// The sum of e^(x - top), in four vectors of partial sums: one order of additions for every row of n numbers.
inline float sum_of_exponentials(const float* x, std::int64_t n, float top) {
  constexpr int kParts = 4, kLanes = Vec::kLanes;
  Vec parts[kParts] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
  const Vec shift = Vec::set(top);
  std::int64_t i = 0;
  for (; i + kParts * kLanes <= n; i += kParts * kLanes)
    for (int part = 0; part < kParts; ++part) parts[part] = parts[part] + exp(Vec::load(x + i + part * kLanes) - shift);
  float total = sum_lanes((parts[0] + parts[1]) + (parts[2] + parts[3]));
  for (; i < n; ++i) total += __builtin_expf(x[i] - top);
  return total;
}

// Keeps the k best of what it is offered, best first. Equals stay in the order of arrival.
struct Best {
  std::int64_t* ids;
  float* values;
  int k;
  int size = 0;

  float bar() const { return size < k ? -__builtin_inff() : values[size - 1]; }

  void offer(std::int64_t id, float value) {
    int place = size < k ? size++ : k - 1;
    for (; place > 0 && values[place - 1] < value; --place) {
      values[place] = values[place - 1];
      ids[place] = ids[place - 1];
    }
    values[place] = value;
    ids[place] = id;
  }
};

// A block is looked into only if its largest number beats the k-th best so far; few do after the first ones.
inline void top_k(const float* x, std::int64_t n, int k, std::int64_t* ids, float* logprobs) {
  constexpr int kVectors = 4, kBlock = kVectors * Vec::kLanes;
  Best best{ids, logprobs, k};
  const auto look_into = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      if (x[i] > best.bar() || best.size < k) best.offer(i, x[i]);
  };
  std::int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    Vec highest = Vec::load(x + i);
    for (int part = 1; part < kVectors; ++part) highest = max(highest, Vec::load(x + i + part * Vec::kLanes));
    if (best.size < k || max_lanes(highest) > best.bar()) look_into(i, i + kBlock);
  }
  look_into(i, n);
  const float top = logprobs[0];
  const float norm = top + __builtin_logf(sum_of_exponentials(x, n, top));
  for (int place = 0; place < k; ++place) logprobs[place] -= norm;
}

}  // namespace outrider::OUTRIDER_OPS
