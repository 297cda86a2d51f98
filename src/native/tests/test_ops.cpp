// Row operations of every ISA against references in double, and attention against itself: a row alone and in company.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "outrider/ops.h"
#include "tests/check.h"

namespace outrider {
namespace {

using Random = std::mt19937;

std::vector<float> normals(std::size_t n, Random& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) value = normal(random);
  return values;
}

bool close(double have, double want, double tolerance) {
  return std::fabs(have - want) <= tolerance * (1.0 + std::fabs(want));
}

void test_rms_norm(const Ops& ops) {
  Random random(1);
  for (std::int64_t n : {1, 3, 16, 33, 64, 100, 576, 1000}) {
    const auto x = normals(static_cast<std::size_t>(n), random), weight = normals(static_cast<std::size_t>(n), random);
    std::vector<float> y(x.size());
    ops.rms_norm(x.data(), weight.data(), 1e-5f, n, y.data());
    double squares = 0;
    for (float v : x) squares += double{v} * v;
    for (std::size_t i = 0; i < x.size(); ++i)
      CHECK(close(y[i], x[i] / std::sqrt(squares / static_cast<double>(n) + 1e-5) * weight[i], 1e-6));
  }
}

void test_rope(const Ops& ops) {
  Random random(2);
  for (int head_dim : {2, 16, 64, 96, 128}) {
    const int heads = 3, half = head_dim / 2;
    const auto x = normals(static_cast<std::size_t>(heads * head_dim), random);
    std::vector<float> cosine, sine;
    for (int i = 0; i < half; ++i) {
      cosine.push_back(static_cast<float>(std::cos(0.3 * i)));
      sine.push_back(static_cast<float>(std::sin(0.3 * i)));
    }
    auto y = x;
    ops.rope(y.data(), heads, head_dim, cosine.data(), sine.data());
    for (int head = 0; head < heads; ++head)
      for (int i = 0; i < half; ++i) {
        const double a = x[head * head_dim + i], b = x[head * head_dim + half + i];
        CHECK(close(y[head * head_dim + i], a * cosine[i] - b * sine[i], 1e-6));
        CHECK(close(y[head * head_dim + half + i], b * cosine[i] + a * sine[i], 1e-6));
      }
  }
}

void test_swiglu(const Ops& ops) {
  Random random(3);
  for (std::size_t n : {1, 15, 16, 17, 96, 1000}) {
    auto gate = normals(n, random);
    const auto up = normals(n, random);
    const float extremes[] = {0.0f, -0.0f, 90.0f, -90.0f, 1000.0f, -1000.0f, 20.0f};
    for (std::size_t i = 0; i < std::min(n, std::size(extremes)); ++i) gate[i] = extremes[i];
    std::vector<float> y(n);
    ops.swiglu(gate.data(), up.data(), static_cast<std::int64_t>(n), y.data());
    for (std::size_t i = 0; i < n; ++i) CHECK(close(y[i], gate[i] / (1 + std::exp(-double{gate[i]})) * up[i], 1e-6));
    gate[n / 2] = std::nanf("");
    ops.swiglu(gate.data(), up.data(), static_cast<std::int64_t>(n), y.data());
    CHECK(std::isnan(y[n / 2]));
  }
}

// One head's keys and values in tiles, and the tile table that leads to them in a shuffled order.
struct Kv {
  Kv(KvShape shape, int slots, Random& random) : shape(shape) {
    const int count = (slots + kTile - 1) / kTile;
    tiles.resize(static_cast<std::size_t>(count));
    std::iota(tiles.begin(), tiles.end(), 0);
    std::shuffle(tiles.begin(), tiles.end(), random);
    memory.resize(static_cast<std::size_t>(count) * shape.tile_bytes());
    keys = normals(static_cast<std::size_t>(slots * shape.head_dim), random);
    values = normals(static_cast<std::size_t>(slots * shape.head_dim), random);
  }
  void store(const Ops& ops, int from_slot, int to_slot) {
    ops.store_kv(keys.data() + from_slot * shape.head_dim, values.data() + from_slot * shape.head_dim, shape,
                 memory.data() + static_cast<std::size_t>(tiles[to_slot / kTile]) * shape.tile_bytes(),
                 to_slot % kTile);
  }

