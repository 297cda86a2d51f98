"""Paged KV cache: one pool of slots for all layers, and each sequence's pages, committed length and pending rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.core.errors import KVCacheFullError, UsageError
from outrider.executors.base import COMMITTED


@dataclass
class SequenceKV:
    """Where one sequence's KV lies. Logical index i < length is a committed token, length + r is pending row r.

    pages: page numbers; logical index i lies in page ``pages[i // page_size]``.
    parents, depths: of each pending row; depth 0 follows the committed prefix. A row's position in the text is
        ``length + depth``.
    """

    pages: list[int] = field(default_factory=list)
    length: int = 0
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    @property
    def pending(self) -> int:
        return len(self.parents)

    def ancestry(self, row: int) -> list[int]:
        """Pending rows from the committed prefix down to ``row``, which is the last one."""
        path = []
        while row != COMMITTED:
            path.append(row)
            row = self.parents[row]
        return path[::-1]


Slots = slice | torch.Tensor
"""Slots of consecutive logical indices: a slice where the pages lie side by side, else a LongTensor."""


class KVCache:
    """The pool, and the sequences that live in it. A page that a committed prefix fills may have several holders.

    data: [layers, 2, kv_heads, slots, head_dim]; index 0 of the second axis holds keys, 1 values. Memory is taken from
    the system when first written.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.num_pages = pages
        self.data = torch.empty(layers, 2, kv_heads, self.num_pages * page_size, head_dim, dtype=dtype, device=device)
        self._free = np.ones(self.num_pages, dtype=bool)
        self._num_free = self.num_pages
        self._holders = [0] * pages
        self._retained = [0] * pages
        self._sequences: dict[int, SequenceKV] = {}
        self._next_handle = 0

    @property
    def free_pages(self) -> int:
        return self._num_free

    def open(self, pages: Sequence[int] = ()) -> int:
        """A new sequence over these full pages. Raises UsageError for a page that is not full."""
        self._check_full(pages)
        handle = self._next_handle
        self._next_handle += 1
        for page in pages:
            self._holders[page] += 1
        self._sequences[handle] = SequenceKV(list(pages), len(pages) * self.page_size)
        return handle

    def close(self, handle: int) -> None:
        self._release(self[handle], keep=0)
        del self._sequences[handle]

    def __getitem__(self, handle: int) -> SequenceKV:
        if handle not in self._sequences:
            raise UsageError(f"sequence {handle} is not open in this executor")
        return self._sequences[handle]

    def full_pages(self, seq: SequenceKV) -> list[int]:
        """The pages that the committed prefix fills."""
        return seq.pages[: seq.length // self.page_size]

    def retain(self, pages: Sequence[int]) -> None:
        """One more reference to each of these full pages. Raises UsageError, and changes nothing, for another page."""
        self._check_full(pages)
        for page in pages:
            self._holders[page] += 1
            self._retained[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference less. Raises UsageError, and changes nothing, for a page that is not retained as often."""
        for page, times in Counter(pages).items():
            if not 0 <= page < self.num_pages or self._retained[page] < times:
                raise UsageError(f"page {page} is not retained")
        for page in pages:
            self._retained[page] -= 1
            self._drop_reference(page)

    def may_end_at(self, seq: SequenceKV, length: int) -> bool:
        """Whether rows may be written behind ``length`` without writing to a page that others hold too."""
        return length % self.page_size == 0 or self._holders[seq.pages[length // self.page_size]] == 1

    def reserve(self, rows: Sequence[tuple[SequenceKV, int]]) -> None:
        """Give each sequence the pages it needs to hold that many more rows.

        Raises KVCacheFullError, and changes nothing, if the free pages do not suffice for all of them.
        """
        missing = [self._pages_for(seq.length + seq.pending + count) - len(seq.pages) for seq, count in rows]
        total = sum(max(n, 0) for n in missing)
        if total > self._num_free:
            raise KVCacheFullError(
                f"the KV cache has {self._num_free} free pages of {self.page_size} tokens, and {total} are needed"
            )
        for (seq, _), n in zip(rows, missing, strict=True):
            self._extend(seq, n)

    def trim(self, seq: SequenceKV) -> None:
        """Free the pages that neither committed tokens nor pending rows lie in."""
        self._release(seq, keep=self._pages_for(seq.length + seq.pending))

    def slots(self, seq: SequenceKV, start: int, stop: int) -> Slots:
        """Where the logical indices start … stop-1 lie."""
        first = seq.pages[0]
        if seq.pages == list(range(first, first + len(seq.pages))):
            base = first * self.page_size
            return slice(base + start, base + stop)
        return self._slots_of(seq, torch.arange(start, stop))

    def commit(self, seq: SequenceKV, rows: Sequence[int]) -> None:
        """Make the path ``rows`` part of the prefix, drop the other pending rows, and free what they took.

        A path's rows are numbered in ascending order, so row ``rows[i]`` moves from logical index ``length + rows[i]``
        down to ``length + i``; leading rows with ``rows[i] == i`` are where they belong. All moving rows of all layers
        are copied out before any is written, since a destination may be the source of a later row.
        """
        path = torch.tensor(rows, dtype=torch.long)
        settled = int((path == torch.arange(len(rows))).sum())
        if settled < len(rows):
            source = self._slots_of(seq, seq.length + path[settled:])
            moved = self.data.index_select(3, source)
            self.data[:, :, :, self.slots(seq, seq.length + settled, seq.length + len(rows))] = moved
        seq.length += len(rows)
        self._drop_pending(seq)

    def truncate(self, seq: SequenceKV, length: int) -> None:
        """Keep the first ``length`` committed tokens, drop all pending rows, and free what they took."""
        seq.length = length
        self._drop_pending(seq)

    def free_slots(self) -> torch.Tensor:
        """Slots of all free pages: what no sequence may ever read. For tests."""
        pages = torch.from_numpy(np.flatnonzero(self._free))
        return (pages[:, None] * self.page_size + torch.arange(self.page_size)).reshape(-1)

    def check_integrity(self) -> None:
        """Raise AssertionError if pages are lost, counted wrongly or shared where one may write, or rows disagree."""
        holders = Counter(page for seq in self._sequences.values() for page in seq.pages)
        for page in range(self.num_pages):
            held = holders[page] + self._retained[page]
            assert self._holders[page] == held, f"page {page} has {held} holders and counts {self._holders[page]}"
            assert bool(self._free[page]) == (held == 0), f"page {page} has {held} holders and is wrongly marked"
        assert self._num_free == int(self._free.sum()), "free pages are counted wrongly"
        for handle, seq in self._sequences.items():
            needed = self._pages_for(seq.length + seq.pending)
            assert len(seq.pages) == needed, f"sequence {handle} holds {len(seq.pages)} pages and needs {needed}"
            writable = seq.pages[seq.length // self.page_size :]
            assert all(self._holders[page] == 1 for page in writable), f"sequence {handle} may write to a shared page"
            assert len(seq.depths) == seq.pending, f"sequence {handle} has rows without depth"
            for row, parent in enumerate(seq.parents):
                assert COMMITTED <= parent < row, f"sequence {handle}: row {row} has parent {parent}"
                depth = 0 if parent == COMMITTED else seq.depths[parent] + 1
                assert seq.depths[row] == depth, f"sequence {handle}: row {row} has depth {seq.depths[row]}"

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _slots_of(self, seq: SequenceKV, indices: torch.Tensor) -> torch.Tensor:
        pages = torch.tensor(seq.pages, dtype=torch.long)
        slots = pages[indices // self.page_size] * self.page_size + indices % self.page_size
        return slots.to(self.data.device)

    def _drop_pending(self, seq: SequenceKV) -> None:
        seq.parents.clear()
        seq.depths.clear()
        self.trim(seq)

    def _extend(self, seq: SequenceKV, count: int) -> None:
        """Take ``count`` pages: those right after the last one while they are free, then from the largest gaps."""
        for _ in range(count):
            following = seq.pages[-1] + 1 if seq.pages else self.num_pages
            if following < self.num_pages and self._free[following]:
                page = following
            else:
                page = self._start_in_largest_gap(count)
            self._free[page] = False
            self._num_free -= 1
            self._holders[page] = 1
            seq.pages.append(page)

    def _start_in_largest_gap(self, count: int) -> int:
        """Where to start ``count`` pages: amid the largest gap, so that what lies before it can grow too."""
        edges = np.flatnonzero(np.diff(np.concatenate(([False], self._free, [False])).astype(np.int8)))
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        widest = int(lengths.argmax())
        start = int(starts[widest])
        return start if start == 0 else start + max(int(lengths[widest]) - count, 0) // 2

    def _release(self, seq: SequenceKV, keep: int) -> None:
        for page in seq.pages[keep:]:
            self._drop_reference(page)
        del seq.pages[keep:]

    def _drop_reference(self, page: int) -> None:
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free[page] = True
            self._num_free += 1

    def _check_full(self, pages: Sequence[int]) -> None:
        for page in pages:
            retained = 0 <= page < self.num_pages and self._retained[page]
            if not retained and all(page not in self.full_pages(seq) for seq in self._sequences.values()):
                raise UsageError(f"page {page} is not a full page of a sequence, nor retained")
