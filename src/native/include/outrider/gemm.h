// The matrix product of a forward pass, shaped for verification: few rows, many weights, every row bit-identical
// whatever else is in the call.
//
// y[r, n] = sum over k of x[r, k] * w[n, k]. Weights are packed once into a stream that each thread reads front to
// back. For quantised weights the activations of a row are quantised to int8 in groups of 32 along k, a group's dot
// product is exact in int32, and groups are added in float32 in ascending k; for bf16 weights the activations are
// rounded to bf16. A vector lane is an output column, so no order of addition depends on the number of rows, on the
// thread count or on the block a row falls into.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "outrider/buffer.h"
#include "outrider/cpu.h"
#include "outrider/threads.h"

namespace outrider {

// Groups along k are 32 wide, and columns (n) are packed in units of 32.
constexpr int kGroup = 32;
constexpr int kUnit = 32;

// How the values of a matrix are stored. intB: an integer code of B bits for each value.
enum class WeightFormat : std::uint8_t { int4, int5, int6, int8, bf16 };

// How a group's scale (and minimum) are stored.
//   none:   bf16 weights have none.
//   f16:    one half per group. f32: one float per group, for scales that are no halves.
//   kquant: as GGUF's K formats, without loss: halves per 256 values and small integers per group. int4 and int5 have
//           a 6-bit scale and minimum per group; int6 has an 8-bit scale for each half of a group and no minimum.
enum class ScaleKind : std::uint8_t { none, f16, f32, kquant };

// Everything needed to read packed bytes; store it next to them in a cache file, with kPackedVersion.
struct PackedLayout {
  WeightFormat format = WeightFormat::bf16;
  ScaleKind scales = ScaleKind::none;
  bool has_min = false;
  std::int64_t n = 0;  // output columns (rows of the weight matrix); any, padded to kUnit inside
  std::int64_t k = 0;  // a multiple of kGroup; of 256 for kquant

  std::int64_t units() const { return (n + kUnit - 1) / kUnit; }
  std::size_t unit_bytes() const;
  std::size_t bytes() const { return static_cast<std::size_t>(units()) * unit_bytes(); }
  // Throws std::invalid_argument for a combination no kernel reads or a k that is no multiple of the group.
  void check() const;
  bool operator==(const PackedLayout&) const = default;
};

// Changes whenever the bytes of any layout do.
constexpr int kPackedVersion = 1;

// A weight matrix [n, k] in packed form; copies share the bytes.
class PackedMatrix {
 public:
  PackedMatrix() = default;
  // data: layout.bytes() bytes, 64-byte aligned, kept alive by its owner (an aliasing shared_ptr into a mapped file or
  // an arena will do). Throws std::invalid_argument if the layout is not valid or the data not aligned.
  PackedMatrix(const PackedLayout& layout, std::shared_ptr<const std::uint8_t> data);

  const PackedLayout& layout() const { return layout_; }
  std::int64_t n() const { return layout_.n; }
  std::int64_t k() const { return layout_.k; }
  std::size_t bytes() const { return layout_.bytes(); }
  bool is_bf16() const { return layout_.format == WeightFormat::bf16; }
  const std::uint8_t* data() const { return data_.get(); }
  const std::uint8_t* unit(std::int64_t u) const { return data() + static_cast<std::size_t>(u) * layout_.unit_bytes(); }

  // out[i, :] = row rows[i] of the matrix, dequantised (an embedding look-up); out is [rows.size(), k].
  void dequantize(std::span<const std::int64_t> rows, float* out) const;

