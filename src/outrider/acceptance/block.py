"""Block verification: judge the drafted tokens of a chain together, and keep more of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from outrider.acceptance import batch, formulas
from outrider.acceptance.base import AcceptanceRule, Candidate, Verdict
from outrider.acceptance.batch import VerifyResult
from outrider.acceptance.distribution import Distribution, chosen, proposal, target
from outrider.acceptance.walk import follow
from outrider.core.noise import Stream, uniform_one

Tensor = torch.Tensor


class Block(AcceptanceRule):
    """Block verification (Sun et al., "Block verification accelerates speculative decoding", 2024). Chains only.

    Exact in distribution, and keeps at least as many tokens as `Rejection` on average: a prefix may be kept although
    one of its tokens alone would have been rejected. The judgement of early tokens depends on later ones, so its
    uniforms, like the draft's noise (`draft_stream`), belong to the round and are never met again.
    """

    name: ClassVar[str] = "block"
    trees: ClassVar[bool] = False
    noise_stream: ClassVar[Stream] = Stream.DRAFT
    needs_all_proposals: ClassVar[bool] = True

    def accept(self, candidates: Sequence[Candidate]) -> list[Verdict]:
        return [follow(c) if c.sampling.params.greedy else _judge(c) for c in candidates]


def _judge(candidate: Candidate) -> Verdict:
    tree = candidate.tree
    if not tree.is_chain():
        raise ValueError("block verification judges chains only")
    tokens = list(tree.tokens)
    p = [target(candidate, node, tokens[: node + 1]) for node in range(-1, len(tokens))]
    q = [proposal(candidate, node - 1) or chosen(candidate, token) for node, token in enumerate(tokens)]
    weights = [torch.tensor(1.0, dtype=torch.float64)]
    for i, token in enumerate(tokens):
        weights.append(formulas.block_weight(weights[i], p[i].of(token), q[i].of(token)))
    kept = len(tokens)
    while kept and _draw(candidate, kept - 1, Stream.ACCEPT) >= _chance(weights, p, q, kept):
        kept -= 1
    rest = p[kept].probs if kept == len(tokens) else formulas.residual(weights[kept] * p[kept].probs, q[kept].probs)
    u = torch.tensor(_draw(candidate, 0, Stream.RESAMPLE), dtype=torch.float64)
    return Verdict(tuple(range(kept)), int(formulas.pick(rest, u)))


def _draw(candidate: Candidate, index: int, stream: Stream) -> float:
    """A uniform number of this round: keyed by where the round starts, not by the position that it judges."""
    return uniform_one(candidate.sampling.seed, candidate.sampling.position, index, stream)


def _chance(weights: Sequence[Tensor], p: Sequence[Distribution], q: Sequence[Distribution], kept: int) -> Tensor:
    """Probability that the block ends after ``kept`` tokens, given that it does not end later."""
    weight = weights[kept]
    return weight if kept == len(q) or not weight else formulas.block_acceptance(weight, p[kept].probs, q[kept].probs)


def block_verify(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    *,
    lengths: Tensor | None = None,
    uniforms: Tensor | None = None,
    resample_uniforms: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> VerifyResult:
    """Judge N chains at once, each with its own accepted length. Arguments and errors as in `rejection_sample`."""
    draft = batch.check_draft(draft_ids, target_probs, draft_probs, None, lengths)
    u = batch.check_uniforms("uniforms", uniforms, draft.ids.shape, draft.ids.device, generator)
    last_u = batch.check_uniforms("resample_uniforms", resample_uniforms, draft.ids.shape[:1], u.device, generator)
    weight = torch.ones_like(last_u)
    accepted = torch.zeros_like(draft.lengths)
    rest = torch.empty_like(target_probs[:, 0], dtype=torch.float64)
    for kept in range(draft.size + 1):
        p = target_probs[:, kept].double()
        chance, left, next_weight = weight, p, weight
        if kept < draft.size:
            token = draft.ids[:, kept]
            q = formulas.point_mass(token, p.shape[-1]) if draft_probs is None else draft_probs[:, kept].double()
            longer = draft.lengths > kept
            chance = torch.where(longer, formulas.block_acceptance(weight, p, q), weight)
            left = torch.where(longer.unsqueeze(1), formulas.residual(weight.unsqueeze(1) * p, q), p)
            next_weight = formulas.block_weight(weight, formulas.of(p, token), formulas.of(q, token))
        ends = draft.lengths >= kept
        if kept:
            ends &= u[:, kept - 1] < chance
        accepted[ends] = kept
        rest[ends] = left[ends]
        weight = next_weight
    return batch.chain_result(draft, accepted, formulas.pick(rest, last_u))
