// Time of the matrix product over the number of rows, against a pure read of memory.
//
//   bench_gemm [seconds per shape] [threads] [K N]
//
// All measurements of a shape are interleaved in one loop over copies of the matrix that together exceed any cache, so
// that a neighbour on the machine disturbs all alike, and those during which the system took a thread off its core are
// left out. Prints medians and how many measurements were kept; GB/s counts packed bytes.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "outrider/gemm.h"

namespace outrider {
namespace {

constexpr std::size_t kStreamBytes = std::size_t{512} << 20;
constexpr std::int64_t kRows[] = {1, 2, 4, 8, 16, 32, 64};

struct Format {
  const char* name;
  PackedLayout layout;
};

constexpr Format kFormats[] = {
    {"q4_1", {WeightFormat::int4, ScaleKind::f16, true}},     {"q4_0", {WeightFormat::int4, ScaleKind::f16, false}},
    {"q4_K", {WeightFormat::int4, ScaleKind::kquant, true}},  {"q5_0", {WeightFormat::int5, ScaleKind::f16, false}},
    {"q6_K", {WeightFormat::int6, ScaleKind::kquant, false}}, {"q8_0", {WeightFormat::int8, ScaleKind::f16, false}},
    {"bf16", {WeightFormat::bf16, ScaleKind::none, false}},
};

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Bytes below 0x40: whatever field they fall into, they are small positive halves, floats and codes.
Buffer random_bytes(std::size_t bytes) {
  Buffer buffer(bytes);
  std::uint64_t state = 88172645463325252u;
  auto* words = reinterpret_cast<std::uint64_t*>(buffer.data());
  for (std::size_t i = 0; i < bytes / 8; ++i) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    words[i] = state & 0x3f3f3f3f3f3f3f3fu;
  }
  return buffer;
}

std::uint64_t read(const std::uint8_t* data, std::size_t bytes, ThreadPool& pool) {
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(pool.size()) * 8);
  pool.parallel([&](int thread, int threads) {
    const auto* words = reinterpret_cast<const std::uint64_t*>(data);
    const std::size_t lines = bytes / 64, count = static_cast<std::size_t>(threads),
                      t = static_cast<std::size_t>(thread);
    std::uint64_t sum[8] = {};
    for (std::size_t line = lines * t / count; line < lines * (t + 1) / count; ++line) {
      __builtin_prefetch(words + line * 8 + 512);
      for (std::size_t i = 0; i < 8; ++i) sum[i] += words[line * 8 + i];
    }
    for (const std::uint64_t s : sum) sums[t * 8] += s;
  });
  return sums[0];
}

long preemptions() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_nivcsw;
}

struct Samples {
  std::vector<double> undisturbed, disturbed;

  template <typename F>
  void measure(int repeats, F&& fn) {
    const long before = preemptions();
    const double start = seconds();
    for (int r = 0; r < repeats; ++r) fn();
    const double time = (seconds() - start) / repeats;
    (preemptions() == before ? undisturbed : disturbed).push_back(time);
  }
  double median() {
    std::vector<double>& values = undisturbed.empty() ? disturbed : undisturbed;
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
    return values[values.size() / 2];
  }
};

void measure(const Format& format, std::int64_t k, std::int64_t n, const Buffer& stream, double budget,
             ThreadPool& pool) {
  PackedLayout layout = format.layout;
  layout.n = n;
  layout.k = k;
  const std::size_t bytes = layout.bytes(), copies = stream.size() / bytes;
  std::vector<PackedMatrix> matrices;
  for (std::size_t i = 0; i < copies; ++i) {
    matrices.emplace_back(layout, std::shared_ptr<const std::uint8_t>(stream.share(), stream.data() + i * bytes));
  }
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(64 * k)), y(static_cast<std::size_t>(64 * n));
  for (float& value : x) value = normal(generator);

  constexpr std::size_t counts = std::size(kRows);
  Samples times[counts], quantize_times[counts], read_times;
  std::size_t next = 0;
  volatile std::uint64_t sink = 0;
  QuantizedRows rows;
  ActivationForms forms;
  forms.add(matrices[0]);
  const int repeats = std::max(1, static_cast<int>(4000000 / bytes));
  for (const double start = seconds(); seconds() - start < budget;) {
    read_times.measure(repeats, [&] { sink = sink + read(matrices[next++ % copies].data(), bytes, pool); });
    for (std::size_t i = 0; i < counts; ++i) {
      quantize_times[i].measure(1, [&] { rows.assign(x.data(), k, kRows[i], k, forms, pool); });
      times[i].measure(repeats, [&] {
        const GemmTask task{&matrices[next++ % copies], y.data(), n};
        gemm(std::span(&task, 1), rows, pool);
      });
    }
  }
  const double one = times[0].median(), gigabytes = static_cast<double>(bytes) / 1e9;
  std::printf("%s %lldx%lld %.2f MB: read %.1f GB/s\n", format.name, static_cast<long long>(k),
              static_cast<long long>(n), static_cast<double>(bytes) / 1e6, gigabytes / read_times.median());
  for (std::size_t i = 0; i < counts; ++i) {
    const double time = times[i].median();
    std::printf("  rows %2lld  %8.3f ms  %5.1f GB/s  x%.2f  (activations %.1f us; kept %zu of %zu)\n",
                static_cast<long long>(kRows[i]), time * 1e3, gigabytes / time, time / one,
                quantize_times[i].median() * 1e6, times[i].undisturbed.size(),
                times[i].undisturbed.size() + times[i].disturbed.size());
  }
  std::fflush(stdout);
}

}  // namespace
}  // namespace outrider

int main(int argc, char** argv) {
  using namespace outrider;
  const double budget = argc > 1 ? std::atof(argv[1]) : 2.0;
  ThreadPool pool(argc > 2 ? std::atoi(argv[2]) : 2);
  struct Shape {
    std::int64_t k, n;
  };
  std::vector<Shape> shapes = {{1536, 17920}, {8960, 1536}, {1536, 1536}};
  if (argc > 4) shapes = {{std::atoll(argv[3]), std::atoll(argv[4])}};
  std::printf("isa %s, %d threads\n", std::string(isa_name(default_isa())).c_str(), pool.size());
  const Buffer stream = random_bytes(kStreamBytes);
  for (const Shape shape : shapes) {
    for (const Format& format : kFormats) {
      if (std::getenv("FORMAT") != nullptr && std::string(std::getenv("FORMAT")) != format.name) continue;
      measure(format, shape.k, shape.n, stream, budget, pool);
    }
  }
}
