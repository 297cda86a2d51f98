#include "outrider/bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

namespace outrider {
namespace {

// Several loads at once and hardly any arithmetic: only the memory is in the way.
std::uint64_t read(const std::uint8_t* data, std::size_t bytes) {
  constexpr int kLanes = 16;
  std::uint64_t lanes[kLanes] = {};
  for (std::size_t i = 0; i + sizeof lanes <= bytes; i += sizeof lanes) {
    std::uint64_t words[kLanes];
    std::memcpy(words, data + i, sizeof words);
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] |= words[lane];
  }
  std::uint64_t all = 0;
  for (std::uint64_t lane : lanes) all |= lane;
  return all;
}

}  // namespace

double seconds_to_read(std::span<const std::uint8_t> data, ThreadPool& pool) {
  constexpr std::size_t kPart = std::size_t{1} << 20;
  const auto parts = static_cast<std::int64_t>((data.size() + kPart - 1) / kPart);
  std::atomic<std::uint64_t> seen{0};
  const auto start = std::chrono::steady_clock::now();
  pool.parallel([&](int thread, int threads) {
    std::uint64_t all = 0;
    for (std::int64_t part = parts * thread / threads; part < parts * (thread + 1) / threads; ++part) {
      const std::size_t offset = static_cast<std::size_t>(part) * kPart;
      all |= read(data.data() + offset, std::min(kPart, data.size() - offset));
    }
    seen.fetch_or(all);  // so that the reading cannot be optimised away
  });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace outrider
