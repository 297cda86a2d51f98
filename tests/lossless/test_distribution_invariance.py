"""Under `coupled` the text is a function of target, parameters and seed: neither trees nor neighbours show in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.acceptance import RULES
from outrider.acceptance.base import Candidate
from outrider.core.sampling import SamplingParams, SamplingState
from outrider.core.tree import ROOT, DraftTree, merge

VOCAB = 7
END = 6
LENGTH = 10
PROMPT = (1, 2, 3)


def logits(model: int, tokens: Sequence[int]) -> torch.Tensor:
    """The row after ``tokens``: a function of the last three, with ties and tokens that are ruled out."""
    random = np.random.default_rng([model, *tokens[-3:]])
    values = np.round(random.standard_normal(VOCAB) * 2) / 2
    values[random.random(VOCAB) < 0.2] = -math.inf
    values[random.permutation(VOCAB)[:2]] = 1
    return torch.from_numpy(values.astype(np.float32))


class Request:
    """One request over a toy target, advanced by rounds."""

    def __init__(self, model: int, params: SamplingParams) -> None:
        self.model = model
        self.sampling = SamplingState(params, VOCAB, PROMPT, end_ids=[END])
        self.tokens = list(PROMPT)

    @property
    def text(self) -> list[int]:
        return self.tokens[len(PROMPT) :]

    def candidate(self, tree: DraftTree) -> Candidate:
        paths = [[tree.tokens[i] for i in tree.path(node)] for node in range(ROOT, len(tree))]
        rows = [logits(self.model, [*self.tokens, *path]) for path in paths]
        return Candidate(tree, torch.stack(rows), self.sampling)

    def commit(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.sampling.commit(token)
            self.tokens.append(token)

    def run(self, trees: Iterator[DraftTree]) -> list[int]:
        """Rounds until there are LENGTH tokens, each with the next of ``trees``."""
        while len(self.text) < LENGTH:
            tree = next(trees)
            verdict = RULES.get("coupled")().accept([self.candidate(tree)])[0]
            self.commit([*(tree.tokens[node] for node in verdict.path), verdict.token])
        return self.text[:LENGTH]


def plain(model: int, params: SamplingParams) -> list[int]:
    return Request(model, params).run(iter([DraftTree()] * LENGTH))


parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {0: 2.0}]),
    min_tokens=st.sampled_from([0, 5]),
    seed=st.integers(0, 2**64 - 1),
)
guesses = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), max_size=5)
"""Paths of a draft, right or wrong."""


@settings(max_examples=150, deadline=None)
@given(
    model=st.integers(0, 1000),
    params=parameters,
    rounds=st.lists(st.tuples(guesses, st.integers(0, 5)), min_size=LENGTH, max_size=LENGTH),
)
def test_no_tree_changes_the_text(
    model: int, params: SamplingParams, rounds: list[tuple[list[list[int]], int]]
) -> None:
    expected = plain(model, params)
    request = Request(model, params)

    def trees() -> Iterator[DraftTree]:
        """Guesses, and among them so many tokens of what really comes next."""
        for wrong, right in rounds:
            done = len(request.text)
            yield merge(DraftTree.chain(path) for path in [*wrong, expected[done : done + right]] if path)

    assert request.run(trees()) == expected


@settings(max_examples=50, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 1000), parameters), min_size=2, max_size=6),
    drafts=st.lists(guesses, min_size=6 * LENGTH, max_size=6 * LENGTH),
    order=st.randoms(use_true_random=False),
)
def test_no_neighbour_changes_the_text(requests, drafts, order) -> None:
    running = [Request(model, params) for model, params in requests]
    rule = RULES.get("coupled")()
    offers = iter(drafts)
    while any(len(request.text) < LENGTH for request in running):
        batch = [request for request in running if len(request.text) < LENGTH]
        order.shuffle(batch)
        trees = [merge(DraftTree.chain(path) for path in next(offers, [])) for _ in batch]
        verdicts = rule.accept([request.candidate(tree) for request, tree in zip(batch, trees, strict=True)])
        for request, tree, verdict in zip(batch, trees, verdicts, strict=True):
            request.commit([*(tree.tokens[node] for node in verdict.path), verdict.token])
    for request, (model, params) in zip(running, requests, strict=True):
        assert request.text[:LENGTH] == plain(model, params)


def test_speculation_was_at_work() -> None:
    """With the right draft, three rounds do the work of ten; otherwise the tests above would prove nothing."""
    params = SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, seed=5)
    expected = plain(3, params)
    request = Request(3, params)
    used = iter([DraftTree.chain(expected[at : at + 3]) for at in (0, 4, 8)])
    assert request.run(used) == expected


def test_penalties_that_forget_the_path_would_be_seen(monkeypatch) -> None:
    params = SamplingParams(temperature=1.0, frequency_penalty=2.0, repetition_penalty=2.0, seed=1)
    honest = SamplingState.logprobs
    monkeypatch.setattr(SamplingState, "logprobs", lambda self, row, path=(): honest(self, row))
    differ = 0
    for model in range(20):
        expected = plain(model, params)
        request = Request(model, params)
        trees = (DraftTree.chain(expected[at : at + 4]) for at in iter(lambda r=request: len(r.text), -1))
        differ += request.run(trees) != expected
    assert differ > 5
