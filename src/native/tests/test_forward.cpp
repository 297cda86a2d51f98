// The forward pass over a small random model: a token's logits alone and in company, and what is refused.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "outrider/errors.h"
#include "outrider/model.h"
#include "tests/check.h"

namespace outrider {
namespace {

using Ints = std::vector<std::int32_t>;

constexpr int kVocab = 50, kHidden = 64, kHeads = 4, kKvHeads = 2, kHeadDim = 16, kInner = 96;

struct Maker {
  std::mt19937 random{11};
  ThreadPool pool{1};

  PackedMatrix matrix(WeightFormat format, int n, int k) {
    std::normal_distribution<float> normal(0.0f, 1.0f / std::sqrt(static_cast<float>(k)));
    std::vector<float> values(static_cast<std::size_t>(n * k));
    for (float& value : values) value = normal(random);
    return quantize_weights(format, FloatType::f32, values.data(), n, k, {}, pool).matrix;
  }
  std::vector<float> vector(int n, float mean) {
    std::normal_distribution<float> normal(mean, 0.1f);
    std::vector<float> values(static_cast<std::size_t>(n));
    for (float& value : values) value = normal(random);
    return values;
  }
};

std::shared_ptr<const Model> make_model(WeightFormat format, FusionKind kind) {
  Maker make;
  auto model = std::make_shared<Model>();
  model->shape = {kVocab, kHidden, kHeads, kKvHeads, kHeadDim, kInner, kVocab, 1e-5f, {}, 1.0f};
  for (int i = 0; i < kHeadDim / 2; ++i)
    model->shape.inverse_frequencies.push_back(std::pow(10000.0f, -2.0f * static_cast<float>(i) / kHeadDim));
  model->embedding = model->lm_head = make.matrix(format, kVocab, kHidden);
  model->fusion.kind = kind;
  if (kind == FusionKind::project) {
    model->fusion.matrix = make.matrix(format, kHidden, 2 * kHidden);
    model->fusion.bias = make.vector(kHidden, 0);
  } else {
    model->final_norm = make.vector(kHidden, 1);
  }
  if (kind == FusionKind::attend) {
    model->fusion.embed_norm = make.vector(kHidden, 1);
    model->fusion.feature_norm = make.vector(kHidden, 1);
  }
  for (int layer = 0; layer < 2; ++layer) {
    LayerWeights w;
    const int inputs = layer == 0 ? model->first_inputs() : kHidden;
    if (layer == 1 || kind == FusionKind::none) w.input_norm = make.vector(kHidden, 1);
    w.post_attention_norm = make.vector(kHidden, 1);
    w.q = make.matrix(format, kHeads * kHeadDim, inputs);
    w.k = make.matrix(format, kKvHeads * kHeadDim, inputs);
    w.v = make.matrix(format, kKvHeads * kHeadDim, inputs);
    w.o = make.matrix(format, kHidden, kHeads * kHeadDim);
    w.gate = make.matrix(format, kInner, kHidden);
    w.up = make.matrix(format, kInner, kHidden);
    w.down = make.matrix(format, kHidden, kInner);
    if (layer == 1) {
      w.q_norm = make.vector(kHeadDim, 1);
      w.k_norm = make.vector(kHeadDim, 1);
      w.v_bias = make.vector(kKvHeads * kHeadDim, 0);
      w.down_bias = make.vector(kHidden, 0);
      w.window = 20;
    }
    model->layers.push_back(std::move(w));
  }
  return model;
}

struct Fixture {
  Fixture(WeightFormat format, FusionKind kind, int threads, Isa isa)
      : pool(threads),
        cache({2, kKvHeads, {KvType::bf16, kHeadDim}, 30, 16, 200}),
        runner(make_model(format, kind), pool, isa),
        takes_features(kind != FusionKind::none),
        isa(isa) {}

  // Forwards one segment and returns the logits of all its rows.
  std::vector<float> forward(int sequence, const Ints& tokens, const Ints& parents) {
    Ints rows(tokens.size());
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::int32_t>(i);
    std::vector<float> logits(tokens.size() * kVocab), hidden(tokens.size() * kHidden);
    const Segment segment{sequence, tokens, parents};
    // A token has the same feature wherever it stands.
    std::vector<float> features;
    for (std::int32_t token : tokens)
      for (int i = 0; i < kHidden; ++i) features.push_back(std::sin(static_cast<float>(token * kHidden + i)));
    runner.forward(cache, {&segment, 1}, {rows, logits.data(), {{0, hidden.data()}, {2, hidden.data()}}},
                   takes_features ? features.data() : nullptr);
    for (float value : logits) CHECK(std::isfinite(value));
    return logits;
  }
  std::vector<float> chain(int sequence, const Ints& tokens) {
    Ints parents(tokens.size()), rows(tokens.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      parents[i] = static_cast<std::int32_t>(i) - 1;
      rows[i] = static_cast<std::int32_t>(i);
    }
    auto logits = forward(sequence, tokens, parents);
    cache.commit(sequence, rows, ops_for(isa));
    return logits;
  }

