"""Drafting with a small model that reads the target's hidden states: what EAGLE, EAGLE-3 and MTP have in common."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from outrider.core.errors import NonFiniteLogitsError
from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.base import Budget, Drafter, DrafterContext, Observation, SequenceView, Wants
from outrider.drafters.cost import Recent, parameters
from outrider.drafters.draft_children import are_drawn
from outrider.drafters.dynamic_tree import ROWS_PER_LEVEL, DrawnTree, DynamicTree
from outrider.drafters.failures import Failures
from outrider.drafters.feature_runs import FeatureRun, FeatureRuns
from outrider.drafters.features import Features, States
from outrider.drafters.growth import Limits
from outrider.drafters.guesses import CANDIDATES, Guesses
from outrider.drafters.heads import head_for
from outrider.executors.base import COMMITTED, Segment
from outrider.heads.head import FEATURES
from outrider.heads.standalone import output_rows
from outrider.models.config import OUTPUT
from outrider.models.loader import Model
from outrider.models.weights import TensorWeights

if TYPE_CHECKING:
    import torch

    from outrider.executors.base import Executor
    from outrider.heads.head import Head
    from outrider.models.config import ModelConfig

_DEPTH = 7
"""Levels of a tree, unless the configuration says otherwise."""
_WIDTH = 8
"""Children of a node that are considered for a tree, unless the configuration says otherwise."""
_DRAWN_WIDTH = 3
"""The same where rules that compare p with q need whole families."""


@dataclass
class _Round:
    """One request's part in a round. row_of: pending row, and place in ``hidden``, of each node forwarded last.

    hidden: [n, H], the head's own states of the rows forwarded last: the features of the rows below them.
    """

    run: FeatureRun
    growth: DynamicTree | DrawnTree
    hidden: States
    row_of: dict[int, tuple[int, int]] = field(default_factory=lambda: {ROOT: (COMMITTED, 0)})
    rows: int = 0
    failed: bool = False

    def segment(self, nodes: Sequence[int]) -> tuple[Segment, States]:
        """What to forward for children of the nodes that were forwarded last, and the features that go with it."""
        tokens, parents = zip(*map(self.growth.place, nodes), strict=True)
        above = [self.row_of[parent] for parent in parents]
        return Segment(self.run.seq, tokens, [row for row, _ in above]), self.hidden[[place for _, place in above]]

    def record(self, nodes: Sequence[int], hidden: States) -> None:
        """The nodes have been forwarded."""
        self.row_of = {node: (self.rows + place, place) for place, node in enumerate(nodes)}
        self.rows += len(nodes)
        self.hidden = hidden


class FeatureDrafter(Drafter):
    """All requests of a round share every forward pass of the head: one over what was committed since the last draft,
    which gives the roots their children, and one for each further level of the trees. A last level needs none.

    A row of the head pairs the feature of one position with the token of the next (`FeatureRuns`). Below the root no
    feature is known, and the head's own hidden state takes its place.
    """

    default_tokens = 24
    needs_model = True

    def __init__(self, context: DrafterContext, head: Head | None = None) -> None:
        """head: None for the one that the configuration names, or that the target comes with.

        Raises what `head_for` and the executor raise.
        """
        config, target = context.config, context.target
        if head is None:
            head = head_for(context, self.name)
        model = _model(head, target)
        self._executor: Executor = context.open_executor.head(model)
        self._runs = FeatureRuns(self._executor, Features(head, context))
        self._columns = None if head.draft_ids is None else head.draft_ids.numpy()
        self._width = config.tree_width
        self._depth = config.max_draft_depth or (None if config.tree_width == 1 else _DEPTH)
        self._cost_ratio = parameters(model.config) / parameters(target.config) if config.adaptive else None
        self._level_seconds = Recent()
        self._failures = Failures(self.name)
        self.wants = Wants(hidden_layers=head.feature_layers)
        self.accept_by_depth = head.accept_by_depth
        self.deepest = self._depth
        if config.tree_width == 1:
            self.default_tokens = _DEPTH

    @classmethod
    def kv_config(cls, context: DrafterContext) -> ModelConfig | None:
        return head_for(context, cls.name, keep=True).config

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        limits = self._fitting(views, budget)
        parts: dict[int, _Round] = {}
        try:
            if limits:
                parts = self._started([view for view in views if view.request_id in limits], limits, budget)
            while self._grow_one_level(parts.values()):
                pass
        finally:
            self._runs.drop_drafts(part.run for part in parts.values())
        for request, part in parts.items():
            if part.failed and not part.rows:
                # At the root: what it holds is at fault, and every later row would see it. It begins again with what
                # comes next.
                self._runs.close(request)
        return [
            parts[view.request_id].growth.tree()
            if view.request_id in parts and not parts[view.request_id].failed
            else DraftTree()
            for view in views
        ]

    def observe(self, observations: Sequence[Observation]) -> None:
        self._runs.observe(observations)

    def take_failures(self) -> Mapping[str, frozenset[int]]:
        return self._failures.take()

    def pause(self, view: SequenceView) -> None:
        """Free the request's KV; the target goes through its text again, and so will the head."""
        self._runs.close(view.request_id)

    def close(self, view: SequenceView) -> None:
        self._runs.close(view.request_id)

    def _fitting(self, views: Sequence[SequenceView], budget: Budget) -> dict[int, Limits]:
        """By request, the limits of those that can be drafted for.

        One that the KV has no room for is given up; others go on with what it held.
        """
        found: dict[int, Limits] = {}
        promised = 0
        for view in views:
            run = self._runs.run_of(view)
            if run is None:
                continue
            depth = min(budget.depth, self._depth or budget.depth, self._runs.room(run) + 1)
            limits = Limits.of(view, replace(budget, depth=depth))
            if not limits.nodes:
                continue
            missing = self._runs.missing_tokens(run, max(limits.nodes, (limits.depth - 1) * ROWS_PER_LEVEL))
            if promised + missing > self._executor.free_tokens:
                self._runs.close(view.request_id)
            else:
                promised += missing
                found[view.request_id] = limits
        return found

    def _started(
        self, views: Sequence[SequenceView], limits: Mapping[int, Limits], budget: Budget
    ) -> dict[int, _Round]:
        """The round's parts by request, with the children of each root."""
        runs = [run for view in views if (run := self._runs.run_of(view)) is not None]
        logits, hidden = self._runs.catch_up(runs)
        guesses = self._guesses(logits, views)
        parts: dict[int, _Round] = {}
        for i, (view, run) in enumerate(zip(views, runs, strict=True)):
            growth = self._growth(view, limits[view.request_id], self._ratio(budget))
            parts[view.request_id] = _Round(run, growth, hidden[i : i + 1])
            self._expand(parts[view.request_id], [ROOT], guesses[i : i + 1])
        return parts

    def _growth(self, view: SequenceView, limits: Limits, ratio: float | None) -> DynamicTree | DrawnTree:
        if are_drawn(view):
            return DrawnTree(view, limits, self._width or _DRAWN_WIDTH)
        return DynamicTree(view, limits, self._width or _WIDTH, ratio)

    def _ratio(self, budget: Budget) -> float | None:
        """What a level costs in units of a plain round: as measured, or as the sizes of the models have it."""
        if self._cost_ratio is None or budget.price is None or not self._level_seconds.known:
            return self._cost_ratio
        return self._level_seconds.median / budget.price(0)

    def _grow_one_level(self, rounds: Iterable[_Round]) -> bool:
        """One forward pass over every request's frontier; False if there is none left."""
        import torch

        parts = [(part, nodes) for part in rounds if not part.failed and (nodes := part.growth.frontier())]
        if not parts:
            return False
        started = time.perf_counter()
        segments, features = zip(*(part.segment(nodes) for part, nodes in parts), strict=True)
        layer = self._executor.config.num_layers
        output = self._executor.forward(segments, [layer], torch.from_numpy(np.concatenate(features)))
        hidden = output.hidden[layer].to("cpu", torch.float32).numpy()
        guesses = self._guesses(output.logits, [part.growth.view for part, _ in parts])
        start = 0
        for part, nodes in parts:
            end = start + len(nodes)
            part.record(nodes, hidden[start:end])
            self._expand(part, nodes, guesses[start:end])
            start = end
        self._level_seconds.add(time.perf_counter() - started)
        return True

    def _guesses(self, logits: torch.Tensor, views: Sequence[SequenceView]) -> Guesses:
        plain = all(view.sampling.is_argmax for view in views)
        candidates = (self._width or _WIDTH) if plain else CANDIDATES
        return Guesses.of(logits, self._columns, self._executor.top_k, candidates)

    def _expand(self, part: _Round, nodes: Sequence[int], guesses: Guesses) -> None:
        """Grow one request's tree. Logits that cannot be used cost that request its draft, and no other."""
        try:
            part.growth.expand(nodes, guesses)
        except NonFiniteLogitsError as error:
            part.failed = True
            self._failures.add(part.run.view.request_id, error)


def _model(head: Head, target: Model) -> Model:
    """The model that the executor runs: what it lacks of embedding and output is the target's."""
    import torch

    assert head.config is not None, "load_head gives every method but Medusa a config"
    tensors = {name: tensor for name, tensor in head.tensors.items() if name != FEATURES}
    config = head.config
    if head.draft_ids is not None and OUTPUT not in tensors:
        tensors[OUTPUT] = output_rows(head, target.weights, torch.bfloat16)
        config = replace(config, tie_embeddings=False)
    return Model(head.source or head.method, config, TensorWeights(tensors))
