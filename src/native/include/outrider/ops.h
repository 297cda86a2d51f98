// Everything in a forward pass that is not a matrix product, row by row, in one table of functions per ISA.
//
// Each function computes a row from that row's own inputs, in an order of operations that is fixed by the sizes of the
// model and by the absolute positions of the keys: never by how many rows a call has, nor by which.
#pragma once

#include <cstddef>
#include <cstdint>

#include "outrider/cpu.h"

namespace outrider {

enum class KvType { bf16, f32 };

// Keys and values of one KV head lie in tiles of 16 positions, the keys before the values.
//   keys: one dimension of all 16 positions side by side, so that the lanes of a vector are keys. f32: [head_dim][16];
//     bf16: [head_dim / 2][16][2], pairs of dimensions, which a vector of 32-bit lanes loads at once.
//   values: [16][value_columns], a row per position, zero beyond head_dim.
constexpr int kTile = 16;

struct KvShape {
  KvType type;
  int head_dim;

  int element_bytes() const { return type == KvType::bf16 ? 2 : 4; }
  int value_columns() const { return (head_dim + 31) / 32 * 32; }
  std::size_t key_bytes() const { return std::size_t{kTile} * head_dim * element_bytes(); }
  std::size_t value_bytes() const { return std::size_t{kTile} * value_columns() * element_bytes(); }
  std::size_t tile_bytes() const { return key_bytes() + value_bytes(); }
};

// One row's view of its sequence. It sees positions first … length-1; its own is length-1. Position p lies in slot p
// while p < dense, and in slot tail[p - dense] from there on (a path through the rows that are still pending).
struct AttentionRow {
  const float* q;  // [group][head_dim], rotated
  float* out;      // [group][head_dim]
  const std::int32_t* tail;
  std::int32_t first;
  std::int32_t dense;
  std::int32_t length;
};

// Rows of one sequence, and the query heads that share one KV head.
struct AttentionTask {
  KvShape shape;
  int group;  // query heads per KV head
  float scale;
  const std::byte* base;      // tile t of the sequence is at base + tiles[t] * tile_bytes
  const std::int32_t* tiles;  // slot s is position s % 16 of tile s / 16
  const AttentionRow* rows;
  int num_rows;  // at most kAttentionRows
};

constexpr int kAttentionRows = 16;

struct Ops {
  const char* name;
  // y[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]; y may be x.
  void (*rms_norm)(const float* x, const float* weight, float eps, std::int64_t n, float* y);
  // Rotates the pairs (x[i], x[i + head_dim / 2]) of each head by the angle whose cosine and sine are given.
  void (*rope)(float* x, int heads, int head_dim, const float* cosine, const float* sine);
  // y[i] = gate[i] / (1 + exp(-gate[i])) * up[i]; y may be gate or up.
  void (*swiglu)(const float* gate, const float* up, std::int64_t n, float* y);
  // y[i] += x[i].
  void (*add)(const float* x, std::int64_t n, float* y);
  // Writes one position's key and value of one head into a tile.
  void (*store_kv)(const float* key, const float* value, const KvShape&, std::byte* tile, int position);
  // Copies one position of a tile to a position of a tile (possibly the same one).
  void (*copy_kv)(const KvShape&, const std::byte* from, int from_position, std::byte* to, int to_position);
  // Softmax attention. scratch: attention_scratch() floats of the calling thread's own.
  void (*attention)(const AttentionTask&, float* scratch);
  // The k largest of x[n], largest first, the lower place first among equals: their places, and x less the logarithm of
  // the sum of e^x. 1 <= k <= n.
  void (*top_k)(const float* x, std::int64_t n, int k, std::int64_t* ids, float* logprobs);
};

// Floats of scratch that attention needs for a task of ``rows`` rows whose tails lie in ``tail_slots`` slots at most.
std::size_t attention_scratch(const KvShape&, int group, int rows, int tail_slots);

// The table of an ISA (for amx that of avx512). Throws std::invalid_argument for one that this build lacks.
const Ops& ops_for(Isa isa);

}  // namespace outrider
