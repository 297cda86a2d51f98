// The Python face of the core: outrider._native. Checks what comes in, releases the GIL, and nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <map>
#include <string>

#include "outrider/bandwidth.h"
#include "outrider/checksum.h"
#include "outrider/errors.h"
#include "outrider/model.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace outrider {
namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <typename Array>
auto as_span(const Array& array) {
  return std::span(array.data(), array.size());
}

// ---- Weights ----

// Memory for all packed matrices of a model: filled by packing, or read whole from a cache file.
struct Arena {
  explicit Arena(std::size_t bytes) : buffer(bytes) {}

  std::uint8_t* at(std::size_t offset, std::size_t bytes) {
    if (offset % 64 != 0 || offset > buffer.size() || bytes > buffer.size() - offset)
      throw std::invalid_argument("a packed matrix does not lie within the arena");
    return buffer.data() + offset;
  }
  PackedMatrix matrix(std::size_t offset, const PackedLayout& layout) {
    layout.check();
    return {layout, std::shared_ptr<const std::uint8_t>(buffer.share(), at(offset, layout.bytes()))};
  }

  Buffer buffer;
};

void pack_into(Arena& arena, std::size_t offset, int type, const Bytes& data, std::int64_t n, std::int64_t k,
               ThreadPool& pool) {
  const auto ggml_type = static_cast<GgmlType>(type);
  const PackedLayout layout = gguf_layout(ggml_type, n, k);
  if (data.size() != gguf_row_bytes(ggml_type, k) * static_cast<std::size_t>(n))
    throw std::invalid_argument("a tensor's bytes do not match its shape");
  std::uint8_t* target = arena.at(offset, layout.bytes());
  const nb::gil_scoped_release release;
  pack_gguf(ggml_type, data.data(), n, k, {}, target, pool);
}

std::size_t float_bytes(FloatType type) { return type == FloatType::f32 ? 4 : 2; }

std::pair<PackedMatrix, double> quantize(WeightFormat format, FloatType type, const Bytes& data, std::int64_t n,
                                         std::int64_t k, ThreadPool& pool) {
  if (n < 1 || k < 1 || data.size() != float_bytes(type) * static_cast<std::size_t>(n) * static_cast<std::size_t>(k))
    throw std::invalid_argument("a tensor's bytes do not match its shape");
  const nb::gil_scoped_release release;
  QuantizedWeights result = quantize_weights(format, type, data.data(), n, k, {}, pool);
  return {std::move(result.matrix), result.relative_error};
}

