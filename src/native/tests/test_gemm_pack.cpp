// Packing: every GGUF type against its formula, bit for bit; the neutral form; the quantisers.
#include <cmath>
#include <cstring>
#include <functional>

#include "check.h"
#include "gemm_cases.h"

namespace outrider::test {
namespace {

using Bytes = std::vector<std::uint8_t>;

float half_at(const std::uint8_t* p) {
  std::uint16_t value;
  std::memcpy(&value, p, 2);
  return half_to_float(value);
}

struct KScale {
  int scale, min;
};

// The 6-bit scale and minimum of group g, from the 12 bytes they are packed into.
KScale k_scale(const std::uint8_t* p, int g) {
  if (g < 4) return {p[g] & 63, p[g + 4] & 63};
  return {(p[g + 4] & 15) | (p[g - 4] >> 6) << 4, (p[g + 4] >> 4) | (p[g] >> 6) << 4};
}

// A quantised type, and value i of a block by the definition of its format.
struct BlockCase {
  const char* name;
  GgmlType type;
  int values, bytes;
  std::vector<int> halves;  // where halves lie, which random bytes must not make infinite
  std::function<float(const std::uint8_t*, int)> value;
};

int nibble(const std::uint8_t* p, int i) { return i < 16 ? p[i] & 15 : p[i - 16] >> 4; }
int k_nibble(const std::uint8_t* p, int i) { return p[i / 64 * 32 + i % 32] >> (i % 64 < 32 ? 0 : 4) & 15; }
int bit(const std::uint8_t* p, int i) { return p[i / 8] >> (i % 8) & 1; }

const std::vector<BlockCase>& block_cases() {
  using B = const std::uint8_t*;
  static const std::vector<BlockCase> cases = {
      {"q4_0",
       GgmlType::q4_0,
       32,
       18,
       {0},
       [](B b, int i) { return half_at(b) * static_cast<float>(nibble(b + 2, i) - 8); }},
      {"q4_1",
       GgmlType::q4_1,
       32,
       20,
       {0, 2},
       [](B b, int i) { return half_at(b) * static_cast<float>(nibble(b + 4, i)) + half_at(b + 2); }},
      {"q5_0",
       GgmlType::q5_0,
       32,
       22,
       {0},
       [](B b, int i) { return half_at(b) * static_cast<float>((nibble(b + 6, i) | bit(b + 2, i) << 4) - 16); }},
      {"q5_1",
       GgmlType::q5_1,
       32,
       24,
       {0, 2},
       [](B b, int i) {
         return half_at(b) * static_cast<float>(nibble(b + 8, i) | bit(b + 4, i) << 4) + half_at(b + 2);
       }},
      {"q8_0",
       GgmlType::q8_0,
       32,
       34,
       {0},
       [](B b, int i) { return half_at(b) * static_cast<float>(static_cast<std::int8_t>(b[2 + i])); }},
      {"q4_k",
       GgmlType::q4_k,
       256,
       144,
       {0, 2},
       [](B b, int i) {
         const KScale s = k_scale(b + 4, i / 32);
         return half_at(b) * static_cast<float>(s.scale) * static_cast<float>(k_nibble(b + 16, i)) -
                half_at(b + 2) * static_cast<float>(s.min);
       }},
      {"q5_k",
       GgmlType::q5_k,
       256,
       176,
       {0, 2},
       [](B b, int i) {
         const KScale s = k_scale(b + 4, i / 32);
         const int code = k_nibble(b + 48, i) | (b[16 + i % 32] >> (i / 32) & 1) << 4;
         return half_at(b) * static_cast<float>(s.scale) * static_cast<float>(code) -
                half_at(b + 2) * static_cast<float>(s.min);
       }},
      {"q6_k",
       GgmlType::q6_k,
       256,
       210,
       {208},
       [](B b, int i) {
         const int half = i / 128, j = i % 128;
         const int low = b[half * 64 + j % 64] >> (j < 64 ? 0 : 4) & 15;
         const int high = b[128 + half * 32 + j % 32] >> (j / 32 * 2) & 3;
         const float scale = half_at(b + 208) * static_cast<float>(static_cast<std::int8_t>(b[192 + i / 16]));
         return scale * static_cast<float>((low | high << 4) - 32);
       }},
  };
  return cases;
}

Bytes random_blocks(const BlockCase& c, std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(static_cast<std::size_t>(count * c.bytes));
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
  for (std::int64_t block = 0; block < count; ++block) {
    for (const int at : c.halves) bytes[static_cast<std::size_t>(block * c.bytes + at + 1)] &= 0xb3;  // below 2^-2
  }
  return bytes;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void check_gguf_blocks() {
  ThreadPool pool(2);
  for (const BlockCase& c : block_cases()) {
    const std::int64_t n = 37, k = 512, blocks = k / c.values;
    const Bytes bytes = random_blocks(c, n * blocks, 1);
    CHECK_THAT(gguf_row_bytes(c.type, k) == static_cast<std::size_t>(blocks * c.bytes), c.name);
    std::vector<std::int64_t> reversed(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) reversed[static_cast<std::size_t>(i)] = n - 1 - i;
    const PackedMatrix plain = pack_gguf(c.type, bytes.data(), n, k, {}, pool);
    const PackedMatrix permuted = pack_gguf(c.type, bytes.data(), n, k, reversed, pool);
    std::vector<float> expected, expected_permuted;
    for (std::int64_t row = 0; row < n; ++row) {
      for (int j = 0; j < k; ++j) {
        const auto value = [&](std::int64_t r) {
          return c.value(bytes.data() + (r * blocks + j / c.values) * c.bytes, j % c.values);
        };
        expected.push_back(value(row));
        expected_permuted.push_back(value(n - 1 - row));
      }
    }
    CHECK_THAT(same_bits(dequantized(plain), expected), c.name);
    CHECK_THAT(same_bits(dequantized(permuted), expected_permuted), std::string(c.name) + " permuted");
  }
}

void check_gguf_floats() {
  ThreadPool pool(1);
  const std::vector<float> source = random_rows(3, 64, 2);
  std::vector<std::uint16_t> halves, bf16;
  std::vector<float> expected, expected_halves;
  for (const float value : source) {
    halves.push_back(float_to_half(value));
    bf16.push_back(float_to_bf16(value));
    expected.push_back(bf16_to_float(bf16.back()));
    expected_halves.push_back(bf16_to_float(float_to_bf16(half_to_float(halves.back()))));
  }
  CHECK(same_bits(dequantized(pack_gguf(GgmlType::f32, source.data(), 3, 64, {}, pool)), expected));
  CHECK(same_bits(dequantized(pack_gguf(GgmlType::bf16, bf16.data(), 3, 64, {}, pool)), expected));
  CHECK(same_bits(dequantized(pack_gguf(GgmlType::f16, halves.data(), 3, 64, {}, pool)), expected_halves));
}

void check_neutral_form(WeightFormat format, bool has_min, bool halves) {
  ThreadPool pool(2);
  const std::int64_t n = 45, k = 96;
  std::mt19937_64 random(3);
  const int bits = format_bits(format), low = has_min && bits < 8 ? 0 : -(1 << (bits - 1));
  std::vector<std::int8_t> q(static_cast<std::size_t>(n * k));
  std::vector<float> scale(q.size() / kGroup), min(scale.size()), expected;
  for (auto& value : q) value = static_cast<std::int8_t>(low + static_cast<int>(random() % (1u << bits)));
  for (std::size_t i = 0; i < scale.size(); ++i) {
    scale[i] = static_cast<float>(1 + random() % 1000) / (halves ? 1024.0f : 1000.0f);
    min[i] = -static_cast<float>(random() % 1000) / 1024.0f;
  }
  for (std::size_t i = 0; i < q.size(); ++i) {
    expected.push_back(scale[i / kGroup] * static_cast<float>(q[i]));
    if (has_min) expected.back() += min[i / kGroup];
  }
  const PackedMatrix matrix =
      pack({format, n, k, q.data(), scale.data(), has_min ? min.data() : nullptr, nullptr}, pool);
  CHECK_THAT(same_bits(dequantized(matrix), expected), describe(matrix.layout()));
  CHECK_THAT(matrix.layout().scales == (halves ? ScaleKind::f16 : ScaleKind::f32), describe(matrix.layout()));
}

// Uniform quantisation of Gaussian groups of 32: 8 bits with a range of 2 absmax leave about 0.6% of the norm, 4 bits
// with a minimum about 8%; rounding to bf16, 2^-9 at most.
void check_quantizers() {
  ThreadPool pool(2);
  const std::int64_t n = 64, k = 1024;
  std::mt19937_64 random(4);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<float> weights(static_cast<std::size_t>(n * k));
  for (float& w : weights) w = normal(random);
  const auto quantize = [&](WeightFormat format) {
    const QuantizedWeights result = quantize_weights(format, FloatType::f32, weights.data(), n, k, {}, pool);
    const std::vector<double> exact(weights.begin(), weights.end());
    CHECK(std::fabs(relative_error(dequantized(result.matrix), exact) - result.relative_error) < 1e-9);
    return result.relative_error;
  };
  CHECK(quantize(WeightFormat::bf16) < 0.002);
  CHECK(quantize(WeightFormat::int8) < 0.007);
  CHECK(quantize(WeightFormat::int4) < 0.085);

  std::fill(weights.begin(), weights.begin() + k, 0.0f);  // a row of zeros, and one that is constant
  std::fill(weights.begin() + k, weights.begin() + 2 * k, 0.5f);
  for (const WeightFormat format : {WeightFormat::int8, WeightFormat::int4}) {
    const std::vector<float> w =
        dequantized(quantize_weights(format, FloatType::f32, weights.data(), n, k, {}, pool).matrix);
    CHECK(w[0] == 0.0f && std::fabs(w[static_cast<std::size_t>(k)] - 0.5f) < 0.5f / 127);
  }

  weights[5] = std::numeric_limits<float>::quiet_NaN();
  CHECK(throws<std::invalid_argument>([&] { quantize(WeightFormat::int8); }));
  CHECK(throws<std::invalid_argument>([&] { quantize(WeightFormat::int6); }));
}

void check_errors() {
  ThreadPool pool(1);
  const Bytes bytes(4096);
  CHECK(throws<std::invalid_argument>([&] { pack_gguf(GgmlType::q4_k, bytes.data(), 1, 128, {}, pool); }));
  CHECK(throws<std::invalid_argument>([&] { pack_gguf(static_cast<GgmlType>(10), bytes.data(), 1, 256, {}, pool); }));
  const std::int64_t one_row[] = {0};
  CHECK(throws<std::invalid_argument>([&] { pack_gguf(GgmlType::q4_0, bytes.data(), 2, 32, one_row, pool); }));
  CHECK(
      throws<std::invalid_argument>([] { PackedLayout{WeightFormat::int6, ScaleKind::f16, false, 32, 256}.check(); }));
  const PackedMatrix matrix = pack_gguf(GgmlType::q4_0, bytes.data(), 2, 32, {}, pool);
  const std::int64_t beyond[] = {2};
  float out[32];
  CHECK(throws<std::out_of_range>([&] { matrix.dequantize(beyond, out); }));
  CHECK(throws<std::invalid_argument>([&] {
    PackedMatrix(matrix.layout(), std::shared_ptr<const std::uint8_t>(std::shared_ptr<void>(), matrix.data() + 1));
  }));
}

void check_halves() {
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto half = static_cast<std::uint16_t>(i);
    const float value = half_to_float(half);
    if (std::isnan(value)) {
      CHECK(std::isnan(half_to_float(float_to_half(value))));
      continue;
    }
    CHECK(float_to_half(value) == half);
    // Ties go to the even neighbour: the midpoint of this half and the next away from zero.
    if ((half & 0x7fff) < 0x7bff) {
      const float next = half_to_float(static_cast<std::uint16_t>(half + 1));
      CHECK(float_to_half(value + (next - value) / 2) == (half % 2 == 0 ? half : half + 1));
    }
  }
}

}  // namespace
}  // namespace outrider::test

int main() {
  using namespace outrider::test;
  using outrider::WeightFormat;
  check_halves();
  check_gguf_blocks();
  check_gguf_floats();
  for (const WeightFormat format : {WeightFormat::int4, WeightFormat::int5, WeightFormat::int8}) {
    for (const bool has_min : {false, true}) {
      for (const bool halves : {false, true}) check_neutral_form(format, has_min, halves);
    }
  }
  check_quantizers();
  check_errors();
  return report();
}
