#pragma once

#include <cstdint>
#include <span>

#include "outrider/threads.h"

namespace outrider {

// Reads all of the memory once, front to back, each thread its own part, and returns the seconds that took: what a
// forward pass over as many bytes of weights cannot beat.
double seconds_to_read(std::span<const std::uint8_t> data, ThreadPool& pool);

}  // namespace outrider
