// A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention and SwiGLU, and its forward pass.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "outrider/gemm.h"
#include "outrider/kv_cache.h"
#include "outrider/ops.h"
#include "outrider/threads.h"

namespace outrider {

struct ModelShape {
  int vocab_size, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size;
  int num_logits;  // vocab_size, unless the output is over other tokens
  float rms_norm_eps;
  std::vector<float> inverse_frequencies;  // [head_dim / 2], scaled
  float rope_factor = 1.0f;                // of cosine and sine (yarn's attention factor)
};

// Matrices are [outputs, inputs]; empty vectors stand for what the family does not have.
struct LayerWeights {
  std::vector<float> input_norm, post_attention_norm, q_norm, k_norm;
  PackedMatrix q, k, v, o, gate, up, down;
  std::vector<float> q_bias, k_bias, v_bias, o_bias, gate_bias, up_bias, down_bias;
  int window = 0;  // latest positions that a row sees, itself included; 0: all
  bool rope = true;
};

// How a row takes in a feature, a hidden state of another model's, beside its token.
//   project: the first block's input is matrix * [embedding, feature] + bias.
//   attend: the first block's input is the feature, and its q, k and v read [embedding, feature], both normed.
enum class FusionKind : std::uint8_t { none, project, attend };

struct Fusion {
  FusionKind kind = FusionKind::none;
  std::vector<float> embed_norm, feature_norm;  // before the two are joined; both or neither
  PackedMatrix matrix;                          // [hidden_size, 2 * hidden_size]
  std::vector<float> bias;
  bool norm_before_residual = false;  // of attend: the residual stream is the normed feature
};

struct Model {
  ModelShape shape;
  Fusion fusion;
  PackedMatrix embedding;
  PackedMatrix lm_head;           // shares the embedding's bytes where the two are tied
  std::vector<float> final_norm;  // may be missing, as may the first layer's input_norm
  std::vector<LayerWeights> layers;

  // Columns that the first block's q, k and v have.
  int first_inputs() const { return shape.hidden_size * (fusion.kind == FusionKind::attend ? 2 : 1); }

  // Throws std::invalid_argument, naming the tensor, if shapes do not fit.
  void check() const;
};

// Rows that a forward pass adds to one sequence.
struct Segment {
  int sequence;
  std::span<const std::int32_t> tokens;
  std::span<const std::int32_t> parents;
};

// What a forward pass writes. Rows are numbered through the segments.
struct ForwardOutput {
  std::span<const std::int32_t> logit_rows;  // ascending
  float* logits;                             // [logit_rows, num_logits]
  // (layer, [rows, hidden_size]): the residual stream after ``layer`` blocks.
  std::vector<std::pair<int, float*>> hidden;
};

// Runs a model over rows of many sequences. Keeps its scratch memory from call to call.
class Runner {
 public:
  Runner(std::shared_ptr<const Model>, ThreadPool&, Isa);
  ~Runner();

  // Appends the segments' rows to the cache as pending rows and computes them. If anything is wrong, the cache stays
  // as it was: see KvCache::append; std::invalid_argument also for a token beyond the vocabulary.
  // features: [rows, hidden_size] for a model with fusion, null for any other.
  void forward(KvCache&, std::span<const Segment>, const ForwardOutput&, const float* features = nullptr);

 private:
  class Pass;
  struct Scratch;

  std::shared_ptr<const Model> model_;
  ThreadPool& pool_;
  Isa isa_;
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace outrider