void bind_weights(nb::module_& m) {
  nb::enum_<WeightFormat>(m, "WeightFormat")
      .value("int4", WeightFormat::int4)
      .value("int5", WeightFormat::int5)
      .value("int6", WeightFormat::int6)
      .value("int8", WeightFormat::int8)
      .value("bf16", WeightFormat::bf16);
  nb::enum_<ScaleKind>(m, "ScaleKind")
      .value("none", ScaleKind::none)
      .value("f16", ScaleKind::f16)
      .value("f32", ScaleKind::f32)
      .value("kquant", ScaleKind::kquant);
  nb::enum_<FloatType>(m, "FloatType")
      .value("f32", FloatType::f32)
      .value("f16", FloatType::f16)
      .value("bf16", FloatType::bf16);
  nb::class_<PackedLayout>(m, "PackedLayout")
      .def(
          "__init__",
          [](PackedLayout* self, WeightFormat format, ScaleKind scales, bool has_min, std::int64_t n, std::int64_t k) {
            new (self) PackedLayout{format, scales, has_min, n, k};
            self->check();
          },
          "format"_a, "scales"_a, "has_min"_a, "n"_a, "k"_a)
      .def_ro("format", &PackedLayout::format)
      .def_ro("scales", &PackedLayout::scales)
      .def_ro("has_min", &PackedLayout::has_min)
      .def_ro("n", &PackedLayout::n)
      .def_ro("k", &PackedLayout::k)
      .def_prop_ro("bytes", &PackedLayout::bytes);
  m.def(
      "gguf_layout",
      [](int type, std::int64_t n, std::int64_t k) { return gguf_layout(static_cast<GgmlType>(type), n, k); }, "type"_a,
      "n"_a, "k"_a);
  nb::class_<PackedMatrix>(m, "PackedMatrix")
      .def_prop_ro("layout", &PackedMatrix::layout)
      .def("dequantize", [](const PackedMatrix& self, const std::vector<std::int64_t>& rows, const Matrix& out) {
        if (static_cast<std::int64_t>(out.shape(0)) != static_cast<std::int64_t>(rows.size()) ||
            static_cast<std::int64_t>(out.shape(1)) != self.k())
          throw std::invalid_argument("dequantize needs room for [rows, k] floats");
        for (std::int64_t row : rows)
          if (row < 0 || row >= self.n()) throw std::invalid_argument("there is no row " + std::to_string(row));
        self.dequantize(rows, out.data());
      });
  nb::class_<Arena>(m, "Arena")
      .def(nb::init<std::size_t>(), "bytes"_a)
      .def_prop_ro(
          "data",
          [](Arena& self) {
            return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(self.buffer.data(), {self.buffer.size()});
          },
          nb::rv_policy::reference_internal)
      .def("pack_gguf", &pack_into, "offset"_a, "type"_a, "data"_a, "n"_a, "k"_a, "pool"_a)
      .def("store",
           [](Arena& self, std::size_t offset, const PackedMatrix& matrix) {
             std::memcpy(self.at(offset, matrix.bytes()), matrix.data(), matrix.bytes());
           })
      .def("matrix", &Arena::matrix, "offset"_a, "layout"_a);
  m.def("quantize", &quantize, "format"_a, "type"_a, "data"_a, "n"_a, "k"_a, "pool"_a);
  m.def(
      "checksum",
      [](const Bytes& data, ThreadPool& pool) {
        const nb::gil_scoped_release release;
        return checksum(as_span(data), pool);
      },
      "data"_a, "pool"_a);
  m.def(
      "seconds_to_read",
      [](const Bytes& data, ThreadPool& pool) {
        const nb::gil_scoped_release release;
        return seconds_to_read(as_span(data), pool);
      },
      "data"_a, "pool"_a);
  m.attr("PACKED_VERSION") = kPackedVersion;
}

// ---- Model ----

const std::map<std::string, PackedMatrix LayerWeights::*> kLayerMatrices{
    {"q", &LayerWeights::q},       {"k", &LayerWeights::k},   {"v", &LayerWeights::v},       {"o", &LayerWeights::o},
    {"gate", &LayerWeights::gate}, {"up", &LayerWeights::up}, {"down", &LayerWeights::down},
};

const std::map<std::string, std::vector<float> LayerWeights::*> kLayerVectors{
    {"input_norm", &LayerWeights::input_norm}, {"post_attention_norm", &LayerWeights::post_attention_norm},
    {"q_norm", &LayerWeights::q_norm},         {"k_norm", &LayerWeights::k_norm},
    {"q_bias", &LayerWeights::q_bias},         {"k_bias", &LayerWeights::k_bias},
    {"v_bias", &LayerWeights::v_bias},         {"o_bias", &LayerWeights::o_bias},
    {"gate_bias", &LayerWeights::gate_bias},   {"up_bias", &LayerWeights::up_bias},
    {"down_bias", &LayerWeights::down_bias},
};

// None stands for what a model does not have.
std::vector<float> copied(const Vector& values) {
  if (!values.is_valid()) return {};
  return {values.data(), values.data() + values.size()};
}

