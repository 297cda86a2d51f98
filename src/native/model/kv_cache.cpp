#include "outrider/kv_cache.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "outrider/errors.h"

namespace outrider {

void KvCacheShape::check() const {
  if (layers < 1 || kv_heads < 1 || pages < 1 || max_context < 1)
    throw std::invalid_argument("a KV cache needs at least one layer, head, page and position");
  if (page_size < kTile || page_size % kTile != 0)
    throw std::invalid_argument("page_size=" + std::to_string(page_size) + " must be a multiple of " +
                                std::to_string(kTile));
  if (head.head_dim < 2 || head.head_dim % 2 != 0)
    throw std::invalid_argument("head_dim=" + std::to_string(head.head_dim) + " must be even");
  if (pages * (page_size / kTile) > INT32_MAX) throw std::invalid_argument("the KV cache has too many pages");
}

KvCache::KvCache(const KvCacheShape& shape) : shape_(shape) {
  shape.check();
  const std::size_t tiles = static_cast<std::size_t>(shape.pages) * (shape.page_size / kTile);
  storage_ = Buffer(tiles * shape.head.tile_bytes() * shape.layers * shape.kv_heads);
  for (std::int64_t page = shape.pages; page-- > 0;) free_.push_back(static_cast<std::int32_t>(page));
  references_.assign(static_cast<std::size_t>(shape.pages), 0);
  retained_.assign(static_cast<std::size_t>(shape.pages), 0);
}

const KvCache::Sequence& KvCache::at(int sequence) const {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) throw std::invalid_argument("sequence " + std::to_string(sequence) + " is not open");
  return found->second;
}
KvCache::Sequence& KvCache::at(int sequence) { return const_cast<Sequence&>(std::as_const(*this).at(sequence)); }

int KvCache::open(std::span<const std::int32_t> pages) {
  for (std::int32_t page : pages)
    if (!is_full(page)) throw std::invalid_argument("page " + std::to_string(page) + " is not a full page");
  Sequence s;
  for (std::int32_t page : pages) {
    ++references_[page];
    add_page(s, page);
  }
  s.length = static_cast<int>(pages.size()) * shape_.page_size;
  sequences_.emplace(next_, std::move(s));
  return next_++;
}

void KvCache::close(int sequence) {
  resize(at(sequence), 0);
  sequences_.erase(sequence);
}

std::span<const std::int32_t> KvCache::full_pages(int sequence) const {
  const Sequence& s = at(sequence);
  return std::span(s.pages).first(static_cast<std::size_t>(s.length / shape_.page_size));
}

void KvCache::retain(std::span<const std::int32_t> pages) {
  for (std::int32_t page : pages)
    if (!is_full(page)) throw std::invalid_argument("page " + std::to_string(page) + " is not a full page");
  for (std::int32_t page : pages) {
    ++references_[page];
    ++retained_[page];
  }
}

void KvCache::release(std::span<const std::int32_t> pages) {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const std::int32_t page = pages[i];
    const auto times = std::count(pages.begin(), pages.begin() + static_cast<std::ptrdiff_t>(i) + 1, page);
    if (page < 0 || page >= shape_.pages || retained_[page] < times)
      throw std::invalid_argument("page " + std::to_string(page) + " is not retained");
  }
  for (std::int32_t page : pages) {
    --retained_[page];
    drop_reference(page);
  }
}

// Whether committed rows fill a page, as they do for ever once it is retained.
bool KvCache::is_full(std::int32_t page) const {
  if (page < 0 || page >= shape_.pages) return false;
  if (retained_[page] > 0) return true;
  return std::any_of(sequences_.begin(), sequences_.end(), [&](const auto& entry) {
    const std::span<const std::int32_t> full = full_pages(entry.first);
    return std::find(full.begin(), full.end(), page) != full.end();
  });
}

// Returns the depth of the deepest of the new rows, the first row after the prefix having depth 0.
int KvCache::check_rows(const Sequence& s, std::span<const std::int32_t> parents) const {
  const auto old = static_cast<std::int32_t>(s.parents.size());
  std::vector<std::int32_t> depths;
  int deepest = -1;
  for (std::int32_t parent : parents) {
    const auto row = old + static_cast<std::int32_t>(depths.size());
    if (parent < kCommitted || parent >= row)
      throw std::invalid_argument("row " + std::to_string(row) + " has parent " + std::to_string(parent) +
                                  "; parents come before their children");
    const int depth = parent == kCommitted ? 0 : (parent < old ? s.depths[parent] : depths[parent - old]) + 1;
    depths.push_back(depth);
    deepest = std::max(deepest, depth);
  }
  return deepest;
}