  KvShape shape;
  std::vector<std::int32_t> tiles;
  std::vector<std::byte> memory;
  std::vector<float> keys, values;  // by position
};

float rounded(float x, KvType type) {
  if (type == KvType::f32) return x;
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

std::vector<double> reference(const Kv& kv, const float* q, int group, float scale, int first, int length) {
  const int d = kv.shape.head_dim;
  std::vector<double> out(static_cast<std::size_t>(group * d));
  for (int head = 0; head < group; ++head) {
    std::vector<double> weights;
    double best = -1e30, total = 0;
    for (int p = first; p < length; ++p) {
      double score = 0;
      for (int i = 0; i < d; ++i) score += double{q[head * d + i]} * rounded(kv.keys[p * d + i], kv.shape.type);
      weights.push_back(score * scale);
      best = std::max(best, weights.back());
    }
    for (double& w : weights) total += w = std::exp(w - best);
    for (int p = first; p < length; ++p)
      for (int i = 0; i < d; ++i)
        out[static_cast<std::size_t>(head * d + i)] +=
            weights[static_cast<std::size_t>(p - first)] / total * rounded(kv.values[p * d + i], kv.shape.type);
  }
  return out;
}

struct AttentionCase {
  KvShape shape;
  int group;
  int committed;  // positions in the slots of the same number
  int window;
};

// A chain of rows after the prefix, whose slots are either in order or scattered: together, then each alone.
void test_attention(const Ops& ops, const AttentionCase& c, bool scattered, Random& random) {
  constexpr int kRows = 13;
  const int total = c.committed + kRows, spare = 40, width = c.group * c.shape.head_dim;
  Kv kv(c.shape, total + spare, random);
  std::vector<std::int32_t> slots(kRows);
  std::iota(slots.begin(), slots.end(), c.committed);
  if (scattered) {
    std::vector<std::int32_t> places(kRows + spare);
    std::iota(places.begin(), places.end(), c.committed);
    std::shuffle(places.begin(), places.end(), random);
    std::copy_n(places.begin(), kRows, slots.begin());
  }
  for (int p = 0; p < c.committed; ++p) kv.store(ops, p, p);
  for (int r = 0; r < kRows; ++r) kv.store(ops, c.committed + r, slots[static_cast<std::size_t>(r)]);

  const auto q = normals(static_cast<std::size_t>(kRows * width), random);
  std::vector<float> together(q.size()), alone(q.size());
  std::vector<AttentionRow> rows;
  for (int r = 0; r < kRows; ++r) {
    const int length = c.committed + r + 1;
    rows.push_back({q.data() + r * width, together.data() + r * width, slots.data(),
                    c.window > 0 ? std::max(0, length - c.window) : 0, c.committed, length});
    if (!scattered && r % 2 == 0) rows.back().dense = length;  // in order: either way of saying so
  }
  const float scale = 1 / std::sqrt(static_cast<float>(c.shape.head_dim));
  std::vector<float> scratch(attention_scratch(c.shape, c.group, kRows, kRows + spare));
  const AttentionTask task{c.shape, c.group, scale, kv.memory.data(), kv.tiles.data(), rows.data(), kRows};
  ops.attention(task, scratch.data());
  for (int r = 0; r < kRows; ++r) {
    AttentionRow row = rows[static_cast<std::size_t>(r)];
    row.out = alone.data() + r * width;
    std::fill(scratch.begin(), scratch.end(), std::nanf(""));
    ops.attention({c.shape, c.group, scale, kv.memory.data(), kv.tiles.data(), &row, 1}, scratch.data());
    const auto want = reference(kv, row.q, c.group, scale, row.first, row.length);
    for (int i = 0; i < width; ++i) CHECK(close(row.out[i], want[static_cast<std::size_t>(i)], 2e-6));
  }
  CHECK(std::memcmp(together.data(), alone.data(), alone.size() * sizeof(float)) == 0);
}

void test_attention(const Ops& ops) {
  Random random(4);
  for (KvType type : {KvType::bf16, KvType::f32})
    for (int head_dim : {16, 64, 80, 128})
      for (int group : {1, 3, 7})
        for (int committed : {0, 5, 64, 130})
          for (int window : {0, 12, 70})
            for (bool scattered : {false, true})
              test_attention(ops, {{type, head_dim}, group, committed, window}, scattered, random);
}

void test_copy(const Ops& ops) {
  Random random(5);
  for (KvType type : {KvType::bf16, KvType::f32}) {
    Kv kv({type, 80}, 32, random);
    for (int p = 0; p < 32; ++p) kv.store(ops, p, p);
    auto expected = kv.memory;
    std::swap(expected, kv.memory);
    kv.store(ops, 20, 3);
    std::swap(expected, kv.memory);
    ops.copy_kv(kv.shape, kv.memory.data() + static_cast<std::size_t>(kv.tiles[1]) * kv.shape.tile_bytes(), 4,
                kv.memory.data() + static_cast<std::size_t>(kv.tiles[0]) * kv.shape.tile_bytes(), 3);
    CHECK(kv.memory == expected);
  }
}

}  // namespace
}  // namespace outrider

int main() {
  using namespace outrider;
  for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::amx}) {
    if (!isa_available(isa)) continue;
    const Ops& ops = ops_for(isa);
    test_rms_norm(ops);
    test_rope(ops);
    test_swiglu(ops);
    test_copy(ops);
    test_attention(ops);
  }
  return test::report();
}
