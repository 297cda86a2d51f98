// Pages, pending rows and commits of the KV cache: what lies where, and what is refused.
#include <algorithm>
#include <random>
#include <vector>

#include "outrider/errors.h"
#include "outrider/kv_cache.h"
#include "tests/check.h"

namespace outrider {
namespace {

using Ints = std::vector<std::int32_t>;

const KvCacheShape kShape{2, 2, {KvType::bf16, 16}, 6, 16, 80};

void append(KvCache& cache, int sequence, const Ints& parents) {
  const NewRows rows{sequence, parents};
  cache.append({&rows, 1});
}

Ints tail(const KvCache& cache, int sequence, int row) {
  Ints slots;
  cache.append_tail(sequence, row, slots);
  return slots;
}

void chains_stay_dense() {
  KvCache cache(kShape);
  const int s = cache.open();
  append(cache, s, {-1, 0, 1});
  append(cache, s, {2});
  const RowPlace place = cache.place(s, 3);
  CHECK(place.position == 3 && place.slot == 3 && place.dense == 4);
  CHECK(tail(cache, s, 3).empty());
}

void trees_have_tails() {
  KvCache cache(kShape);
  const int s = cache.open();
  append(cache, s, {-1, 0});
  cache.commit(s, Ints{0, 1}, ops_for(Isa::portable));
  // Rows 0 and 1 are a chain; 2 hangs off 0, and 3 off 2; 4 is a second child of the prefix.
  append(cache, s, {-1, 0, 0, 2, -1});
  CHECK(cache.place(s, 1).dense == 4 && tail(cache, s, 1).empty());
  const RowPlace place = cache.place(s, 3);
  CHECK(place.position == 4 && place.slot == 5 && place.dense == 3);
  CHECK((tail(cache, s, 3) == Ints{4, 5}));
  CHECK(cache.place(s, 4).dense == 2 && (tail(cache, s, 4) == Ints{6}));
}

template <typename Error, typename F>
void refuses(KvCache& cache, F&& fn) {
  const auto before = cache.free_pages();
  CHECK(test::throws<Error>(fn));
  CHECK(cache.free_pages() == before);
  cache.check_integrity();
}

void refusals_change_nothing() {
  KvCache cache(kShape);
  const int s = cache.open(), t = cache.open();
  append(cache, s, Ints(70, -1));
  refuses<KvCacheFull>(cache, [&] {
    const Ints one{-1}, many(20, -1);
    const NewRows rows[] = {{s, one}, {t, many}};
    cache.append(rows);
  });
  CHECK(cache.pending(s) == 70 && cache.pending(t) == 0);
  refuses<std::invalid_argument>(cache, [&] { append(cache, t, {0}); });
  refuses<std::invalid_argument>(cache, [&] { append(cache, t, {-2}); });
  refuses<std::invalid_argument>(cache, [&] { append(cache, 99, {-1}); });
  refuses<std::invalid_argument>(cache, [&] {
    const Ints one{-1};
    const NewRows rows[] = {{t, one}, {t, one}};
    cache.append(rows);
  });
  refuses<std::invalid_argument>(cache, [&] { cache.commit(s, Ints{70}, ops_for(Isa::portable)); });
  refuses<std::invalid_argument>(cache, [&] { cache.commit(s, Ints{0, 1}, ops_for(Isa::portable)); });
  refuses<std::invalid_argument>(cache, [&] { cache.truncate(s, 1); });
  cache.close(s);
  Ints chain(81);
  for (int i = 0; i < 81; ++i) chain[static_cast<std::size_t>(i)] = i - 1;
  refuses<ContextTooLong>(cache, [&] { append(cache, t, chain); });
  CHECK(test::throws<std::invalid_argument>([] { KvCache({1, 1, {KvType::bf16, 16}, 4, 20, 64}); }));
}

void write(KvCache& cache, int sequence, int slot, float value) {
  const std::vector<float> key(16, value), row(16, -value);
  const std::int32_t tile = cache.tiles(sequence)[static_cast<std::size_t>(slot / kTile)];
  for (int layer = 0; layer < 2; ++layer)
    for (int head = 0; head < 2; ++head)
      ops_for(Isa::portable)
          .store_kv(key.data(), row.data(), cache.shape().head, cache.tile(layer, head, tile), slot % kTile);
}

bool holds(KvCache& cache, int sequence, int slot, float value) {
  bool all = true;
  for (int layer = 0; layer < 2; ++layer)
    for (int head = 0; head < 2; ++head) {
      std::vector<float> key(16), row(16);
      cache.read(sequence, layer, head, slot, key.data(), row.data());
      all = all && key == std::vector<float>(16, value) && row == std::vector<float>(16, -value);
    }
  return all;
}

// Random rounds over two sequences: after every commit the prefix holds the committed path and nothing else.
void random_rounds() {
  std::mt19937 random(7);
  const auto pick = [&](int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); };
  KvCache cache(kShape);
  const int sequences[] = {cache.open(), cache.open()};
  std::vector<float> text[2];
  float next = 1;
  for (int round = 0; round < 400; ++round) {
    const int i = pick(2), s = sequences[i];
    const int rows = 1 + pick(20);
    Ints parents;
    for (int row = 0; row < rows; ++row) parents.push_back(pick(row + 1) - 1);
    try {
      append(cache, s, parents);
    } catch (const KvCacheFull&) {
      text[i].resize(text[i].size() / 2);
      cache.truncate(s, static_cast<int>(text[i].size()));
      continue;
    }
    std::vector<float> values;
    for (int row = 0; row < rows; ++row) {
      values.push_back(static_cast<float>(static_cast<int>(next++) % 200));
      write(cache, s, cache.place(s, row).slot, values.back());
    }
    Ints path;
    for (int row = pick(rows); row != kCommitted; row = parents[static_cast<std::size_t>(row)]) path.push_back(row);
    if (pick(5) == 0) path.clear();
    std::reverse(path.begin(), path.end());
    for (int row : path) text[i].push_back(values[static_cast<std::size_t>(row)]);
    cache.commit(s, path, ops_for(Isa::portable));
    cache.check_integrity();
    for (int j = 0; j < 2; ++j) {
      CHECK(cache.length(sequences[j]) == static_cast<int>(text[j].size()));
      for (std::size_t p = 0; p < text[j].size(); ++p)
        CHECK(holds(cache, sequences[j], static_cast<int>(p), text[j][p]));
    }
  }
  for (int s : sequences) cache.close(s);
  CHECK(cache.free_pages() == kShape.pages);
}

void fill(KvCache& cache, int sequence, int rows, float first) {
  Ints chain(static_cast<std::size_t>(rows));
  for (int i = 0; i < rows; ++i) chain[static_cast<std::size_t>(i)] = i - 1;
  append(cache, sequence, chain);
  const int length = cache.length(sequence);
  for (int i = 0; i < rows; ++i) write(cache, sequence, length + i, first + static_cast<float>(i));
  for (std::int32_t& row : chain) ++row;
  cache.commit(sequence, chain, ops_for(Isa::portable));
}

void pages_are_shared() {
  KvCache cache(kShape);
  const int s = cache.open();
  fill(cache, s, 40, 1);
  const Ints pages(cache.full_pages(s).begin(), cache.full_pages(s).end());
  CHECK(pages.size() == 2);
  const int t = cache.open(pages);
  CHECK(cache.length(t) == 32 && cache.free_pages() == 3);
  for (int p = 0; p < 32; ++p) CHECK(holds(cache, t, p, static_cast<float>(1 + p)));
  fill(cache, t, 10, 100);
  cache.check_integrity();
  CHECK(holds(cache, s, 32, 33) && holds(cache, t, 32, 100));
  refuses<std::invalid_argument>(cache, [&] { cache.truncate(t, 20); });
  cache.truncate(t, 16);
  cache.check_integrity();
  cache.close(s);
  CHECK(cache.free_pages() == 5 && holds(cache, t, 15, 16));
  cache.truncate(t, 3);  // no longer shared
  cache.close(t);
  CHECK(cache.free_pages() == kShape.pages);
}

void retained_pages_outlive_their_sequence() {
  KvCache cache(kShape);
  const int s = cache.open();
  fill(cache, s, 36, 1);
  const Ints pages(cache.full_pages(s).begin(), cache.full_pages(s).end());
  const Ints last{cache.tiles(s)[2]};  // one tile a page here; this page is not full
  refuses<std::invalid_argument>(cache, [&] { cache.retain(last); });
  refuses<std::invalid_argument>(cache, [&] { cache.open(last); });
  refuses<std::invalid_argument>(cache, [&] { cache.release(pages); });
  cache.retain(pages);
  cache.close(s);
  cache.check_integrity();
  CHECK(cache.free_pages() == kShape.pages - 2);
  const int t = cache.open(pages);
  CHECK(holds(cache, t, 31, 32));
  refuses<std::invalid_argument>(cache, [&] { cache.release(Ints{pages[0], pages[0]}); });
  cache.release(pages);
  cache.check_integrity();
  CHECK(holds(cache, t, 0, 1));
  cache.close(t);
  CHECK(cache.free_pages() == kShape.pages);
  refuses<std::invalid_argument>(cache, [&] { cache.open(pages); });
}

// Sequences open over each other's pages, grow apart, shrink and close: what each of them wrote stays what it was.
void random_sharing() {
  std::mt19937 random(11);
  const auto pick = [&](std::size_t below) { return random() % below; };
  KvCache cache({2, 2, {KvType::bf16, 16}, 10, 16, 80});
  struct Text {
    int sequence;
    std::vector<float> values;
  };
  std::vector<Text> texts;
  float next = 1;
  for (int step = 0; step < 1500; ++step) {
    if (texts.empty() || (texts.size() < 4 && pick(6) == 0)) {
      Text text{cache.open(), {}};
      if (!texts.empty() && pick(4) != 0) {
        const Text& other = texts[pick(texts.size())];
        const auto full = cache.full_pages(other.sequence);
        const std::size_t pages = pick(full.size() + 1);
        cache.close(text.sequence);
        text.sequence = cache.open(full.first(pages));
        text.values.assign(other.values.begin(), other.values.begin() + static_cast<std::ptrdiff_t>(pages * 16));
      }
      texts.push_back(text);
    }
    Text& text = texts[pick(texts.size())];
    const int rows = 1 + static_cast<int>(pick(12));
    if (pick(12) == 0) {
      text.values.resize(text.values.size() / 16 * 16);
      cache.truncate(text.sequence, static_cast<int>(text.values.size()));
    } else if (text.values.size() + static_cast<std::size_t>(rows) <= 80) {
      try {
        fill(cache, text.sequence, rows, next);
        for (int i = 0; i < rows; ++i) text.values.push_back(next + static_cast<float>(i));
        next = next < 200 ? next + static_cast<float>(rows) : 1;
      } catch (const KvCacheFull&) {
        cache.close(text.sequence);
        std::swap(text, texts.back());
        texts.pop_back();
      }
    }
    cache.check_integrity();
    for (const Text& each : texts)
      for (std::size_t p = 0; p < each.values.size(); ++p)
        CHECK(holds(cache, each.sequence, static_cast<int>(p), each.values[p]));
  }
  for (const Text& text : texts) cache.close(text.sequence);
  CHECK(cache.free_pages() == 10);
}

}  // namespace
}  // namespace outrider

int main() {
  outrider::chains_stay_dense();
  outrider::trees_have_tails();
  outrider::refusals_change_nothing();
  outrider::random_rounds();
  outrider::pages_are_shared();
  outrider::retained_pages_outlive_their_sequence();
  outrider::random_sharing();
  return outrider::test::report();
}
