"""The rules under a grammar have the law of the masked target: chi-square, as in `test_distribution_rules`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from outrider.acceptance import RULES
from outrider.acceptance.base import AcceptanceRule, Candidate
from outrider.core.gumbel import gumbel_top_k
from outrider.core.mask import TokenMask
from outrider.core.sampling import SamplingParams, SamplingState
from outrider.core.structured import StructuredOutputs
from outrider.core.tree import ROOT, DraftTree
from outrider.grammar.compiler import Compiler
from outrider.grammar.matcher import GrammarMask
from outrider.grammar.vocabulary import Vocabulary
from outrider.models.loader import Model
from tests.lossless.markov import LENGTH, RARE, Scenario, p_values, table
from tests.support.fakes import fake_model

DRAWS = 8_000
VOCAB, END = 5, 4
PAIRS = StructuredOutputs(regex="([ab][bcd])*")
EVEN, ODD = [0, 1, END], [1, 2, 3]
"""Tokens that `PAIRS` allows at even and at odd positions."""


class Letters:
    """The tokens a, b, c, d and an end."""

    vocab_size = VOCAB
    special_ids = frozenset({END})

    class _Bytes:
        strips_space = False

        def __call__(self, token: int) -> bytes:
            return b"abcd"[token : token + 1]

    token_bytes = _Bytes()


def compiler() -> Compiler:
    model = fake_model(vocab_size=VOCAB, eos_token_ids=(END,))
    return Compiler(Vocabulary(Model("letters", model.config, model.weights, Letters())))  # type: ignore[arg-type]


COMPILER = compiler()
CASE = Scenario("masked", *(table(np.random.default_rng(seed), VOCAB, 1.0) for seed in (30, 31)), eos=END)


def law() -> torch.Tensor:
    """The law of the first three tokens: p, with what `PAIRS` forbids left out."""

    def masked(row: torch.Tensor, kept: Sequence[int]) -> torch.Tensor:
        result = torch.zeros_like(row)
        result[list(kept)] = row[list(kept)]
        return result / result.sum()

    result = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64)
    first = masked(CASE.p[0, 0], EVEN)
    for a in EVEN:
        if a == END:
            result[END, END, END] = first[END]
            continue
        second = masked(CASE.p[0, a], ODD)
        for b in ODD:
            result[a, b] = first[a] * second[b] * masked(CASE.p[a, b], EVEN)
    return result


def tree(
    sampling: SamplingState, tokens: Sequence[int], stream: int, width: int, depth: int, chosen: bool
) -> DraftTree:
    """A complete tree, drawn from the masked q; chosen: each node's second child is a fixed token, often forbidden."""
    ids: list[int] = []
    parents: list[int] = []
    logprobs: dict[int, torch.Tensor] = {}
    level: list[tuple[int, list[int]]] = [(ROOT, [])]
    for at in range(depth):
        below: list[tuple[int, list[int]]] = []
        for node, path in level:
            context = [*tokens, *path][-2:]
            if chosen:
                children = [(sum(context) + i) % VOCAB for i in range(width)]
            else:
                q = sampling.logprobs(CASE.q[context[0], context[1]].log().float(), path)
                logprobs[node] = q
                children = gumbel_top_k(q, width, sampling.seed, sampling.position + at, stream)
            for token in children:
                if token != END:
                    below.append((len(ids), [*path, token]))
                ids.append(token)
                parents.append(node)
        level = below
    return DraftTree(ids, parents, [0.5] * len(ids), logprobs)


MakeMask = Callable[[], TokenMask]


def grammar_mask() -> TokenMask:
    return GrammarMask(COMPILER.compile(PAIRS), COMPILER.vocabulary)


def text(rule: AcceptanceRule, make: MakeMask, seed: int, width: int, depth: int, chosen: bool) -> list[int]:
    sampling = SamplingState(SamplingParams(temperature=1.0, seed=seed), VOCAB, (0, 0), [END], make())
    tokens = [0, 0]
    while len(tokens) < 2 + LENGTH:
        drafted = tree(sampling, tokens, rule.draft_stream(sampling.position), width, depth, chosen)
        paths = [[*tokens, *(drafted.tokens[i] for i in drafted.path(node))] for node in range(ROOT, len(drafted))]
        logits = torch.stack([CASE.p[path[-2], path[-1]].log().float() for path in paths])
        verdict = rule.accept([Candidate(drafted, logits, sampling)])[0]
        for token in [*(drafted.tokens[node] for node in verdict.path), verdict.token]:
            tokens.append(token)
            if token == END:
                tokens += [END] * LENGTH
                break
            sampling.commit(token)
    return tokens[2 : 2 + LENGTH]


def found(rule: str, width: int, depth: int, *, chosen: bool = False, make: MakeMask = grammar_mask) -> float:
    own = RULES.get(rule)()
    texts = torch.tensor([text(own, make, seed, width, depth, chosen) for seed in range(DRAWS)])
    return min(p_values(texts, law()).values())


@pytest.mark.parametrize(
    ("rule", "width", "depth", "chosen"),
    [
        ("coupled", 2, 2, False),
        ("rejection", 1, 3, False),
        ("rejection", 2, 2, False),
        ("rejection", 2, 2, True),
        ("block", 1, 3, False),
        ("block", 1, 3, True),
    ],
)
def test_rules_have_the_law_of_the_masked_target(rule: str, width: int, depth: int, chosen: bool) -> None:
    assert found(rule, width, depth, chosen=chosen) > RARE


class TooStrict(TokenMask):
    """A twin that rules out one token too many below nodes of depth two, and lets nothing impossible in."""

    def __init__(self) -> None:
        self._right = grammar_mask()

    def forbidden(self, path: Sequence[int]) -> np.ndarray | None:
        right = self._right.forbidden(path)
        if right is None or len(path) != 2:
            return right
        wrong = right.copy()
        wrong[0] = True
        return wrong

    def commit(self, token: int) -> None:
        self._right.commit(token)


@pytest.mark.parametrize(("rule", "width", "depth"), [("rejection", 1, 3), ("rejection", 2, 2), ("block", 1, 3)])
def test_a_mask_that_is_wrong_at_one_depth_is_found_out(rule: str, width: int, depth: int) -> None:
    assert found(rule, width, depth, make=TooStrict) < RARE