void bind_model(nb::module_& m) {
  nb::enum_<FusionKind>(m, "FusionKind")
      .value("none", FusionKind::none)
      .value("project", FusionKind::project)
      .value("attend", FusionKind::attend);
  nb::class_<Model>(m, "Model")
      .def(
          "__init__",
          [](Model* self, int vocab_size, int hidden_size, int num_layers, int num_heads, int num_kv_heads,
             int head_dim, int intermediate_size, int num_logits, float rms_norm_eps, const Vector& inverse_frequencies,
             float rope_factor) {
            if (num_layers < 0) throw std::invalid_argument("num_layers must not be negative");
            new (self) Model{};
            self->shape = {vocab_size,   hidden_size,  num_heads,
                           num_kv_heads, head_dim,     intermediate_size,
                           num_logits,   rms_norm_eps, copied(inverse_frequencies),
                           rope_factor};
            self->layers.resize(static_cast<std::size_t>(num_layers));
          },
          "vocab_size"_a, "hidden_size"_a, "num_layers"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a,
          "intermediate_size"_a, "num_logits"_a, "rms_norm_eps"_a, "inverse_frequencies"_a, "rope_factor"_a)
      .def(
          "set_fusion",
          [](Model& self, FusionKind kind, const Vector& embed_norm, const Vector& feature_norm,
             const PackedMatrix* matrix, const Vector& bias, bool norm_before_residual) {
            self.fusion = {kind,         copied(embed_norm),  copied(feature_norm), matrix ? *matrix : PackedMatrix(),
                           copied(bias), norm_before_residual};
          },
          "kind"_a, "embed_norm"_a.none(), "feature_norm"_a.none(), "matrix"_a.none(), "bias"_a.none(),
          "norm_before_residual"_a)
      .def("set_embedding", [](Model& self, const PackedMatrix& matrix) { self.embedding = matrix; })
      .def("set_lm_head", [](Model& self, const PackedMatrix& matrix) { self.lm_head = matrix; })
      .def("set_final_norm", [](Model& self, const Vector& values) { self.final_norm = copied(values); })
      .def("set_matrix", [](Model& self, std::size_t layer, const std::string& name,
                            const PackedMatrix& matrix) { self.layers.at(layer).*kLayerMatrices.at(name) = matrix; })
      .def("set_vector", [](Model& self, std::size_t layer, const std::string& name,
                            const Vector& values) { self.layers.at(layer).*kLayerVectors.at(name) = copied(values); })
      .def(
          "set_layer",
          [](Model& self, std::size_t layer, int window, bool rope) {
            self.layers.at(layer).window = window;
            self.layers.at(layer).rope = rope;
          },
          "layer"_a, "window"_a, "rope"_a)
      .def("check", &Model::check);
}

// ---- Running ----

// A model with its KV cache and threads. Not to be called from two Python threads at once.
struct Session {
  Session(std::shared_ptr<const Model> model, std::shared_ptr<ThreadPool> threads, const KvCacheShape& shape, Isa isa)
      : model(std::move(model)), pool(std::move(threads)), cache(shape), runner(this->model, *pool, isa), isa(isa) {}

  std::shared_ptr<const Model> model;
  std::shared_ptr<ThreadPool> pool;
  KvCache cache;
  Runner runner;
  Isa isa;
  QuantizedRows multiplied;
};

// sequences and counts: the segments; tokens, parents and logit_rows: of all of them together.
void forward(Session& session, const std::vector<int>& sequences, const std::vector<int>& counts,
             const std::vector<std::int32_t>& tokens, const std::vector<std::int32_t>& parents,
             const std::vector<std::int32_t>& logit_rows, const Matrix& logits,
             const std::vector<std::pair<int, Matrix>>& hidden, const Rows& features) {
  if (sequences.size() != counts.size() || tokens.size() != parents.size())
    throw std::invalid_argument("every segment needs a count, and every row a token and a parent");
  const ModelShape& shape = session.model->shape;
  if (logits.shape(0) < logit_rows.size() || static_cast<std::int64_t>(logits.shape(1)) != shape.num_logits)
    throw std::invalid_argument("there is no room for the logits");
  if (features.is_valid() &&
      (features.shape(0) != tokens.size() || static_cast<std::int64_t>(features.shape(1)) != shape.hidden_size))
    throw std::invalid_argument("the features must be [rows, hidden_size]");
  std::vector<Segment> segments;
  std::size_t first = 0;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const auto count = static_cast<std::size_t>(counts[i]);
    if (counts[i] < 0 || count > tokens.size() - first)
      throw std::invalid_argument("there are fewer rows than counted");
    segments.push_back(
        {sequences[i], std::span(tokens).subspan(first, count), std::span(parents).subspan(first, count)});
    first += count;
  }
  if (first != tokens.size()) throw std::invalid_argument("there are more rows than counted");
  ForwardOutput output{logit_rows, logits.data(), {}};
  for (const auto& [layer, memory] : hidden) {
    if (memory.shape(0) != tokens.size() || static_cast<std::int64_t>(memory.shape(1)) != shape.hidden_size)
      throw std::invalid_argument("there is no room for the hidden states");
    output.hidden.emplace_back(layer, memory.data());
  }
  const nb::gil_scoped_release release;
  session.runner.forward(session.cache, segments, output, features.is_valid() ? features.data() : nullptr);
}

