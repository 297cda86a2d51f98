"""Targets and drafts small enough to know every probability, and rounds of speculation on a hundred thousand of them.

A model is a table [V, V, V]: the distribution of the next token given the last two. A simulation drafts, has the draft
judged by a public function of `outrider.acceptance`, keeps what it says, and goes on from there until every sequence
has three tokens. The law of those three is known exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats

from outrider.acceptance import VerifyResult, block_verify, coupled_verify, rejection_sample
from outrider.core.noise import gumbel

Tensor = torch.Tensor

DRAWS = 100_000
LENGTH = 3
"""Tokens of a sequence that are looked at; enough for two rounds or more."""
RARE = 1e-10
"""p-value below which a law is wrong. All tests together make fewer than a thousand comparisons: with other seeds (they
are fixed) a run would raise a false alarm less than once in ten million times."""
LEAST_EXPECTED = 100
"""Outcomes expected less often are pooled; with fewer, the tail of chi-square at `RARE` is not to be trusted."""


@dataclass(frozen=True)
class Scenario:
    """p, q: [V, V, V] float64, target and draft. eos: a token after which a sequence is over."""

    name: str
    p: Tensor
    q: Tensor
    eos: int | None = None

    @property
    def vocab(self) -> int:
        return self.p.shape[-1]

    def law(self) -> Tensor:
        """Probability [V, V, V] of the first three tokens under the target; after EOS only EOS follows."""
        v = self.vocab
        p = self.p.clone()
        if self.eos is not None:
            p[:, self.eos] = torch.eye(v, dtype=torch.float64)[self.eos]
        law = torch.zeros(v, v, v, dtype=torch.float64)
        for a in range(v):
            for b in range(v):
                law[a, b] = self.p[0, 0, a] * p[0, a, b] * p[a, b]
        return law


def table(random: np.random.Generator, vocab: int, concentration: float) -> Tensor:
    return torch.from_numpy(random.dirichlet([concentration] * vocab, size=(vocab, vocab)))


def with_zeros(probs: Tensor, random: np.random.Generator) -> Tensor:
    """Some tokens ruled out in every context, never all."""
    kept = torch.from_numpy(random.random(probs.shape) < 0.6)
    kept |= probs == probs.amax(-1, keepdim=True)
    probs = probs * kept
    return probs / probs.sum(-1, keepdim=True)


def scenarios() -> list[Scenario]:
    random = np.random.default_rng(20)
    p, q = table(random, 4, 1.0), table(random, 4, 1.0)
    sharp = 0.97 * table(random, 4, 0.1) + 0.03 / 4
    far = sharp.roll(1, -1) * 0.9 + 0.1 * sharp
    start, middle = sharp.clone(), far.clone()
    start[0, 0] = middle[0, 0] = torch.tensor([0.04, 0.3, 0.36, 0.3])
    few, more = with_zeros(table(random, 5, 1.0), random), with_zeros(table(random, 5, 1.0), random)
    return [
        Scenario("generic", p, q),
        Scenario("rejected at the first position", sharp, far),
        Scenario("rejected in the middle", start, middle),
        Scenario("all accepted", p, p),
        Scenario("memory", *memory()),
        Scenario("EOS inside", p, q, eos=2),
        Scenario("tokens of probability zero", few, more),
        Scenario("tokens of probability zero, EOS inside", few, more, eos=1),
    ]


def memory() -> tuple[Tensor, Tensor]:
    """p and q whose second token decides much about the fate of the first, and whose third repeats the second."""
    p = torch.full((2, 2, 2), 0.5, dtype=torch.float64)
    q = p.clone()
    p[0, 0], q[0, 0] = torch.tensor([0.4, 0.6]), torch.tensor([0.6, 0.4])
    q[0, 1] = q[1, 0] = torch.tensor([0.9, 0.1])
    return p, q


@dataclass(frozen=True)
class Draft:
    """Drafts of N sequences, laid out as the public functions take them. lengths: for chains only."""

    ids: Tensor
    probs: Tensor
    target: Tensor
    parents: Tensor
    lengths: Tensor


def complete_tree(width: int, depth: int) -> list[int]:
    """Parents of the nodes of a complete tree, level by level."""
    parents: list[int] = []
    level = [-1]
    for _ in range(depth):
        children = [(parent, len(parents) + i) for i, parent in enumerate(p for p in level for _ in range(width))]
        parents += [parent for parent, _ in children]
        level = [node for _, node in children]
    return parents


def draft(scenario: Scenario, context: Tensor, width: int, depth: int, noise: Tensor | None) -> Draft:
    """Complete trees below ``context`` [N, 2]: children by Gumbel-top-k with ``noise`` [N, depth, V], or the q's top-k.

    In a chain, what follows EOS is cut off, as the engine does.
    """
    parents = complete_tree(width, depth)
    contexts = [context]
    ids: list[Tensor] = []
    level = [0]
    for at in range(depth):
        below: list[int] = []
        for row in level:
            scores = scenario.q[contexts[row][:, 0], contexts[row][:, 1]].log()
            scores = scores if noise is None else scores + noise[:, at]
            for token in scores.topk(width).indices.unbind(1):
                below.append(len(contexts))
                contexts.append(torch.stack([contexts[row][:, 1], token], 1))
                ids.append(token)
        level = below
    after = torch.stack(contexts, 1)
    tokens = torch.stack(ids, 1)
    lengths = torch.full((len(context),), len(ids))
    if width == 1 and scenario.eos is not None:
        ended = tokens == scenario.eos
        lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, lengths)
    rows = (after[..., 0], after[..., 1])
    return Draft(tokens, scenario.q[rows][:, :-1], scenario.p[rows], torch.tensor(parents), lengths)


Judge = Callable[[Draft, Tensor, torch.Generator], VerifyResult]
"""(draft, noise [N, D, V] that it was drawn with and more, generator) -> result"""


@dataclass(frozen=True)
class Method:
    """A rule and the way it is drafted for. shared: draft and target draw with the same noise, keyed by position.
    chosen: tokens are the q's most likely ones instead of draws."""

    name: str
    judge: Judge
    width: int = 1
    depth: int = 3
    shared: bool = False
    chosen: bool = False


