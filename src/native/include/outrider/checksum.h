#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "outrider/threads.h"

namespace outrider {

// A 64-bit checksum that tells damage, not malice, at the speed of memory. Independent of the number of threads.
std::uint64_t checksum(std::span<const std::uint8_t> data, ThreadPool& pool);

}  // namespace outrider
