"""An executor that keeps the text itself in place of keys and values: page by page, and wary of every rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from outrider.core.errors import KVCacheFullError, UsageError
from outrider.executors.base import COMMITTED, Executor, ForwardOutput, Segment
from outrider.models.config import ModelConfig

Text = tuple[int, ...]


def last_token(layer: int, history: Sequence[int]) -> torch.Tensor:
    """A hidden state [8] that says what the row's own token is."""
    return torch.full((8,), float(history[-1]))


class FakeExecutor(Executor):
    """Logits and hidden states are functions of the tokens a row can see; a page holds the text up to its end.

    A page that is shared where it may be written, or found by another text than its own, shows in the text or fails an
    assertion. ``fail_at``: numbers of forward passes (from 1) that raise.
    """

    def __init__(
        self,
        config: ModelConfig,
        logits: Callable[[Sequence[int]], torch.Tensor],
        *,
        kv_tokens: int = 8192,
        max_context: int = 512,
        page_size: int = 1,
        hidden: Callable[[int, Sequence[int]], torch.Tensor] = last_token,
    ) -> None:
        self.config = config
        self._logits = logits
        self._hidden = hidden
        self._page_size = page_size
        self._num_pages = -(-kv_tokens // page_size)
        self._max_context = max_context
        self._free = list(range(self._num_pages))
        self._text_of: dict[int, Text] = {}
        self._holders: Counter[int] = Counter()
        self._retained: Counter[int] = Counter()
        self._pages: dict[int, list[int]] = {}
        self._committed: dict[int, list[int]] = {}
        self._pending: dict[int, list[tuple[int, int]]] = {}
        self._next = 0
        self.forwards = 0
        self.rows = 0
        self.largest_pass = 0
        self.fail_at: set[int] = set()

    # -- sequences and pages -------------------------------------------------------------------------------------------

    def open(self, pages: Sequence[int] = ()) -> int:
        for page, before in zip(pages, [-1, *pages], strict=False):
            if page not in self._text_of:
                raise UsageError(f"page {page} is not a full page")
            text = self._text_of[page]
            assert text[: -self._page_size] == (self._text_of[before] if before >= 0 else ()), "pages of other texts"
        self._next += 1
        self._pages[self._next] = list(pages)
        self._holders.update(pages)
        self._committed[self._next] = list(self._text_of[pages[-1]]) if pages else []
        self._pending[self._next] = []
        return self._next

    def close(self, seq: int) -> None:
        self._resize(seq, 0)
        del self._committed[seq], self._pending[seq], self._pages[seq]

    def full_pages(self, seq: int) -> list[int]:
        return self._pages[seq][: len(self._committed[seq]) // self._page_size]

    def retain(self, pages: Sequence[int]) -> None:
        for page in pages:
            if page not in self._text_of:
                raise UsageError(f"page {page} is not a full page")
        self._retained.update(pages)
        self._holders.update(pages)

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not self._retained[page]:
                raise UsageError(f"page {page} is not retained")
            self._retained[page] -= 1
            self._let_go(page)

    def _let_go(self, page: int) -> None:
        self._holders[page] -= 1
        if not self._holders[page]:
            self._text_of.pop(page, None)
            self._free.append(page)

    def _resize(self, seq: int, tokens: int) -> None:
        pages, needed = self._pages[seq], -(-tokens // self._page_size)
        while len(pages) > needed:
            self._let_go(pages.pop())
        while len(pages) < needed:
            pages.append(self._free.pop())
            self._holders[pages[-1]] = 1

    # -- forward and commit --------------------------------------------------------------------------------------------

    def history(self, seq: int, row: int) -> list[int]:
        path: list[int] = []
        while row != COMMITTED:
            token, row = self._pending[seq][row]
            path.append(token)
        return [*self._committed[seq], *reversed(path)]

    def forward(
        self, segments: Sequence[Segment], hidden_layers: Sequence[int] = (), features: torch.Tensor | None = None
    ) -> ForwardOutput:
        assert len({s.seq for s in segments}) == len(segments)
        self.forwards += 1
        if self.forwards in self.fail_at:
            raise RuntimeError("the machine is on fire")
        needed = sum(self._missing_pages(s.seq, len(s.tokens)) for s in segments)
        if needed > len(self._free):
            raise KVCacheFullError(f"{needed} pages are needed, {len(self._free)} are free")
        total = sum(len(s.tokens) for s in segments)
        self.rows += total
        self.largest_pass = max(self.largest_pass, total)
        rows: list[torch.Tensor] = []
        hidden: dict[int, list[torch.Tensor]] = {layer: [] for layer in hidden_layers}
        for segment in segments:
            first = len(self._pending[segment.seq])
            for i, (token, parent) in enumerate(zip(segment.tokens, segment.parents, strict=True)):
                assert COMMITTED <= parent < first + i
                self._pending[segment.seq].append((token, parent))
                assert len(self.history(segment.seq, first + i)) <= self._max_context
                for layer, states in hidden.items():
                    states.append(self.row_hidden(layer, segment.seq, first + i))
            self._resize(segment.seq, self.length(segment.seq) + self.pending(segment.seq))
            wanted = range(len(segment.tokens)) if segment.logits is None else segment.logits
            rows.extend(self.row_logits(segment.seq, first + i) for i in wanted)
        logits = torch.stack(rows) if rows else torch.empty(0, self.config.num_logits)
        return ForwardOutput(logits, {layer: torch.stack(states) for layer, states in hidden.items()})

    def row_logits(self, seq: int, row: int) -> torch.Tensor:
        return self._logits(self.history(seq, row))

    def row_hidden(self, layer: int, seq: int, row: int) -> torch.Tensor:
        return self._hidden(layer, self.history(seq, row))

    def _missing_pages(self, seq: int, rows: int) -> int:
        return -(-(self.length(seq) + self.pending(seq) + rows) // self._page_size) - len(self._pages[seq])

    def commit(self, seq: int, rows: Sequence[int]) -> None:
        parent = COMMITTED
        text = self._committed[seq]
        for row in rows:
            token, own_parent = self._pending[seq][row]
            assert own_parent == parent, "not a path"
            assert self._holders[self._pages[seq][len(text) // self._page_size]] == 1, "wrote to a shared page"
            text.append(token)
            if len(text) % self._page_size == 0:
                self._text_of[self._pages[seq][len(text) // self._page_size - 1]] = tuple(text)
            parent = row
        self._pending[seq].clear()
        self._resize(seq, len(text))

    def truncate(self, seq: int, length: int) -> None:
        if length % self._page_size:
            page = self._pages[seq][length // self._page_size]
            if self._holders[page] > 1:
                raise UsageError("that lies inside a shared page")
            self._text_of.pop(page, None)
        del self._committed[seq][length:]
        self._pending[seq].clear()
        self._resize(seq, length)

    def length(self, seq: int) -> int:
        return len(self._committed[seq])

    def pending(self, seq: int) -> int:
        return len(self._pending[seq])

    # -- sizes ---------------------------------------------------------------------------------------------------------

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def total_tokens(self) -> int:
        return self._num_pages * self._page_size

    @property
    def free_tokens(self) -> int:
        return len(self._free) * self._page_size

    @property
    def open_sequences(self) -> int:
        return len(self._committed)

    def check_integrity(self) -> None:
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        holders = Counter(page for pages in self._pages.values() for page in pages) + self._retained
        assert +self._holders == holders, "holders are counted wrongly"
        assert set(self._free) == {page for page in range(self._num_pages) if not holders[page]}, "pages are lost"
        for seq, pages in self._pages.items():
            assert len(pages) == -(-(self.length(seq) + self.pending(seq)) // self._page_size)
            for page in pages[self.length(seq) // self._page_size :]:
                assert self._holders[page] == 1, "a sequence may write to a shared page"
