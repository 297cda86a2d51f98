"""What the KV of a learned drafter with attention holds of each request, and how it keeps up with the target.

Row i of a request pairs the feature of position i with the token of position i + 1, and says what position i + 2 holds.
With the root at position n, row n - 1 is the last whose feature the target has worked out. Rows come in as observations
bring features; they are forwarded and committed in `catch_up`, when a draft is asked for, or along the way if there are
many of them. A row stands only for committed tokens, so that there is never one to take back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outrider.drafters.features import States, as_array
from outrider.executors.base import Segment

if TYPE_CHECKING:
    import torch

    from outrider.drafters.base import Observation, SequenceView
    from outrider.drafters.features import Features
    from outrider.executors.base import Executor

CHUNK = 512
"""Rows of one forward pass, all requests together, while the head reads what it has not seen."""

_LEFT_FOR_THE_ROUND = 32
"""Rows that may wait for the next draft. More are read when they come: a round that drafts must not wait for a prompt,
and where no draft is asked for they must not pile up."""


_ROOM = 16
"""Rows of its own context that a run leaves for drafts. One that comes nearer to the end begins again, with what comes
next: a head whose context is short drafts on from the latest text."""


@dataclass(eq=False)
class FeatureRun:
    """One request in the head's executor.

    first: position of the first row. The head's own positions are relative, so that a run may begin anywhere: what the
    prefix cache had is not observed. held: rows in the KV. states: [k, layers * H], of the rows after them, which are
    known and wait. last: the states of the last row that is held; it may have to be read once more.
    """

    view: SequenceView
    seq: int
    first: int
    states: States
    held: int = 0
    last: States | None = None

    @property
    def waiting(self) -> int:
        return len(self.states)

    @property
    def known(self) -> int:
        """The first position whose feature has not been seen."""
        return self.first + self.held + self.waiting

    def tokens(self, rows: int) -> list[int]:
        """The tokens of the next rows: each one's feature is of the position before it."""
        start = self.first + self.held + 1
        return self.view.tokens[start : start + rows]

    def advance(self, rows: int) -> None:
        """The next rows are held now."""
        self.last = self.states[rows - 1 : rows].copy()
        self.states = self.states[rows:].copy()
        self.held += rows


