#include "outrider/checksum.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace outrider {
namespace {

constexpr std::size_t kPart = std::size_t{1} << 20;
constexpr std::uint64_t kMultiplier = 0x9e3779b97f4a7c15u;

std::uint64_t mix(std::uint64_t state, std::uint64_t word) {
  state = (state ^ word) * kMultiplier;
  return state ^ (state >> 29);
}

// Four interleaved chains, for the multiplications to overlap.
std::uint64_t part_checksum(std::span<const std::uint8_t> data) {
  std::uint64_t state[4] = {1, 2, 3, 4};
  std::size_t i = 0;
  for (; i + 32 <= data.size(); i += 32)
    for (int lane = 0; lane < 4; ++lane) {
      std::uint64_t word;
      std::memcpy(&word, data.data() + i + 8 * lane, 8);
      state[lane] = mix(state[lane], word);
    }
  for (; i < data.size(); ++i) state[0] = mix(state[0], data[i]);
  return mix(mix(mix(state[0], state[1]), state[2]), state[3]);
}

}  // namespace

std::uint64_t checksum(std::span<const std::uint8_t> data, ThreadPool& pool) {
  std::vector<std::uint64_t> parts((data.size() + kPart - 1) / kPart);
  pool.parallel_for(static_cast<std::int64_t>(parts.size()), [&](std::int64_t i) {
    const std::size_t start = static_cast<std::size_t>(i) * kPart;
    parts[static_cast<std::size_t>(i)] = part_checksum(data.subspan(start, std::min(kPart, data.size() - start)));
  });
  std::uint64_t total = data.size();
  for (std::uint64_t part : parts) total = mix(total, part);
  return total;
}

}  // namespace outrider