 private:
  PackedLayout layout_;
  std::shared_ptr<const std::uint8_t> data_;
};

// ---- Packing ----

// A weight matrix in a neutral form, row-major: what a checkpoint or a quantiser decodes into.
struct GroupedSource {
  WeightFormat format = WeightFormat::bf16;
  std::int64_t n = 0, k = 0;
  // Integer formats: w[i, j] = scale[i, j / 32] * q[i, j] + min[i, j / 32]. The codes q lie in
  //   0 … 2^bits - 1 for int4 and int5 with a minimum, and in -2^(bits-1) … 2^(bits-1) - 1 otherwise.
  const std::int8_t* q = nullptr;       // [n, k]
  const float* scale = nullptr;         // [n, k / 32]
  const float* min = nullptr;           // [n, k / 32], or null
  const std::uint16_t* bf16 = nullptr;  // [n, k], for bf16
};

// f16 scales where every scale and minimum is a half, else f32. int6 is packed by pack_gguf only.
PackedMatrix pack(const GroupedSource& source, ThreadPool& pool);

// Tensor types of GGUF files, with ggml's numbers.
enum class GgmlType : int {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  bf16 = 30
};

// Bytes of one row of k values; throws std::invalid_argument for a type that cannot be packed or a k it cannot have.
std::size_t gguf_row_bytes(GgmlType type, std::int64_t k);

// The layout a tensor of that type packs to. The quantised types keep every weight exactly (q5_* and q6_k as 5 and
// 6 bits); f32 and f16 are rounded to bf16.
PackedLayout gguf_layout(GgmlType type, std::int64_t n, std::int64_t k);

// Packs a tensor as it lies in the file. row_index, if not empty, has n entries: packed row i is source row
// row_index[i], so that a permutation or a concatenation of slices costs no copy.
// dst: gguf_layout(type, n, k).bytes() bytes, 64-byte aligned.
void pack_gguf(GgmlType type, const void* blocks, std::int64_t n, std::int64_t k,
               std::span<const std::int64_t> row_index, std::uint8_t* dst, ThreadPool& pool);
PackedMatrix pack_gguf(GgmlType type, const void* blocks, std::int64_t n, std::int64_t k,
                       std::span<const std::int64_t> row_index, ThreadPool& pool);

// Element types a checkpoint without quantisation may have.
enum class FloatType : std::uint8_t { f32, f16, bf16 };

struct QuantizedWeights {
  PackedMatrix matrix;
  double relative_error = 0;  // Frobenius norm of (packed - source) over that of source
};

// Packs a float matrix [n, k], row-major, as bf16, int8 (symmetric) or int4 (with a minimum), groups of 32.
// Throws std::invalid_argument if a value is not finite.
QuantizedWeights quantize_weights(WeightFormat format, FloatType type, const void* weights, std::int64_t n,
                                  std::int64_t k, std::span<const std::int64_t> row_index, ThreadPool& pool);

// ---- Multiplying ----

// Scale and sums of one group of one row's activations: x is about scale * q.
struct ActivationGroup {
  float scale;                // absmax / 127; NaN if the group holds a NaN or an infinity
  float sum;                  // scale * sum of q
  std::int32_t negative_sum;  // -(sum of q)
  std::int32_t negative_low;  // the same over the group's first 16
};

// Which forms of the activations to prepare: int8 for integer weights, bf16 for bf16 weights.
struct ActivationForms {
  bool int8 = false;
  bool bf16 = false;

  void add(const PackedMatrix& matrix) { (matrix.is_bf16() ? bf16 : int8) = true; }
};

// Rows of activations as kernels read them: blocks of up to kBlock rows, within a block group after group, within a
// group row after row. Every matrix that shares an input can share one. Keeps its memory from call to call.
class QuantizedRows {
 public:
  static constexpr std::int64_t kBlock = 32;

  // x: float32 [rows, k], row stride ldx; k a multiple of 32.
  void assign(const float* x, std::int64_t ldx, std::int64_t rows, std::int64_t k, ActivationForms forms,
              ThreadPool& pool, Isa isa = default_isa());

  std::int64_t rows() const { return rows_; }
  std::int64_t k() const { return k_; }
  const ActivationForms& forms() const { return forms_; }

  // For the block that starts at row (a multiple of kBlock): group g, row i at [g * rows_in_block + i]. Null for a form
  // that was not prepared.
  const std::int8_t* q(std::int64_t row) const { return forms_.int8 ? q_.get() + row * k_ : nullptr; }
  const ActivationGroup* groups(std::int64_t row) const {
    return forms_.int8 ? groups_.get() + row * (k_ / kGroup) : nullptr;
  }
  const std::uint16_t* bf16(std::int64_t row) const { return forms_.bf16 ? bf16_.get() + row * k_ : nullptr; }

 private:
  void reserve();

  std::int64_t rows_ = 0, k_ = 0;
  ActivationForms forms_;
  std::int64_t capacity_int8_ = 0, capacity_bf16_ = 0;
  std::shared_ptr<std::int8_t> q_;
  std::shared_ptr<ActivationGroup> groups_;
  std::shared_ptr<std::uint16_t> bf16_;
};

// One product of several that share their input.
struct GemmTask {
  const PackedMatrix* matrix;
  float* y;  // [rows, n], row stride ldy, overwritten
  std::int64_t ldy;
};

// All products of tasks with the same rows, as one section of the pool.
// Throws std::invalid_argument if a matrix's k is not the rows', or its form of the activations was not prepared.
void gemm(std::span<const GemmTask> tasks, const QuantizedRows& rows, ThreadPool& pool, Isa isa = default_isa());

// The same for one matrix, from float32 rows.
void gemm(const PackedMatrix& matrix, const float* x, std::int64_t ldx, std::int64_t rows, float* y, std::int64_t ldy,
          ThreadPool& pool, QuantizedRows& workspace, Isa isa = default_isa());

}  // namespace outrider