// y = x times the matrix's transpose.
void multiply(Session& session, const PackedMatrix& matrix, const Rows& x, const Matrix& y) {
  const auto n = static_cast<std::size_t>(matrix.n()), k = static_cast<std::size_t>(matrix.k());
  if (x.shape(1) != k || y.shape(1) != n || x.shape(0) != y.shape(0))
    throw std::invalid_argument("a product takes rows [rows, k] and room for [rows, n]");
  if (x.shape(0) == 0) return;
  const nb::gil_scoped_release release;
  gemm(matrix, x.data(), matrix.k(), static_cast<std::int64_t>(x.shape(0)), y.data(), matrix.n(), *session.pool,
       session.multiplied, session.isa);
}

using Ids = nb::ndarray<std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// The most likely tokens of each row of logits, and their log-probabilities.
void top_k(Session& session, const Matrix& logits, const Ids& ids, const Matrix& logprobs) {
  const std::size_t rows = logits.shape(0), columns = logits.shape(1), k = ids.shape(1);
  if (ids.shape(0) != rows || logprobs.shape(0) != rows || logprobs.shape(1) != k || k < 1 || k > columns)
    throw std::invalid_argument("top_k needs room for [rows, k] ids and log-probabilities, k at most the vocabulary");
  const nb::gil_scoped_release release;
  session.pool->parallel_for(static_cast<std::int64_t>(rows), [&](std::int64_t row) {
    const auto at = static_cast<std::size_t>(row);
    ops_for(session.isa)
        .top_k(logits.data() + at * columns, static_cast<std::int64_t>(columns), static_cast<int>(k),
               ids.data() + at * k, logprobs.data() + at * k);
  });
}

void read_kv(Session& session, int sequence, int layer, const Matrix& keys, const Matrix& values) {
  const KvCacheShape& shape = session.cache.shape();
  const auto columns = static_cast<std::size_t>(shape.kv_heads * shape.head.head_dim);
  const auto slots = static_cast<std::size_t>(session.cache.length(sequence) + session.cache.pending(sequence));
  for (const Matrix* matrix : {&keys, &values})
    if (matrix->shape(0) != slots || matrix->shape(1) != columns)
      throw std::invalid_argument("read_kv needs room for [slots, kv_heads * head_dim] floats");
  for (std::size_t slot = 0; slot < slots; ++slot)
    for (int head = 0; head < shape.kv_heads; ++head) {
      const std::size_t at = slot * columns + static_cast<std::size_t>(head * shape.head.head_dim);
      session.cache.read(sequence, layer, head, static_cast<int>(slot), keys.data() + at, values.data() + at);
    }
}