def by_rejection(draft: Draft, noise: Tensor, generator: torch.Generator) -> VerifyResult:
    lengths = None if len(draft.parents) > 3 else draft.lengths
    return rejection_sample(
        draft.ids, draft.probs, draft.target, parents=draft.parents, lengths=lengths, generator=generator
    )


def by_rejection_of_chosen(draft: Draft, noise: Tensor, generator: torch.Generator) -> VerifyResult:
    return rejection_sample(draft.ids, None, draft.target, parents=draft.parents, generator=generator)


def by_block(draft: Draft, noise: Tensor, generator: torch.Generator) -> VerifyResult:
    return block_verify(draft.ids, draft.probs, draft.target, lengths=draft.lengths, generator=generator)


def by_block_of_chosen(draft: Draft, noise: Tensor, generator: torch.Generator) -> VerifyResult:
    return block_verify(draft.ids, None, draft.target, generator=generator)


def by_coupling(draft: Draft, noise: Tensor, generator: torch.Generator) -> VerifyResult:
    return coupled_verify(draft.ids, draft.target.log(), gumbel=noise, parents=draft.parents)


METHODS = [
    Method("rejection, chain", by_rejection),
    Method("rejection, tree", by_rejection, width=2, depth=2),
    Method("rejection, wide tree", by_rejection, width=3, depth=2),
    Method("rejection, chosen chain", by_rejection_of_chosen, chosen=True),
    Method("rejection, chosen tree", by_rejection_of_chosen, width=2, depth=2, chosen=True),
    Method("block, chain", by_block),
    Method("block, chosen chain", by_block_of_chosen, chosen=True),
    Method("coupled, chain", by_coupling, shared=True),
    Method("coupled, tree", by_coupling, width=2, depth=2, shared=True),
    Method("coupled, chosen tree", by_coupling, width=2, depth=2, shared=True, chosen=True),
]