void KvCache::append(std::span<const NewRows> segments) {
  std::int64_t needed = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const NewRows& segment = segments[i];
    for (std::size_t j = 0; j < i; ++j)
      if (segments[j].sequence == segment.sequence)
        throw std::invalid_argument("sequence " + std::to_string(segment.sequence) + " is named twice");
    const Sequence& s = at(segment.sequence);
    const int deepest = check_rows(s, segment.parents);
    if (s.length + deepest >= shape_.max_context)
      throw ContextTooLong("a row at position " + std::to_string(s.length + deepest) + " lies beyond the context of " +
                           std::to_string(shape_.max_context) + " tokens");
    needed += pages_for(s.length + static_cast<std::int64_t>(s.parents.size() + segment.parents.size())) -
              static_cast<std::int64_t>(s.pages.size());
  }
  if (needed > free_pages())
    throw KvCacheFull("the KV cache has " + std::to_string(free_pages()) + " free pages, and this forward pass needs " +
                      std::to_string(needed));
  for (const NewRows& segment : segments) {
    Sequence& s = at(segment.sequence);
    for (std::int32_t parent : segment.parents) {
      const auto row = static_cast<std::int32_t>(s.parents.size());
      const std::int32_t depth = parent == kCommitted ? 0 : s.depths[parent] + 1;
      const std::int32_t above = parent == kCommitted ? 0 : s.dense[parent];
      s.parents.push_back(parent);
      s.depths.push_back(depth);
      s.dense.push_back(above == depth && depth == row ? depth + 1 : above);
    }
    resize(s, s.length + static_cast<std::int64_t>(s.parents.size()));
  }
}

void KvCache::retract(int sequence, int rows) {
  Sequence& s = at(sequence);
  const std::size_t left = s.parents.size() - static_cast<std::size_t>(rows);
  s.parents.resize(left);
  s.depths.resize(left);
  s.dense.resize(left);
  resize(s, s.length + static_cast<std::int64_t>(left));
}

void KvCache::commit(int sequence, std::span<const std::int32_t> rows, const Ops& ops) {
  Sequence& s = at(sequence);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] < 0 || rows[i] >= static_cast<std::int32_t>(s.parents.size()))
      throw std::invalid_argument("row " + std::to_string(rows[i]) + " is not pending");
    if (s.parents[rows[i]] != (i == 0 ? kCommitted : rows[i - 1]))
      throw std::invalid_argument("the rows to commit are not a path: row " + std::to_string(rows[i]) +
                                  " does not follow the one before it");
  }
  // Parents come before their children, so rows[i] >= i: going up, a slot is read before it is written over.
  for (std::size_t i = 0; i < rows.size(); ++i) move(s, s.length + rows[i], s.length + static_cast<int>(i), ops);
  s.length += static_cast<int>(rows.size());
  drop_pending(s);
}

void KvCache::truncate(int sequence, int length) {
  Sequence& s = at(sequence);
  if (length < 0 || length > s.length)
    throw std::invalid_argument("cannot truncate a prefix of " + std::to_string(s.length) + " tokens to " +
                                std::to_string(length));
  if (length % shape_.page_size != 0 && references_[s.pages[length / shape_.page_size]] > 1)
    throw std::invalid_argument("cannot truncate to " + std::to_string(length) +
                                " tokens: that lies inside a page that others share");
  s.length = length;
  drop_pending(s);
}

void KvCache::drop_pending(Sequence& s) {
  s.parents.clear();
  s.depths.clear();
  s.dense.clear();
  resize(s, s.length);
}

void KvCache::resize(Sequence& s, std::int64_t slots) {
  const auto pages = static_cast<std::size_t>(pages_for(slots));
  while (s.pages.size() > pages) {
    drop_reference(s.pages.back());
    s.pages.pop_back();
  }
  s.tiles.resize(s.pages.size() * static_cast<std::size_t>(shape_.page_size / kTile));
  while (s.pages.size() < pages) {
    ++references_[free_.back()];
    add_page(s, free_.back());
    free_.pop_back();
  }
}

void KvCache::add_page(Sequence& s, std::int32_t page) {
  const int per_page = shape_.page_size / kTile;
  s.pages.push_back(page);
  for (int tile = 0; tile < per_page; ++tile) s.tiles.push_back(page * per_page + tile);
}

void KvCache::drop_reference(std::int32_t page) {
  if (--references_[page] == 0) free_.push_back(page);
}

