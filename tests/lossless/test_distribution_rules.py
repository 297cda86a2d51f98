"""The rules as the engine calls them, with the package's own noise: seeds 0, 1, 2, … are the draws.

Chi-square of the first token and the first three, as in `test_distribution`; false alarm below 10^-9 for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from outrider.acceptance import RULES
from outrider.acceptance.base import AcceptanceRule, Candidate
from outrider.acceptance.rejection import Rejection
from outrider.core.gumbel import gumbel_top_k
from outrider.core.noise import Stream
from outrider.core.sampling import SamplingParams, SamplingState
from outrider.core.tree import ROOT, DraftTree
from tests.lossless.markov import LENGTH, RARE, Scenario, p_values, scenario

DRAWS = 15_000
TEMPERATURE = 0.7
PROMPT = (0, 0)
ALL_AT_ONCE = "tokens of probability zero, EOS inside"


class Tables:
    """A scenario's target as logits, -inf where p is 0, and its draft as log-probabilities."""

    def __init__(self, case: Scenario) -> None:
        self.case = case
        self.logits = (case.p.log() * TEMPERATURE).float()
        self.logprobs = case.q.log().float()


Drafts = Callable[[Tables, SamplingState, Sequence[int], int], DraftTree]
"""(tables, sampling, tokens so far, noise stream) -> tree"""


@dataclass(frozen=True)
class Drawn:
    """Complete trees of Gumbel-top-k draws. mixed: below a child with an odd token, children are chosen, not drawn."""

    width: int
    depth: int
    mixed: bool = False

    def __call__(self, tables: Tables, sampling: SamplingState, tokens: Sequence[int], stream: int) -> DraftTree:
        ids: list[int] = []
        parents: list[int] = []
        logprobs: dict[int, torch.Tensor] = {}
        level = [(ROOT, tuple(tokens[-2:]))]
        for at in range(self.depth):
            below: list[tuple[int, tuple[int, ...]]] = []
            for node, context in level:
                q = tables.logprobs[context]
                if self.mixed and node != ROOT and context[1] % 2:
                    children = q.topk(self.width).indices.tolist()
                else:
                    logprobs[node] = q
                    children = gumbel_top_k(q, self.width, sampling.seed, sampling.position + at, stream)
                for token in children:
                    if token != tables.case.eos:
                        below.append((len(ids), (context[1], token)))
                    ids.append(token)
                    parents.append(node)
            level = below
        return DraftTree(ids, parents, [0.5] * len(ids), logprobs)


def nothing(tables: Tables, sampling: SamplingState, tokens: Sequence[int], stream: int) -> DraftTree:
    return DraftTree()


def text(rule: AcceptanceRule, tables: Tables, drafts: Drafts, seed: int) -> list[int]:
    """Three tokens of one request, or fewer and then EOS repeated."""
    sampling = SamplingState(SamplingParams(temperature=TEMPERATURE, seed=seed), tables.case.vocab, PROMPT)
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + LENGTH:
        tree = drafts(tables, sampling, tokens, rule.draft_stream(sampling.position))
        paths = [[*tokens, *(tree.tokens[i] for i in tree.path(node))] for node in range(ROOT, len(tree))]
        logits = torch.stack([tables.logits[path[-2], path[-1]] for path in paths])
        verdict = rule.accept([Candidate(tree, logits, sampling)])[0]
        for token in [*(tree.tokens[node] for node in verdict.path), verdict.token]:
            sampling.commit(token)
            tokens.append(token)
            if token == tables.case.eos:
                tokens += [token] * LENGTH
    return tokens[len(PROMPT) : len(PROMPT) + LENGTH]


def found(rule: AcceptanceRule, drafts: Drafts, name: str, draws: int = DRAWS) -> dict[str, float]:
    tables = Tables(scenario(name))
    texts = torch.tensor([text(rule, tables, drafts, seed) for seed in range(draws)])
    return p_values(texts, tables.case.law())


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        ("coupled", Drawn(2, 2)),
        ("rejection", Drawn(2, 2, mixed=True)),
        ("block", Drawn(1, 3)),
    ],
    ids=["coupled, tree", "rejection, mixed tree", "block, chain"],
)
def test_the_engines_rules_have_the_law_of_the_target(name: str, drafts: Drafts) -> None:
    p = found(RULES.get(name)(), drafts, ALL_AT_ONCE)
    assert all(value > RARE for value in p.values()), p


def test_coupled_text_is_that_of_plain_decoding() -> None:
    tables = Tables(scenario(ALL_AT_ONCE))
    rule = RULES.get("coupled")()
    for seed in range(2000):
        plain = text(rule, tables, nothing, seed)
        assert text(rule, tables, Drawn(1, 3), seed) == plain
        assert text(rule, tables, Drawn(2, 2, mixed=True), seed) == plain


class SharedNoise(Rejection):
    """Draws the draft with the noise that judges it."""

    def draft_stream(self, position: int) -> int:
        return Stream.ACCEPT


def test_draft_noise_that_also_judges_is_found_out() -> None:
    assert min(found(Rejection(), Drawn(1, 1), "memory", draws=3000).values()) > RARE
    assert min(found(SharedNoise(), Drawn(1, 1), "memory", draws=3000).values()) < RARE
