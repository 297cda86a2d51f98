#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "model/pass.h"

namespace outrider {
namespace {

// Rows that go through the layers together. More would only spread the scratch memory beyond the caches: at this number
// the weights' bytes are already read far faster than they are multiplied.
constexpr int kChunk = 256;

void check_tokens(std::span<const Segment> segments, int vocab_size) {
  if (segments.empty()) throw std::invalid_argument("a forward pass needs at least one segment");
  for (const Segment& segment : segments) {
    if (segment.tokens.empty()) throw std::invalid_argument("a segment needs at least one row");
    if (segment.tokens.size() != segment.parents.size())
      throw std::invalid_argument("a segment has " + std::to_string(segment.tokens.size()) + " tokens and " +
                                  std::to_string(segment.parents.size()) + " parents");
    for (std::int32_t token : segment.tokens)
      if (token < 0 || token >= vocab_size)
        throw std::invalid_argument("token " + std::to_string(token) + " is outside the vocabulary of " +
                                    std::to_string(vocab_size));
  }
}

void check_output(const ForwardOutput& output, std::size_t rows, std::size_t layers) {
  std::int32_t before = -1;
  for (std::int32_t row : output.logit_rows) {
    if (row <= before || row >= static_cast<std::int64_t>(rows))
      throw std::invalid_argument("the rows that need logits must be ascending rows of their segment");
    before = row;
  }
  for (const auto& [layer, memory] : output.hidden)
    if (layer < 0 || layer > static_cast<std::int64_t>(layers))
      throw std::invalid_argument("there are no hidden states after " + std::to_string(layer) + " layers");
}

}  // namespace

Runner::Runner(std::shared_ptr<const Model> model, ThreadPool& pool, Isa isa)
    : model_(std::move(model)), pool_(pool), isa_(isa), scratch_(std::make_unique<Scratch>()) {
  model_->check();
  scratch_->attention.resize(static_cast<std::size_t>(pool.size()));
}

Runner::~Runner() = default;

void Runner::forward(KvCache& cache, std::span<const Segment> segments, const ForwardOutput& output,
                     const float* features) {
  std::vector<NewRows> rows;
  std::vector<Row> flat;
  check_tokens(segments, model_->shape.vocab_size);
  if ((features != nullptr) != (model_->fusion.kind != FusionKind::none))
    throw std::invalid_argument("a model with fusion takes a feature for each row, and no other model takes any");
  for (const Segment& segment : segments) {
    rows.push_back({segment.sequence, segment.parents});
    const int pending = cache.pending(segment.sequence);
    for (std::size_t i = 0; i < segment.tokens.size(); ++i)
      flat.push_back({segment.sequence, pending + static_cast<int>(i), segment.tokens[i]});
  }
  check_output(output, flat.size(), model_->layers.size());
  cache.append(rows);
  try {
    for (std::size_t first = 0; first < flat.size(); first += kChunk) {
      const std::size_t count = std::min<std::size_t>(kChunk, flat.size() - first);
      const float* given = features == nullptr ? nullptr : features + first * model_->shape.hidden_size;
      Pass(*this, cache, std::span(flat).subspan(first, count), static_cast<int>(first), given).run(output);
    }
  } catch (...) {
    for (const Segment& segment : segments) cache.retract(segment.sequence, static_cast<int>(segment.tokens.size()));
    throw;
  }
}

}  // namespace outrider
