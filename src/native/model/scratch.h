// Memory that a Runner keeps between forward passes.
#pragma once

#include <cstddef>
#include <vector>

#include "outrider/buffer.h"
#include "outrider/model.h"

namespace outrider {

// Floats that only ever grow in number; what they held is lost when they do.
class Floats {
 public:
  float* reserve(std::size_t count) {
    if (count * sizeof(float) > buffer_.size()) buffer_ = Buffer(count * sizeof(float));
    return data();
  }
  float* data() { return reinterpret_cast<float*>(buffer_.data()); }

 private:
  Buffer buffer_;
};

// Rows of one segment that attention takes together.
struct RowTile {
  int sequence;
  int first_row;  // among the rows of the chunk
  int count;
};

struct Runner::Scratch {
  Floats x, normed, qkv, attended, gate_up, projected;  // [rows, ...]
  Floats joined;                                        // [rows, 2 * hidden_size]
  Floats cosine, sine;                                  // [rows, head_dim / 2]
  Floats final_rows;
  std::vector<Floats> attention;  // per thread
  QuantizedRows quantized;

  std::vector<RowPlace> places;
  std::vector<std::int32_t> tails;
  std::vector<std::size_t> tail_starts;
  std::vector<RowTile> tiles;
  std::vector<std::int64_t> tokens;
};

}  // namespace outrider
