"""Coupled acceptance: keep what the target itself would have produced with this request's noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from outrider.acceptance import batch
from outrider.acceptance.base import AcceptanceRule, Candidate, Verdict
from outrider.acceptance.batch import VerifyResult
from outrider.acceptance.walk import follow
from outrider.core.errors import UsageError
from outrider.core.gumbel import gumbel_argmax

Tensor = torch.Tensor


class Coupled(AcceptanceRule):
    """The target's token at position t is argmax over v of log p(v) + G(seed, t, v); at temperature 0, the argmax.

    A child that holds it is accepted. The tokens depend on the target and the seed alone, so the rule is exact for any
    tree, and the text is the same with speculation on and off. A drafter that draws with the same noise agrees with
    the target with probability at least (1 - TV) / (1 + TV), TV being the total variation distance of p and q (Daliri,
    Musco, Suresh: "Coupling without communication and drafter-invariant speculative decoding", 2024).
    """

    name: ClassVar[str] = "coupled"

    def accept(self, candidates: Sequence[Candidate]) -> list[Verdict]:
        return [follow(candidate) for candidate in candidates]


def coupled_verify(
    draft_ids: Tensor,
    target_logprobs: Tensor,
    *,
    seeds: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    gumbel: Tensor | None = None,
    parents: Tensor | None = None,
    lengths: Tensor | None = None,
) -> VerifyResult:
    """Judge N drafts at once, each with its own noise and its own accepted length.

    draft_ids, parents, lengths: as in `rejection_sample`; how tokens were drafted makes no difference.
    target_logprobs: [N, n+1, V], not necessarily normalised, -inf where a token is ruled out. Row 0 follows the root,
        row i+1 follows node i.
    seeds, positions: N numbers each: the noise is that of `core.noise` for this seed and, at the root's children, this
        position (such log-probabilities must be float32 on the CPU).
    gumbel: [N, D, V], the noise itself instead, by depth; row 0 for the root's children, D above the depth of the tree.
    With neither, the rule is greedy: the target's token is the argmax, the lowest id on ties.
    Raises UsageError for shapes, types or values that do not fit.
    """
    draft = batch.check_ids(draft_ids, target_logprobs, parents, lengths)
    batch.check_logprobs("target_logprobs", target_logprobs, draft.rows)
    walk = batch.Walk(draft)
    choose = _chooser(target_logprobs, walk, seeds, positions, gumbel)
    own = choose(torch.arange(len(draft.ids), device=draft.ids.device))
    for node in range(draft.size):
        at = walk.waiting_for(node)
        won = at[draft.ids[at, node] == own[at]]
        if len(won):
            walk.accept(won, node)
            own[won] = choose(won)
    return walk.finish(own)


def _chooser(
    logprobs: Tensor,
    walk: batch.Walk,
    seeds: Sequence[int] | None,
    positions: Sequence[int] | None,
    gumbel: Tensor | None,
) -> Callable[[Tensor], Tensor]:
    """The function that gives the target's own token [M] for the sequences [M], wherever they stand."""
    count, _, vocab_size = logprobs.shape
    if (seeds is None) != (positions is None) or (seeds is not None and gumbel is not None):
        raise UsageError("give seeds and positions, or gumbel, or neither (greedy)")
    if seeds is not None and positions is not None:
        if not len(seeds) == len(positions) == count:
            raise UsageError(f"give {count} seeds and positions, one for each sequence")
        if logprobs.dtype != torch.float32 or logprobs.device.type != "cpu":
            raise UsageError("with seeds, target_logprobs must be float32 on the CPU")

        def by_seed(at: Tensor) -> Tensor:
            where = zip(at.tolist(), walk.row[at].tolist(), walk.depth[at].tolist(), strict=True)
            return torch.tensor([gumbel_argmax(logprobs[i, r], seeds[i], positions[i] + d) for i, r, d in where])

        return by_seed
    if gumbel is None:
        return lambda at: logprobs[at, walk.row[at]].argmax(-1)
    if gumbel.ndim != 3 or gumbel.shape[::2] != (count, vocab_size) or gumbel.shape[1] <= walk.draft.depth:
        needed = f"[{count}, D, {vocab_size}] with D of at least {walk.draft.depth + 1}"
        raise UsageError(f"gumbel must have the shape {needed}, not {list(gumbel.shape)}")
    return lambda at: (logprobs[at, walk.row[at]].double() + gumbel[at, walk.depth[at]]).argmax(-1)
