// The paged KV cache: for each sequence a committed prefix and the rows that are still pending.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "outrider/buffer.h"
#include "outrider/ops.h"

namespace outrider {

struct KvCacheShape {
  int layers;
  int kv_heads;
  KvShape head;
  std::int64_t pages;
  int page_size;    // positions, a multiple of kTile
  int max_context;  // longest sequence, pending rows included by their depth

  void check() const;  // throws std::invalid_argument
};

// Rows to append to one sequence: for each the number of its parent among the pending rows, or kCommitted.
struct NewRows {
  int sequence;
  std::span<const std::int32_t> parents;
};

constexpr std::int32_t kCommitted = -1;

// Where a pending row stands in its sequence.
struct RowPlace {
  std::int32_t position;
  std::int32_t slot;
  std::int32_t dense;  // positions below this lie in the slot of the same number (see AttentionRow)
};

// A sequence's slots are numbered through its pages: committed position p lies in slot p, pending row i in slot
// length + i. A chain that is accepted from its start therefore stays where it was written; `commit` moves other rows.
//
// Pages that committed rows fill may be shared: by sequences opened over them, and by whoever retains them. Every
// holder has a reference, and a page is free again when the last one is gone. Nothing is written to a shared page: rows
// are written behind the prefix only, and `truncate` refuses to end amid one.
class KvCache {
 public:
  explicit KvCache(const KvCacheShape&);

  const KvCacheShape& shape() const { return shape_; }

  // A sequence whose prefix is ``pages``, all of them full; empty without.
  int open(std::span<const std::int32_t> pages = {});
  void close(int sequence);
  // The pages that a sequence's prefix fills, in order.
  std::span<const std::int32_t> full_pages(int sequence) const;
  // One more reference to each of these pages, and one less. Pages to retain must be full ones of open sequences, or
  // retained already; those to release must be retained. All or nothing: throws std::invalid_argument.
  void retain(std::span<const std::int32_t> pages);
  void release(std::span<const std::int32_t> pages);

  // Appends pending rows to several sequences, each named once. All or nothing: throws KvCacheFull, ContextTooLong or
  // std::invalid_argument and changes nothing.
  void append(std::span<const NewRows>);
  // Takes the latest ``rows`` pending rows back (a forward pass that failed).
  void retract(int sequence, int rows);
  // The pending rows ``rows``, a path from the prefix down, become prefix; every other pending row is dropped.
  void commit(int sequence, std::span<const std::int32_t> rows, const Ops&);
  // Throws std::invalid_argument if the prefix is shorter already, or if ``length`` lies inside a shared page.
  void truncate(int sequence, int length);

  int length(int sequence) const { return at(sequence).length; }
  int pending(int sequence) const { return static_cast<int>(at(sequence).parents.size()); }
  std::int64_t free_pages() const { return static_cast<std::int64_t>(free_.size()); }

  RowPlace place(int sequence, int row) const;
  // Appends to ``slots`` those of positions dense … position of a pending row.
  void append_tail(int sequence, int row, std::vector<std::int32_t>& slots) const;
  // Tile of 16 slots -> tile number relative to `base`, for the sequence's pages in order.
  std::span<const std::int32_t> tiles(int sequence) const { return at(sequence).tiles; }
  std::byte* base(int layer, int kv_head);
  std::byte* tile(int layer, int kv_head, std::int32_t number) {
    return base(layer, kv_head) + static_cast<std::size_t>(number) * shape_.head.tile_bytes();
  }

  // One slot's key and value of one head, [head_dim] each, as float32: for tests.
  void read(int sequence, int layer, int kv_head, int slot, float* key, float* value);

  // Throws std::logic_error if pages are lost, shared or counted wrongly.
  void check_integrity() const;

 private:
  struct Sequence {
    int length = 0;
    std::vector<std::int32_t> pages, tiles;
    std::vector<std::int32_t> parents, depths, dense;  // of the pending rows; dense counts from the prefix on
  };

  const Sequence& at(int sequence) const;
  Sequence& at(int sequence);
  std::int64_t pages_for(std::int64_t slots) const { return (slots + shape_.page_size - 1) / shape_.page_size; }
  int check_rows(const Sequence&, std::span<const std::int32_t> parents) const;
  void resize(Sequence&, std::int64_t slots);
  void move(const Sequence&, int from_slot, int to_slot, const Ops&);
  void drop_pending(Sequence&);
  void add_page(Sequence&, std::int32_t page);
  void drop_reference(std::int32_t page);
  bool is_full(std::int32_t page) const;

  KvCacheShape shape_;
  Buffer storage_;
  std::vector<std::int32_t> free_;        // pages, the lowest last
  std::vector<std::int32_t> references_;  // by page: sequences that hold it, and times it is retained
  std::vector<std::int32_t> retained_;    // by page: the latter alone
  std::unordered_map<int, Sequence> sequences_;
  int next_ = 0;
};

}  // namespace outrider