  ThreadPool pool;
  KvCache cache;
  Runner runner;
  bool takes_features;
  Isa isa;
};

bool same(const float* a, const float* b, std::size_t rows) {
  return std::memcmp(a, b, rows * kVocab * sizeof(float)) == 0;
}

void company_changes_nothing(WeightFormat format, FusionKind kind, Isa isa) {
  Ints text;
  for (int i = 0; i < 75; ++i) text.push_back(i * 7 % kVocab);
  Fixture single(format, kind, 1, isa);
  const int s = single.cache.open();
  std::vector<float> expected;
  for (std::int32_t token : text) {
    const auto row = single.chain(s, {token});
    expected.insert(expected.end(), row.begin(), row.end());
  }
  Fixture other(format, kind, 3, isa);
  for (std::size_t chunk : {std::size_t{1}, std::size_t{3}, std::size_t{17}, std::size_t{64}}) {
    const int t = other.cache.open();
    for (std::size_t i = 0; i < text.size(); i += chunk) {
      const std::size_t count = std::min(chunk, text.size() - i);
      const auto logits = other.chain(
          t, {text.begin() + static_cast<std::ptrdiff_t>(i), text.begin() + static_cast<std::ptrdiff_t>(i + count)});
      CHECK(same(logits.data(), expected.data() + i * kVocab, count));
    }
    other.cache.close(t);
  }
  // The text's next three tokens as rows 1, 4 and 5 of a tree.
  const int t = other.cache.open();
  other.chain(t, {text.begin(), text.begin() + 30});
  const auto tree = other.forward(t, {9, text[30], 8, 7, text[31], text[32]}, {-1, -1, 1, 0, 1, 4});
  for (auto [row, position] : {std::pair{1, 30}, {4, 31}, {5, 32}})
    CHECK(same(tree.data() + row * kVocab, expected.data() + position * kVocab, 1));
  other.cache.commit(t, Ints{1, 4, 5}, ops_for(isa));
  const auto next = other.chain(t, {text[33], text[34]});
  CHECK(same(next.data(), expected.data() + 33 * kVocab, 2));
}

void refusals_change_nothing() {
  Fixture f(WeightFormat::bf16, FusionKind::none, 1, Isa::portable);
  const int s = f.cache.open();
  f.chain(s, {1, 2, 3});
  CHECK(test::throws<std::invalid_argument>([&] { f.forward(s, {kVocab}, {-1}); }));
  CHECK(test::throws<std::invalid_argument>([&] { f.forward(s, {-1}, {-1}); }));
  CHECK(test::throws<std::invalid_argument>([&] { f.forward(s, {1, 2}, {-1}); }));
  CHECK(test::throws<std::invalid_argument>([&] { f.forward(s, {}, {}); }));
  CHECK(test::throws<KvCacheFull>([&] { f.forward(s, Ints(500, 1), Ints(500, -1)); }));
  const Ints tokens{1}, parents{-1}, rows{1};
  std::vector<float> logits(kVocab);
  const Segment segment{s, tokens, parents};
  CHECK(test::throws<std::invalid_argument>(
      [&] { f.runner.forward(f.cache, {&segment, 1}, {rows, logits.data(), {}}); }));
  f.takes_features = true;
  CHECK(test::throws<std::invalid_argument>([&] { f.chain(s, {1}); }));
  CHECK(f.cache.length(s) == 3 && f.cache.pending(s) == 0);
  f.cache.check_integrity();
  Fixture head(WeightFormat::bf16, FusionKind::attend, 1, Isa::portable);
  head.takes_features = false;
  CHECK(test::throws<std::invalid_argument>([&] { head.chain(head.cache.open(), {1}); }));
}

template <typename F>
bool refused(FusionKind kind, F&& spoil) {
  Model model = *make_model(WeightFormat::bf16, kind);
  model.check();
  spoil(model);
  return test::throws<std::invalid_argument>([&] { model.check(); });
}

void models_that_do_not_fit_are_refused() {
  CHECK(refused(FusionKind::none, [](Model& m) { m.layers[1].q_norm.pop_back(); }));
  CHECK(refused(FusionKind::none, [](Model& m) { m.layers[1].input_norm.clear(); }));
  CHECK(refused(FusionKind::none, [](Model& m) { m.shape.num_logits = kVocab + 1; }));
  CHECK(refused(FusionKind::none, [](Model& m) { m.fusion.kind = FusionKind::attend; }));
  CHECK(refused(FusionKind::project, [](Model& m) { m.fusion.matrix = m.layers[0].q; }));
  CHECK(refused(FusionKind::project, [](Model& m) { m.fusion.bias.pop_back(); }));
  CHECK(refused(FusionKind::project, [](Model& m) { m.fusion.embed_norm = m.layers[1].input_norm; }));
  CHECK(refused(FusionKind::attend, [](Model& m) { m.layers[0].k = m.layers[1].k; }));
  CHECK(refused(FusionKind::attend, [](Model& m) { m.layers[0].input_norm = m.layers[1].input_norm; }));
  CHECK(refused(FusionKind::attend, [](Model& m) { m.fusion.embed_norm = m.fusion.feature_norm = {}; }));
  CHECK(refused(FusionKind::attend, [](Model& m) { m.layers.clear(); }));
}

}  // namespace
}  // namespace outrider

int main() {
  using namespace outrider;
  for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::amx})
    for (WeightFormat format : {WeightFormat::bf16, WeightFormat::int8, WeightFormat::int4})
      for (FusionKind kind : {FusionKind::none, FusionKind::project, FusionKind::attend})
        if (isa_available(isa)) company_changes_nothing(format, kind, isa);
  refusals_change_nothing();
  models_that_do_not_fit_are_refused();
  return test::report();
}
