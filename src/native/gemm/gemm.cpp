// Dispatch, and the split of the work: over columns in chunks of whole units, never over k.
#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "gemm/kernels.h"

namespace outrider {
namespace {

// What a thread takes at a time: at most this, to stay in the second-level cache while several blocks of rows go over
// it; and little enough for each thread to take several, so that the last ones end together.
constexpr std::size_t kChunkBytes = std::size_t{192} << 10;
constexpr std::size_t kChunksPerThread = 8;

struct Chunk {
  const GemmTask* task;
  GemmKernel kernel;
  std::int64_t first_unit, units;
};

std::vector<Chunk> split(std::span<const GemmTask> tasks, const KernelSet& kernels, std::size_t threads) {
  std::size_t total = 0;
  for (const GemmTask& task : tasks) total += task.matrix->bytes();
  const std::size_t target = std::min(kChunkBytes, total / (threads * kChunksPerThread));
  std::vector<Chunk> chunks;
  for (const GemmTask& task : tasks) {
    const PackedLayout& layout = task.matrix->layout();
    const GemmKernel kernel = kernels.find(layout);
    const auto step = std::max<std::int64_t>(1, static_cast<std::int64_t>(target / layout.unit_bytes()));
    for (std::int64_t unit = 0; unit < layout.units(); unit += step) {
      chunks.push_back({&task, kernel, unit, std::min(step, layout.units() - unit)});
    }
  }
  return chunks;
}

void run(const Chunk& chunk, const QuantizedRows& rows) {
  const PackedMatrix& matrix = *chunk.task->matrix;
  const std::int64_t column = chunk.first_unit * kUnit;
  for (std::int64_t first = 0; first < rows.rows(); first += QuantizedRows::kBlock) {
    const RowBlock block{static_cast<int>(std::min(QuantizedRows::kBlock, rows.rows() - first)), rows.q(first),
                         rows.groups(first), rows.bf16(first)};
    const Output out{chunk.task->y + first * chunk.task->ldy + column, chunk.task->ldy, matrix.n() - column};
    chunk.kernel(matrix.unit(chunk.first_unit), chunk.units, matrix.k(), block, out);
  }
}

// A thread's own share of the chunks, in order; others take from it when theirs is done.
struct alignas(64) Share {
  std::atomic<std::size_t> next{0};
  std::size_t end = 0;
};

void check(const GemmTask& task, const QuantizedRows& rows) {
  if (task.matrix->k() != rows.k()) {
    throw std::invalid_argument("a matrix with k = " + std::to_string(task.matrix->k()) + " cannot multiply rows of " +
                                std::to_string(rows.k()));
  }
  if (!(task.matrix->is_bf16() ? rows.forms().bf16 : rows.forms().int8)) {
    throw std::invalid_argument("the rows were not prepared in the form this matrix reads: add it to ActivationForms");
  }
}

}  // namespace

const KernelSet& kernels_for(Isa isa) {
  if (!isa_available(isa)) throw std::invalid_argument("this machine has no " + std::string(isa_name(isa)));
#if defined(__x86_64__)
  switch (isa) {
    case Isa::portable:
      break;
    case Isa::avx2:
      return avx2_kernels();
    case Isa::avx512:
      return avx512_kernels();
    case Isa::amx: {
      static const bool agrees = amx_agrees_with_avx512();
      return agrees ? amx_kernels() : avx512_kernels();
    }
  }
#endif
  return portable_kernels();
}

void gemm(std::span<const GemmTask> tasks, const QuantizedRows& rows, ThreadPool& pool, Isa isa) {
  for (const GemmTask& task : tasks) check(task, rows);
  if (rows.rows() == 0) return;
  const auto threads = static_cast<std::size_t>(pool.size());
  const std::vector<Chunk> chunks = split(tasks, kernels_for(isa), threads);
  std::vector<Share> shares(threads);
  for (std::size_t t = 0; t < threads; ++t) {
    shares[t].next.store(chunks.size() * t / threads, std::memory_order_relaxed);
    shares[t].end = chunks.size() * (t + 1) / threads;
  }
  pool.parallel([&](int thread, int) {
    for (std::size_t i = 0; i < threads; ++i) {
      Share& share = shares[(static_cast<std::size_t>(thread) + i) % threads];
      for (std::size_t chunk; (chunk = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) {
        run(chunks[chunk], rows);
      }
    }
  });
}

void gemm(const PackedMatrix& matrix, const float* x, std::int64_t ldx, std::int64_t rows, float* y, std::int64_t ldy,
          ThreadPool& pool, QuantizedRows& workspace, Isa isa) {
  ActivationForms forms;
  forms.add(matrix);
  workspace.assign(x, ldx, rows, matrix.k(), forms, pool, isa);
  const GemmTask task{&matrix, y, ldy};
  gemm(std::span(&task, 1), workspace, pool, isa);
}

}  // namespace outrider
