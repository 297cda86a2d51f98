"""A smaller model of the same vocabulary drafts: a chain, or with ``tree_width`` a tree grown level by level.

Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (2023); the tree is that of
EAGLE-2 (Li et al., 2024): at each level the nodes of the highest path probability are expanded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outrider.core.errors import NonFiniteLogitsError
from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.base import Budget, Drafter, DrafterContext, Observation, SequenceView
from outrider.drafters.cost import parameters
from outrider.drafters.draft_growth import Growth, growth_for
from outrider.drafters.failures import Failures
from outrider.drafters.growth import Limits
from outrider.drafters.vocabulary import check_vocabulary, fit_logits
from outrider.executors.base import COMMITTED, Segment
from outrider.models.loader import Model, load_model

if TYPE_CHECKING:
    import torch

    from outrider.models.config import ModelConfig

_CHUNK = 512
"""Rows of one forward pass, all requests together, while the draft model reads what it has not seen."""


@dataclass
class _Run:
    """One request in the draft executor. rows: pending row by (pending row of its parent, or COMMITTED; token)."""

    seq: int
    rows: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass
class _Round:
    """One request's part in a round. row_of: pending row of each node that was forwarded.

    failed: the draft model's logits could not be used; nothing is proposed.
    """

    run: _Run
    growth: Growth
    failed: bool = False
    row_of: dict[int, int] = field(default_factory=lambda: {ROOT: COMMITTED})


class DraftModelDrafter(Drafter):
    """Its KV always holds committed tokens, plus the rows of the last draft until it is known what became of them.

    All requests of a round share every forward pass: one for the tokens the draft model has not seen, then one for each
    further level. A last level needs none.
    """

    name = "draft_model"
    default_tokens = 5
    needs_model = True

    def __init__(self, context: DrafterContext) -> None:
        """Loads the model. Raises what `load_model` raises, and VocabularyMismatchError."""
        config, target = context.config, context.target
        model = _draft_model(context)
        if model is not target:
            check_vocabulary(target, model)
        self._executor = context.open_executor(model)
        self._vocab_size = target.config.vocab_size
        self._width = config.tree_width or 1
        self._cost_ratio = parameters(model.config) / parameters(target.config) if config.adaptive else None
        self._runs: dict[int, _Run] = {}
        self._failures = Failures(self.name)

    @classmethod
    def kv_config(cls, context: DrafterContext) -> ModelConfig:
        return _draft_model(context, keep=True).config

    def open(self, view: SequenceView) -> None:
        """Read a short prompt but for its last token, the root of the first draft; a long one comes in chunks.

        Done here, it does not count as the cost of a draft, by which the planner judges whether drafting pays.
        """
        if len(view.tokens) <= _CHUNK:
            self._read(view, len(view.tokens) - 1)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Read along with the target as it goes through a long prompt, so that no round has to wait for all of it."""
        for observation in observations:
            if not observation.rows:
                end = observation.start + len(observation.context)
                self._read(observation.view, end, most=2 * len(observation.context))

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        rounds: dict[int, _Round] = {}
        promised = 0
        for i, view in enumerate(views):
            limits = self._limits(view, budget)
            if not limits.nodes:
                continue
            run = self._synchronised(view)
            missing = self._missing_tokens(view, run, limits.nodes)
            if promised + missing > self._executor.free_tokens:
                # Others go on with what it held, until some of them have ended.
                self.close(view)
            else:
                promised += missing
                rounds[i] = _Round(run, growth_for(view, limits, self._width, self._cost_ratio))
        self._read_unseen(rounds.values())
        while self._grow_one_level(rounds.values()):
            pass
        return [
            rounds[i].growth.tree() if i in rounds and not rounds[i].failed else DraftTree() for i in range(len(views))
        ]

    def take_failures(self) -> Mapping[str, frozenset[int]]:
        return self._failures.take()

    def pause(self, view: SequenceView) -> None:
        """Free the request's KV; what it held is read again when the request goes on."""
        self.close(view)

    def close(self, view: SequenceView) -> None:
        run = self._runs.pop(view.request_id, None)
        if run is not None:
            self._executor.close(run.seq)

    def _read(self, view: SequenceView, end: int, most: int = _CHUNK) -> None:
        """Forward and commit the text's next tokens, up to position ``end`` and ``most`` of them, if there is KV."""
        if end > self._executor.max_context:
            return
        run = self._run_of(view)
        length = self._executor.length(run.seq)
        tokens = view.tokens[length : min(end, length + most)]
        if tokens and len(tokens) + self._executor.page_size <= self._executor.free_tokens:
            self._executor.forward([Segment.chain(run.seq, tokens, [])])
            self._executor.commit(run.seq, range(len(tokens)))

    def _limits(self, view: SequenceView, budget: Budget) -> Limits:
        """The round's limits, within the draft model's own context. The deepest nodes are not forwarded."""
        room = self._executor.max_context - len(view.tokens) + 1
        return Limits.of(view, replace(budget, depth=min(budget.depth, room)))

    def _missing_tokens(self, view: SequenceView, run: _Run, nodes: int) -> int:
        """KV, in whole pages, that the request's text and draft take beyond what it holds."""
        page = self._executor.page_size
        return (-(-(len(view.tokens) + nodes) // page) - -(-self._executor.length(run.seq) // page)) * page

    def _run_of(self, view: SequenceView) -> _Run:
        run = self._runs.get(view.request_id)
        if run is None:
            run = self._runs[view.request_id] = _Run(self._executor.open())
        return run

    def _synchronised(self, view: SequenceView) -> _Run:
        """The request's run, with pending rows that turned out right made prefix, and the others dropped.

        What was committed is read off the view rather than from observations, so that a round in which anything failed
        leaves nothing wrong behind. The last token stays unseen: its logits are what the next draft starts from.
        """
        run = self._run_of(view)
        path: list[int] = []
        for token in view.tokens[self._executor.length(run.seq) : -1]:
            row = run.rows.get((path[-1] if path else COMMITTED, token))
            if row is None:
                break
            path.append(row)
        self._executor.commit(run.seq, path)
        run.rows.clear()
        if self._executor.length(run.seq) == len(view.tokens):
            # Asked again before anything was committed: the root is read once more, for its logits.
            self._executor.truncate(run.seq, len(view.tokens) - 1)
        return run

    def _read_unseen(self, rounds: Iterable[_Round]) -> None:
        """Forward the committed tokens that the draft model lacks, and give each root its children."""
        waiting = list(rounds)
        while waiting:
            segments: list[Segment] = []
            space = _CHUNK
            for part in waiting:
                unseen = part.growth.view.tokens[self._executor.length(part.run.seq) :]
                taken = unseen[:space]
                if not taken:
                    break
                space -= len(taken)
                last = [len(taken) - 1] if len(taken) == len(unseen) else []
                segments.append(Segment.chain(part.run.seq, taken, last))
            rows = iter(self._logits(segments))
            for part, segment in zip(list(waiting), segments, strict=False):
                self._executor.commit(segment.seq, range(len(segment.tokens)))
                if segment.logits:
                    self._expand(part, [ROOT], [next(rows)])
                    waiting.remove(part)

    def _grow_one_level(self, rounds: Iterable[_Round]) -> bool:
        """One forward pass over every request's frontier; False if there is none left."""
        parts = [(part, nodes) for part in rounds if not part.failed and (nodes := part.growth.frontier())]
        if not parts:
            return False
        segments = [self._segment(part, nodes) for part, nodes in parts]
        rows = self._logits(segments)
        start = 0
        for part, nodes in parts:
            self._record(part, nodes)
            self._expand(part, nodes, rows[start : start + len(nodes)])
            start += len(nodes)
        return True

    def _expand(self, part: _Round, nodes: Sequence[int], logits: Sequence[torch.Tensor]) -> None:
        """Grow one request's tree. Logits that cannot be used cost that request its draft, and no other."""
        try:
            part.growth.expand(nodes, logits)
        except NonFiniteLogitsError as error:
            part.failed = True
            self._failures.add(part.growth.view.request_id, error)

    @staticmethod
    def _segment(part: _Round, nodes: Sequence[int]) -> Segment:
        growth = part.growth
        return Segment(
            part.run.seq,
            [growth.tokens[node] for node in nodes],
            [part.row_of[growth.parents[node]] for node in nodes],
        )

    @staticmethod
    def _record(part: _Round, nodes: Sequence[int]) -> None:
        for node in nodes:
            row = len(part.run.rows)
            part.run.rows[part.row_of[part.growth.parents[node]], part.growth.tokens[node]] = row
            part.row_of[node] = row

    def _logits(self, segments: Sequence[Segment]) -> Sequence[torch.Tensor]:
        """Rows of logits, cut or padded to the target's vocabulary."""
        return fit_logits(self._executor.forward(segments).logits, self._vocab_size).unbind()


def _draft_model(context: DrafterContext, *, keep: bool = False) -> Model:
    """The model that the configuration names, which may be the target. keep: see `ReadOnce`."""
    name = context.config.model
    assert name is not None, "SpeculativeConfig sees to it that draft_model comes with a model"
    if name == context.target.name:
        return context.target
    return context.read.get(("model", name), lambda: load_model(name), keep=keep)
