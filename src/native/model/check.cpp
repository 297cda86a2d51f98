#include <stdexcept>
#include <string>

#include "outrider/model.h"

namespace outrider {
namespace {

void expect(bool fits, const std::string& what) {
  if (!fits) throw std::invalid_argument(what + " does not have the shape that the model's configuration asks for");
}

void expect_matrix(const PackedMatrix& matrix, std::int64_t n, std::int64_t k, const std::string& name) {
  expect(matrix.data() != nullptr && matrix.n() == n && matrix.k() == k, name);
}

void expect_vector(const std::vector<float>& vector, int n, const std::string& name, bool optional = false) {
  expect((optional && vector.empty()) || vector.size() == static_cast<std::size_t>(n), name);
}

// inputs: columns of q, k and v. The norm before these may be missing in the first layer alone.
void check_layer(const LayerWeights& layer, const ModelShape& shape, int inputs, bool first, const std::string& name) {
  const int hidden = shape.hidden_size, inner = shape.intermediate_size;
  const int q = shape.num_heads * shape.head_dim, kv = shape.num_kv_heads * shape.head_dim;
  expect_vector(layer.input_norm, hidden, name + "input_norm", first);
  expect_vector(layer.post_attention_norm, hidden, name + "post_attention_norm");
  expect_vector(layer.q_norm, shape.head_dim, name + "q_norm", true);
  expect_vector(layer.k_norm, shape.head_dim, name + "k_norm", true);
  expect_matrix(layer.q, q, inputs, name + "q");
  expect_matrix(layer.k, kv, inputs, name + "k");
  expect_matrix(layer.v, kv, inputs, name + "v");
  expect_matrix(layer.o, hidden, q, name + "o");
  expect_matrix(layer.gate, inner, hidden, name + "gate");
  expect_matrix(layer.up, inner, hidden, name + "up");
  expect_matrix(layer.down, hidden, inner, name + "down");
  expect_vector(layer.q_bias, q, name + "q_bias", true);
  expect_vector(layer.k_bias, kv, name + "k_bias", true);
  expect_vector(layer.v_bias, kv, name + "v_bias", true);
  expect_vector(layer.o_bias, hidden, name + "o_bias", true);
  expect_vector(layer.gate_bias, inner, name + "gate_bias", true);
  expect_vector(layer.up_bias, inner, name + "up_bias", true);
  expect_vector(layer.down_bias, hidden, name + "down_bias", true);
  expect(layer.window >= 0, name + "window");
}

void check_fusion(const Model& model) {
  const Fusion& fusion = model.fusion;
  const int hidden = model.shape.hidden_size;
  const bool attend = fusion.kind == FusionKind::attend, project = fusion.kind == FusionKind::project;
  expect_vector(fusion.embed_norm, hidden, "embed_norm", !attend);
  expect(fusion.feature_norm.size() == fusion.embed_norm.size(), "feature_norm");
  expect_vector(fusion.bias, hidden, "fuse_bias", true);
  if (project) expect_matrix(fusion.matrix, hidden, 2 * hidden, "fuse");
  if (attend && (model.layers.empty() || !model.layers.front().input_norm.empty()))
    throw std::invalid_argument("with fusion 'attend' the model needs a first block, and that one no input_norm");
}

}  // namespace

void Model::check() const {
  if (shape.num_kv_heads < 1 || shape.num_heads % shape.num_kv_heads != 0)
    throw std::invalid_argument("the number of heads must be a multiple of the number of KV heads");
  expect_vector(shape.inverse_frequencies, shape.head_dim / 2, "inverse_frequencies");
  expect_matrix(embedding, shape.vocab_size, shape.hidden_size, "embedding");
  expect_matrix(lm_head, shape.num_logits, shape.hidden_size, "lm_head");
  expect_vector(final_norm, shape.hidden_size, "final_norm", true);
  check_fusion(*this);
  for (std::size_t i = 0; i < layers.size(); ++i)
    check_layer(layers[i], shape, i == 0 ? first_inputs() : shape.hidden_size, i == 0,
                "layer " + std::to_string(i) + ": ");
}

}  // namespace outrider