void bind_session(nb::module_& m) {
  nb::class_<ThreadPool>(m, "ThreadPool").def(nb::init<int>(), "threads"_a).def_prop_ro("size", &ThreadPool::size);
  nb::class_<Session>(m, "Session")
      .def(
          "__init__",
          [](Session* self, const Model& model, std::shared_ptr<ThreadPool> pool, std::int64_t pages, int page_size,
             int max_context, bool kv_f32, const std::string& isa) {
            const ModelShape& shape = model.shape;
            const KvCacheShape kv{static_cast<int>(model.layers.size()),
                                  shape.num_kv_heads,
                                  {kv_f32 ? KvType::f32 : KvType::bf16, shape.head_dim},
                                  pages,
                                  page_size,
                                  max_context};
            new (self) Session(std::make_shared<const Model>(model), std::move(pool), kv,
                               isa.empty() ? default_isa() : parse_isa(isa));
          },
          "model"_a, "pool"_a, "pages"_a, "page_size"_a, "max_context"_a, "kv_f32"_a, "isa"_a)
      .def("open", [](Session& self, const std::vector<std::int32_t>& pages) { return self.cache.open(pages); })
      .def("close", [](Session& self, int sequence) { self.cache.close(sequence); })
      .def("full_pages",
           [](const Session& self, int sequence) {
             const auto pages = self.cache.full_pages(sequence);
             return std::vector<std::int32_t>(pages.begin(), pages.end());
           })
      .def("retain", [](Session& self, const std::vector<std::int32_t>& pages) { self.cache.retain(pages); })
      .def("release", [](Session& self, const std::vector<std::int32_t>& pages) { self.cache.release(pages); })
      .def("length", [](const Session& self, int sequence) { return self.cache.length(sequence); })
      .def("pending", [](const Session& self, int sequence) { return self.cache.pending(sequence); })
      .def("commit",
           [](Session& self, int sequence, const std::vector<std::int32_t>& rows) {
             self.cache.commit(sequence, rows, ops_for(self.isa));
           })
      .def("truncate", [](Session& self, int sequence, int length) { self.cache.truncate(sequence, length); })
      .def_prop_ro("free_pages", [](const Session& self) { return self.cache.free_pages(); })
      .def_prop_ro("isa", [](const Session& self) { return std::string(isa_name(self.isa)); })
      .def("check_integrity", [](const Session& self) { self.cache.check_integrity(); })
      .def("top_k", &top_k, "logits"_a, "ids"_a, "logprobs"_a)
      .def("multiply", &multiply, "matrix"_a, "x"_a, "y"_a)
      .def("read_kv", &read_kv, "sequence"_a, "layer"_a, "keys"_a, "values"_a)
      .def("forward", &forward, "sequences"_a, "counts"_a, "tokens"_a, "parents"_a, "logit_rows"_a, "logits"_a,
           "hidden"_a, "features"_a.none());
  m.def(
      "kv_page_bytes",
      [](int layers, int kv_heads, int head_dim, int page_size, bool kv_f32) {
        const KvShape head{kv_f32 ? KvType::f32 : KvType::bf16, head_dim};
        return static_cast<std::int64_t>(head.tile_bytes()) * (page_size / kTile) * kv_heads * layers;
      },
      "layers"_a, "kv_heads"_a, "head_dim"_a, "page_size"_a, "kv_f32"_a);
  m.def("default_isa", [] { return std::string(isa_name(default_isa())); });
  m.def("isa_available", [](const std::string& name) { return isa_available(parse_isa(name)); });
}

// Every error of the core has its twin in outrider.core.errors.
void translate(const std::exception_ptr& error, void*) {
  const auto raise = [](const char* name, const char* text) {
    const nb::object twin = nb::module_::import_("outrider.core.errors").attr(name);
    PyErr_SetString(twin.ptr(), text);
  };
  try {
    std::rethrow_exception(error);
  } catch (const KvCacheFull& full) {
    raise("KVCacheFullError", full.what());
  } catch (const ContextTooLong& too_long) {
    raise("ContextLengthError", too_long.what());
  } catch (const std::invalid_argument& invalid) {
    raise("UsageError", invalid.what());
  } catch (const std::logic_error& broken) {
    PyErr_SetString(PyExc_AssertionError, broken.what());
  }
}

}  // namespace
}  // namespace outrider

NB_MODULE(_native, m) {
  m.doc() = "Outrider's native CPU kernels and forward pass.";
  nb::register_exception_translator(outrider::translate, nullptr);
  outrider::bind_weights(m);
  outrider::bind_model(m);
  outrider::bind_session(m);
}