class FeatureRuns:
    """All requests of one drafter in the head's executor, which nobody else uses."""

    def __init__(self, executor: Executor, features: Features) -> None:
        self._executor = executor
        self._features = features
        self._runs: dict[int, FeatureRun] = {}

    def observe(self, observations: Iterable[Observation]) -> None:
        """Take the features of what was committed, and read along where many rows have come together."""
        for observation in observations:
            if not observation.finished:
                self._take(observation)
        while crowded := [run for run in self._runs.values() if run.waiting > _LEFT_FOR_THE_ROUND]:
            self._read_along(crowded)

    def run_of(self, view: SequenceView) -> FeatureRun | None:
        """The request's run, if it has one that knows all that there is to know before the root."""
        run = self._runs.get(view.request_id)
        return run if run is not None and run.first < run.known == len(view.tokens) - 1 else None

    def room(self, run: FeatureRun) -> int:
        """Rows that may follow the known ones, one below the other, in the head's own context."""
        return self._executor.max_context - run.held - run.waiting

    def missing_tokens(self, run: FeatureRun, rows: int) -> int:
        """KV, in whole pages, that the rows that wait take, and ``rows`` more."""
        page = self._executor.page_size
        return (-(-(run.held + run.waiting + rows) // page) - -(-run.held // page)) * page

    def catch_up(self, runs: Sequence[FeatureRun]) -> tuple[torch.Tensor, States]:
        """Read all that waits, and return what the head says at the last row of each of the (distinct) runs.

        Returns logits [len(runs), D], and the head's own hidden states [len(runs), H]. Raises what `Executor.forward`
        raises; what has been read by then stays.
        """
        import torch

        for run in runs:
            if not run.waiting:
                self._step_back(run)
        found: dict[int, tuple[torch.Tensor, States]] = {}
        while left := [run for run in runs if run.seq not in found]:
            found |= self._read(left)
        logits, hidden = zip(*(found[run.seq] for run in runs), strict=True)
        return (logits[0] if len(runs) == 1 else torch.cat(logits)), np.concatenate(hidden)

    def drop_drafts(self, runs: Iterable[FeatureRun]) -> None:
        """Forget the rows of a draft: none of them has a feature of the target's."""
        for run in runs:
            self._executor.commit(run.seq, ())

    def close(self, request_id: int) -> None:
        run = self._runs.pop(request_id, None)
        if run is not None:
            self._executor.close(run.seq)

    def _take(self, observation: Observation) -> None:
        """Keep the states of the positions that a round committed: of its context, the root and what was accepted."""
        view, start, context = observation.view, observation.start, len(observation.context)
        tokens = [*observation.context, *(observation.rows[row] for row in observation.path)]
        rows = [*range(context), *(context + row for row in observation.path)]
        if view.tokens[start : start + len(rows)] != tokens:
            self.close(view.request_id)
            return
        run = self._runs.get(view.request_id)
        if run is not None and start < run.known:
            # Seen before: a request that had to make way goes through its text again.
            rows, start = rows[run.known - start :], run.known
        if not rows:
            return
        most = max(1, self._executor.max_context // 2)
        if run is None or run.known != start or self.room(run) - len(rows) < min(_ROOM, most):
            rows, start = rows[-most:], start + max(0, len(rows) - most)
            run = self._begin(view, start)
        run.states = _joined(run.states, self._features.states(observation, rows))

    def _begin(self, view: SequenceView, first: int) -> FeatureRun:
        self.close(view.request_id)
        run = FeatureRun(view, self._executor.open(), first, np.empty((0, 0), np.float32))
        self._runs[view.request_id] = run
        return run

    def _read_along(self, runs: Sequence[FeatureRun]) -> None:
        """One forward pass over what waits, but for the last row of each run, whose logits the next draft needs.

        A run that finds no room in the KV is given up, and begins again with what comes next.
        """
        free = self._executor.free_tokens
        for run in runs:
            free -= self.missing_tokens(run, 0)
            if free < 0:
                self.close(run.view.request_id)
                return
        self._read(runs, keep=1)

    def _read(self, runs: Sequence[FeatureRun], keep: int = 0) -> dict[int, tuple[torch.Tensor, States]]:
        """Forward and commit rows that wait, but for ``keep`` of each run, as many as one pass takes.

        Returns the logits [1, D] and the hidden state [1, H] of the last row of each run that is done, by sequence.
        """
        space = CHUNK
        parts: list[tuple[FeatureRun, int]] = []
        for run in runs:
            rows = min(run.waiting - keep, space)
            if rows > 0:
                parts.append((run, rows))
                space -= rows
        states = np.concatenate([run.states[:rows] for run, rows in parts])
        segments = [
            Segment.chain(run.seq, run.tokens(rows), [rows - 1] if rows == run.waiting else []) for run, rows in parts
        ]
        layer = self._executor.config.num_layers
        try:
            output = self._executor.forward(segments, [layer], self._features.of(states))
        except BaseException:
            self.drop_drafts(run for run, _ in parts)
            raise
        done: dict[int, tuple[torch.Tensor, States]] = {}
        end = 0
        for (run, rows), segment in zip(parts, segments, strict=True):
            end += rows
            self._executor.commit(run.seq, range(rows))
            run.advance(rows)
            if segment.logits:
                logits = output.logits[len(done) : len(done) + 1]
                done[run.seq] = (logits, as_array(output.hidden[layer], [end - 1]))
        return done

    def _step_back(self, run: FeatureRun) -> None:
        """Let the last row wait again: its logits are wanted once more."""
        assert run.last is not None, "a run that knows a row either holds it or lets it wait"
        self._executor.truncate(run.seq, run.held - 1)
        run.held -= 1
        run.states = run.last


def _joined(states: States, more: States) -> States:
    return np.concatenate([states, more]) if len(states) else more
