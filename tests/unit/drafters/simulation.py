"""Rounds of one request without an engine: what a drafter sees, with acceptance left to chance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields

import torch

from outrider.acceptance.base import Verdict
from outrider.core.config import AUTO, SpeculativeConfig
from outrider.core.noise import Stream
from outrider.core.sampling import SamplingParams, SamplingState
from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.base import Budget, Drafter, DrafterContext, Observation, SequenceView
from tests.support.fake_heads import OpenFakeHeads, build_with_heads, hidden
from tests.support.fakes import EOS, VOCAB, fake_model, random_logits


def context(**config: object) -> DrafterContext:
    """What a drafter is built from, over the fake target; a draft model's logits are near the target's.

    Options that the method would refuse, because it does not read them, are left out.
    """
    method = str(config.get("method", ""))
    if "draft_model" in method:
        config.setdefault("model", "fake")
    readers = {option.name: option.metadata["methods"] for option in fields(SpeculativeConfig)}
    read = (method, *(AUTO if method == "auto" else method.split("+")))
    config = {name: value for name, value in config.items() if not readers[name] or set(readers[name]) & set(read)}
    if method == "none":
        config = {"method": method}
    return DrafterContext(SpeculativeConfig(**config), fake_model(), OpenFakeHeads(1.0))  # type: ignore[arg-type]


def make(method: str, **config: object) -> Drafter:
    return build_with_heads(context(method=method, **config))


def make_view(
    tokens: Sequence[int],
    request_id: int = 0,
    *,
    tenant: str = "default",
    room: int = 50,
    stream: Stream = Stream.TARGET,
    **params: object,
) -> SequenceView:
    """A request over the fake target whose prompt is ``tokens``."""
    sampling = SamplingState(SamplingParams(seed=request_id, **params), VOCAB, tokens, [EOS])  # type: ignore[arg-type]
    return SequenceView(request_id, tenant, list(tokens), len(tokens), sampling, room, stream)


def commit(view: SequenceView, tokens: Sequence[int]) -> None:
    """What the engine does with committed tokens."""
    for token in tokens:
        view.tokens.append(token)
        view.sampling.commit(token)
        view.room -= 1


class Simulation:
    """One request: `draft`, then `settle`, again and again; the first time, the prompt is forwarded along with it.

    Everything random comes from ``seed``.
    """

    def __init__(self, drafter: Drafter, view: SequenceView, seed: int = 0) -> None:
        self.drafter = drafter
        self.view = view
        self._random = random.Random(seed)
        self._forwarded = 0

    def open(self) -> Simulation:
        self.drafter.open(self.view)
        return self

    def draft(self, budget: Budget) -> DraftTree:
        return self.drafter.propose([self.view], budget)[0]

    def settle(self, tree: DraftTree, verdict: Verdict | None = None) -> Observation:
        """Accept a path, a random one unless there is a verdict, commit it with a correction token, and say what the
        drafter is to observe.
        """
        path = list(verdict.path) if verdict is not None else self._random_path(tree)
        at = path[-1] if path else ROOT
        rows = [self.view.tokens[-1], *tree.tokens]
        histories = [self.view.tokens + [tree.tokens[n] for n in tree.path(node)] for node in range(len(tree))]
        logits = torch.stack([random_logits(h) for h in (list(self.view.tokens), *histories)])
        last = verdict.token if verdict is not None else self._correction(logits[at + 1])
        committed = [*(tree.tokens[node] for node in path), last]
        start, self._forwarded = self._forwarded, len(self.view.tokens) + len(path)
        context = self.view.tokens[start:-1]
        histories = [*(self.view.tokens[: end + 1] for end in range(start, len(self.view.tokens))), *histories]
        commit(self.view, committed)
        wants = self.drafter.wants
        top = logits.log_softmax(-1).topk(wants.top_k) if wants.top_k else None
        return Observation(
            self.view,
            committed,
            rows,
            [0, *(node + 1 for node in path)],
            tree,
            top_ids=None if top is None else top.indices,
            top_logprobs=None if top is None else top.values,
            context=context,
            start=start,
            hidden={layer: torch.stack([hidden(layer, h) for h in histories]) for layer in wants.hidden_layers},
        )

    def _random_path(self, tree: DraftTree) -> list[int]:
        path: list[int] = []
        children = tree.children()
        at = ROOT
        while (below := children.get(at)) and self._random.random() < 0.7:
            at = self._random.choice(below)
            path.append(at)
        return path

    def rounds(self, count: int, budget: Budget) -> list[DraftTree]:
        """Play whole rounds; returns what was drafted in each."""
        trees: list[DraftTree] = []
        for _ in range(count):
            trees.append(self.draft(budget))
            self.drafter.observe([self.settle(trees[-1])])
        return trees

    def _correction(self, logits: torch.Tensor) -> int:
        """The fake target's favourite, or now and then anything: texts then repeat, and change again."""
        if self._random.random() < 0.8:
            return int(logits[EOS + 1 :].argmax()) + EOS + 1
        return self._random.randrange(EOS + 1, VOCAB)
