"""Random lives of sequences in a torch executor, against recomputing every path from scratch.

After every step all slots that hold neither committed nor pending rows are filled with NaN: whatever read a rejected or
freed key would say so in its logits.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.core.errors import KVCacheFullError, UsageError
from outrider.executors.base import COMMITTED, Segment
from outrider.executors.torch.executor import TorchExecutor
from tests.support.models import random_model

VOCABULARY = 24
PAGE = 4
MODEL = random_model("llama", vocab_size=VOCABULARY, num_layers=2, hidden_size=32, head_dim=8, intermediate_size=48)
TOLERANCE = 1e-4  # float32 on logits that spread by about 1; a wrong key shows in the first or second digit

Path = tuple[int, ...]


def new_executor(tokens: int) -> TorchExecutor:
    return TorchExecutor(MODEL, dtype="float32", kv_tokens=tokens, page_size=PAGE)


REFERENCE = new_executor(512)


@cache
def from_scratch(path: Path) -> torch.Tensor:
    """Logits [V] of the last token of ``path``, forwarded in one go in a sequence of its own."""
    seq = REFERENCE.open()
    logits = REFERENCE.forward([Segment.chain(seq, path, logits=[len(path) - 1])]).logits[0]
    REFERENCE.close(seq)
    return logits


def poison(executor: TorchExecutor) -> None:
    """Fill with NaN every slot that no sequence has a claim to."""
    store = executor._cache
    live = torch.zeros(executor.total_tokens, dtype=torch.bool)
    for seq in store._sequences.values():
        if seq.pages:
            live[store.slots(seq, 0, seq.length + seq.pending)] = True
    for page, times in enumerate(store._retained):
        if times:
            live[page * PAGE : (page + 1) * PAGE] = True
    store.data[:, :, :, ~live] = float("nan")


class Sequences(RuleBasedStateMachine):
    """committed: tokens of each open sequence. pending: of each of its pending rows, the path from the prefix to it.

    retained: (pages, the text that they hold), as a prefix cache would keep them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.executor = new_executor(96)
        self.committed: dict[int, Path] = {}
        self.pending: dict[int, list[Path]] = {}
        self.retained: list[tuple[list[int], Path]] = []

    @precondition(lambda self: len(self.committed) < 4)
    @rule()
    def open(self) -> None:
        seq = self.executor.open()
        assert seq not in self.committed
        self.committed[seq], self.pending[seq] = (), []

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def forward(self, data: st.DataObject) -> None:
        sequences = data.draw(st.lists(st.sampled_from(sorted(self.committed)), min_size=1, unique=True), "sequences")
        segments, paths = [], []
        for seq in sequences:
            segment, added = self.grow(data, seq)
            segments.append(segment)
            paths.append(added)
        before = self.executor.free_tokens
        try:
            logits = self.executor.forward(segments).logits
        except KVCacheFullError:
            assert self.executor.free_tokens == before
            assert sum(self.missing_pages(segment) for segment in segments) * PAGE > before
            return
        expected = [
            from_scratch(self.committed[seq] + path)
            for seq, added in zip(sequences, paths, strict=True)
            for path in added
        ]
        torch.testing.assert_close(logits, torch.stack(expected), rtol=0, atol=TOLERANCE)
        for seq, added in zip(sequences, paths, strict=True):
            self.pending[seq].extend(added)

    def grow(self, data: st.DataObject, seq: int) -> tuple[Segment, list[Path]]:
        count = data.draw(st.integers(1, 9), "rows")
        chain = data.draw(st.integers(0, 3), "chain") == 1
        tokens, parents, paths = [], [], list(self.pending[seq])
        for _ in range(count):
            last = len(paths) - 1
            parent = last if chain else data.draw(st.integers(COMMITTED, last), "parent")
            token = data.draw(st.integers(0, VOCABULARY - 1), "token")
            paths.append((*(paths[parent] if parent != COMMITTED else ()), token))
            tokens.append(token)
            parents.append(parent)
        return Segment(seq, tokens, parents), paths[-count:]

    def missing_pages(self, segment: Segment) -> int:
        held = len(self.committed[segment.seq]) + len(self.pending[segment.seq])
        return -(-(held + len(segment.tokens)) // PAGE) - -(-held // PAGE)

    @precondition(lambda self: any(self.pending.values()))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(seq for seq, rows in self.pending.items() if rows)), "sequence")
        last = data.draw(st.integers(COMMITTED, len(self.pending[seq]) - 1), "last row")
        rows: list[int] = []
        while last != COMMITTED:
            rows.insert(0, last)
            last = self.executor._cache[seq].parents[last]
        self.executor.commit(seq, rows)
        self.committed[seq] += self.pending[seq][rows[-1]] if rows else ()
        self.pending[seq].clear()

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def round(self, data: st.DataObject) -> None:
        """Forward and commit at once, so that sequences get on."""
        self.forward(data)
        if any(self.pending.values()):
            self.commit(data)

    def draw_full(self, data: st.DataObject) -> tuple[list[int], Path]:
        """Some full pages of a sequence, from its start, and their text."""
        seq = data.draw(st.sampled_from(sorted(s for s, tokens in self.committed.items() if len(tokens) >= PAGE)), "of")
        count = data.draw(st.integers(1, len(self.committed[seq]) // PAGE), "pages")
        return self.executor.full_pages(seq)[:count], self.committed[seq][: count * PAGE]

    def open_over(self, pages: list[int], text: Path) -> None:
        seq = self.executor.open(pages)
        self.committed[seq], self.pending[seq] = text, []

    @precondition(lambda self: 0 < len(self.committed) < 4 and any(len(t) >= PAGE for t in self.committed.values()))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        self.open_over(*self.draw_full(data))

    @precondition(lambda self: len(self.retained) < 3 and any(len(t) >= PAGE for t in self.committed.values()))
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        pages, text = self.draw_full(data)
        self.executor.retain(pages)
        self.retained.append((pages, text))

    @precondition(lambda self: self.retained and len(self.committed) < 4)
    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        self.open_over(*data.draw(st.sampled_from(self.retained), "retained"))

    @precondition(lambda self: self.retained)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages, _ = self.retained.pop(data.draw(st.integers(0, len(self.retained) - 1), "retained"))
        self.executor.release(pages)

    @precondition(lambda self: any(len(tokens) > 12 for tokens in self.committed.values()))
    @rule(data=st.data())
    def shorten(self, data: st.DataObject) -> None:
        """Truncate, or close, a sequence that has grown."""
        seq = data.draw(st.sampled_from(sorted(seq for seq, tokens in self.committed.items() if len(tokens) > 12)))
        length = data.draw(st.integers(0, len(self.committed[seq])), "length")
        if length == 0:
            self.executor.close(seq)
            del self.committed[seq], self.pending[seq]
            return
        pages = self.executor._cache[seq].pages
        if length % PAGE and self.executor._cache._holders[pages[length // PAGE]] > 1:
            with pytest.raises(UsageError, match="share"):
                self.executor.truncate(seq, length)
            return
        self.executor.truncate(seq, length)
        self.committed[seq] = self.committed[seq][:length]
        self.pending[seq].clear()

    @invariant()
    def consistent(self) -> None:
        self.executor.check_integrity()
        held = {page for pages, _ in self.retained for page in pages}
        for seq, tokens in self.committed.items():
            assert self.executor.length(seq) == len(tokens)
            assert self.executor.pending(seq) == len(self.pending[seq])
            assert len(self.executor._cache[seq].pages) == -(-(len(tokens) + len(self.pending[seq])) // PAGE)
            held.update(self.executor._cache[seq].pages)
        assert self.executor.free_tokens == self.executor.total_tokens - len(held) * PAGE
        poison(self.executor)


TestSequences = Sequences.TestCase
TestSequences.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_poison_would_be_seen() -> None:
    """The twin that must fail: a pending row of another branch, or a slot behind the last row, that is read."""
    executor = new_executor(64)
    seq = executor.open()
    executor.forward([Segment.chain(seq, [1, 2, 3, 4, 5, 6])])
    executor.commit(seq, range(6))
    poison(executor)
    assert not executor.forward([Segment.chain(seq, [7])]).logits.isnan().any()
    executor.commit(seq, [])
    poison(executor)
    executor._cache[seq].length = 7  # as if the rejected row had stayed
    assert executor.forward([Segment.chain(seq, [7])]).logits.isnan().all()