void KvCache::move(const Sequence& s, int from_slot, int to_slot, const Ops& ops) {
  if (from_slot == to_slot) return;
  for (int layer = 0; layer < shape_.layers; ++layer)
    for (int head = 0; head < shape_.kv_heads; ++head)
      ops.copy_kv(shape_.head, tile(layer, head, s.tiles[from_slot / kTile]), from_slot % kTile,
                  tile(layer, head, s.tiles[to_slot / kTile]), to_slot % kTile);
}

RowPlace KvCache::place(int sequence, int row) const {
  const Sequence& s = at(sequence);
  return {s.length + s.depths[row], s.length + row, s.length + s.dense[row]};
}

void KvCache::append_tail(int sequence, int row, std::vector<std::int32_t>& slots) const {
  const Sequence& s = at(sequence);
  const std::size_t start = slots.size();
  const std::int32_t dense = s.dense[row];
  for (std::int32_t ancestor = row; ancestor != kCommitted && s.depths[ancestor] >= dense;
       ancestor = s.parents[ancestor])
    slots.push_back(s.length + ancestor);
  std::reverse(slots.begin() + static_cast<std::ptrdiff_t>(start), slots.end());
}

std::byte* KvCache::base(int layer, int kv_head) {
  const std::size_t tiles = static_cast<std::size_t>(shape_.pages) * (shape_.page_size / kTile);
  const std::size_t region = static_cast<std::size_t>(layer) * shape_.kv_heads + kv_head;
  return reinterpret_cast<std::byte*>(storage_.data()) + region * tiles * shape_.head.tile_bytes();
}

namespace {

float element(const KvShape& shape, const std::byte* data, std::size_t index) {
  float value = 0.0f;
  if (shape.type == KvType::f32) {
    std::memcpy(&value, data + 4 * index, 4);
  } else {
    std::uint16_t half = 0;
    std::memcpy(&half, data + 2 * index, 2);
    const std::uint32_t bits = std::uint32_t{half} << 16;
    std::memcpy(&value, &bits, 4);
  }
  return value;
}

}  // namespace

void KvCache::read(int sequence, int layer, int kv_head, int slot, float* key, float* value) {
  const Sequence& s = at(sequence);
  if (layer < 0 || layer >= shape_.layers || kv_head < 0 || kv_head >= shape_.kv_heads || slot < 0 ||
      slot >= s.length + pending(sequence))
    throw std::invalid_argument("there is no such slot");
  const KvShape& head = shape_.head;
  const std::byte* data = tile(layer, kv_head, s.tiles[slot / kTile]);
  const auto position = static_cast<std::size_t>(slot % kTile);
  for (int d = 0; d < head.head_dim; ++d) {
    const std::size_t index = head.type == KvType::f32 ? std::size_t{kTile} * d + position
                                                       : (std::size_t{kTile} * (d / 2) + position) * 2 + d % 2;
    key[d] = element(head, data, index);
    value[d] = element(head, data + head.key_bytes(), position * head.value_columns() + d);
  }
}

void KvCache::check_integrity() const {
  std::vector<std::int32_t> holders = retained_, free(holders.size(), 0);
  for (std::int32_t page : free_) ++free.at(page);
  for (const auto& [handle, s] : sequences_) {
    for (std::int32_t page : s.pages) ++holders.at(page);
    const auto slots = static_cast<std::int64_t>(s.length) + static_cast<std::int64_t>(s.parents.size());
    if (static_cast<std::int64_t>(s.pages.size()) != pages_for(slots))
      throw std::logic_error("sequence " + std::to_string(handle) + " holds a wrong number of pages");
    for (std::size_t i = static_cast<std::size_t>(s.length / shape_.page_size); i < s.pages.size(); ++i)
      if (references_[s.pages[i]] != 1)
        throw std::logic_error("sequence " + std::to_string(handle) + " shares a page that it may write to");
    if (s.depths.size() != s.parents.size() || s.dense.size() != s.parents.size())
      throw std::logic_error("sequence " + std::to_string(handle) + " counts its pending rows wrongly");
  }
  for (std::size_t page = 0; page < holders.size(); ++page) {
    if (holders[page] != references_[page])
      throw std::logic_error("a page has " + std::to_string(holders[page]) + " holders and counts " +
                             std::to_string(references_[page]));
    if (free[page] != (holders[page] == 0 ? 1 : 0))
      throw std::logic_error("a page with " + std::to_string(holders[page]) + " holders is free " +
                             std::to_string(free[page]) + " times");
  }
}

}  // namespace outrider