def method(name: str) -> Method:
    return next(m for m in METHODS if m.name == name)


def scenario(name: str) -> Scenario:
    return next(s for s in scenarios() if s.name == name)


def fresh_noise(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return -torch.log(-torch.log(torch.rand(*shape, dtype=torch.float64, generator=generator)))


def positional_noise(count: int, positions: int, vocab: int, seed: int) -> Tensor:
    """[count, positions, V] of the package's own noise, another part of it for every sequence."""
    ids = np.arange(count * vocab).reshape(count, vocab)
    return torch.from_numpy(np.stack([gumbel(seed, position, ids) for position in range(positions)], axis=1))


def simulate(scenario: Scenario, method: Method, *, draws: int = DRAWS, seed: int = 1) -> Tensor:
    """[draws, 3] tokens that speculation produces; after EOS only EOS."""
    generator = torch.Generator().manual_seed(seed)
    vocab, room = scenario.vocab, LENGTH + method.depth + 1
    history = torch.zeros(draws, 2 + room, dtype=torch.long)
    done = torch.zeros(draws, dtype=torch.long)
    shared = positional_noise(draws, room, vocab, seed) if method.shared else None
    while bool((done < LENGTH).any()):
        open_ = (done < LENGTH).nonzero().squeeze(1)
        at = done[open_]
        context = torch.stack([history[open_, at], history[open_, at + 1]], 1)
        if shared is None:
            noise = fresh_noise((len(open_), method.depth + 1, vocab), generator)
        else:
            noise = shared[open_.unsqueeze(1), at.unsqueeze(1) + torch.arange(method.depth + 1)]
        drafted = draft(scenario, context, min(method.width, vocab), method.depth, None if method.chosen else noise)
        result = method.judge(drafted, noise, generator)
        for i in range(result.tokens.shape[1]):
            new = i <= result.accepted
            history[open_[new], 2 + at[new] + i] = result.tokens[new, i]
        done[open_] = at + result.accepted + 1
    return cut_after_eos(history[:, 2 : 2 + LENGTH], scenario.eos)


def cut_after_eos(tokens: Tensor, eos: int | None) -> Tensor:
    if eos is None:
        return tokens
    ended = (tokens == eos).int().cumsum(1) > 0
    return torch.where(ended, eos, tokens)


def p_values(tokens: Tensor, law: Tensor) -> dict[str, float]:
    """Chi-square of the first token and of all three against ``law`` [V, V, V]; 0 if the impossible has happened."""
    v = law.shape[0]
    cells = (tokens[:, 0] * v + tokens[:, 1]) * v + tokens[:, 2]
    seen = torch.bincount(cells, minlength=v**3).double().numpy().reshape(law.shape)
    return {
        "first token": chi_square(seen.sum((1, 2)), law.sum((1, 2)).numpy()),
        "three tokens": chi_square(seen.ravel(), law.numpy().ravel()),
    }


def chi_square(seen: np.ndarray, law: np.ndarray) -> float:
    if seen[law <= 1e-15].any():
        return 0.0
    expected = law / law.sum() * seen.sum()
    order = np.argsort(-expected)
    large = order[expected[order] >= LEAST_EXPECTED]
    small = order[len(large) :]
    groups_seen, groups_expected = seen[large], expected[large]
    if expected[small].sum() >= LEAST_EXPECTED:
        groups_seen = np.append(groups_seen, seen[small].sum())
        groups_expected = np.append(groups_expected, expected[small].sum())
    elif len(small) and len(large):
        groups_seen[-1] += seen[small].sum()
        groups_expected[-1] += expected[small].sum()
    if len(groups_seen) < 2:
        return math.nan
    return float(stats.chisquare(groups_seen, groups_expected).pvalue)
