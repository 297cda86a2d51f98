"""Rejection sampling: accept a drafted token with min(1, p/q), else draw from what is left of p."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from outrider.acceptance import batch, formulas
from outrider.acceptance.base import AcceptanceRule, Candidate, Verdict
from outrider.acceptance.batch import VerifyResult
from outrider.acceptance.distribution import chosen, proposal, target
from outrider.acceptance.walk import follow
from outrider.core.noise import Stream, uniform_one
from outrider.core.tree import ROOT

Tensor = torch.Tensor


class Rejection(AcceptanceRule):
    """Speculative sampling, exact in distribution on chains and trees (sources: `formulas`).

    Children are tried in the tree's order. After each rejection p becomes norm((p - q)+), and q loses the rejected
    token, since siblings are drawn without replacement. Children that were chosen, not drawn, are accepted with p.
    """

    name: ClassVar[str] = "rejection"
    noise_stream: ClassVar[Stream] = Stream.DRAFT
    needs_all_proposals: ClassVar[bool] = True

    def accept(self, candidates: Sequence[Candidate]) -> list[Verdict]:
        return [follow(c) if c.sampling.params.greedy else _judge(c) for c in candidates]


def _judge(candidate: Candidate) -> Verdict:
    tree, sampling = candidate.tree, candidate.sampling
    path: list[int] = []
    tokens: list[int] = []
    node, tried = ROOT, 0
    p, q = target(candidate, node, tokens), proposal(candidate, node)
    for child, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        if parent != node:
            continue
        drawn = q or chosen(candidate, token)
        u = uniform_one(sampling.seed, sampling.position + len(path), tried, Stream.ACCEPT)
        if u < formulas.acceptance_probability(p.of(token), drawn.of(token)):
            path.append(child)
            tokens.append(token)
            node, tried = child, 0
            p, q = target(candidate, node, tokens), proposal(candidate, node)
        else:
            p, q, tried = p.residual(drawn), q and q.without(token), tried + 1
    u = uniform_one(sampling.seed, sampling.position + len(path), 0, Stream.RESAMPLE)
    return Verdict(tuple(path), int(formulas.pick(p.probs, torch.tensor(u, dtype=torch.float64))))


def rejection_sample(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    *,
    parents: Tensor | None = None,
    lengths: Tensor | None = None,
    uniforms: Tensor | None = None,
    resample_uniforms: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> VerifyResult:
    """Judge N drafts at once, each with its own accepted length: chains, or trees if ``parents`` is given.

    draft_ids: [N, n] integers, the drafted tokens (n may be 0); of a tree, parents before children and siblings in the
        order in which they were drawn, without replacement.
    draft_probs: [N, n, V]. Row 0 is the distribution that the root's children were drawn from, row i+1 that of node i's
        children, so that of a chain row i is token i's. None: tokens were chosen, not drawn.
    target_probs: [N, n+1, V]. Row 0 follows the root, row i+1 follows node i.
    parents: [n] or [N, n], each node's parent, -1 for the root. lengths: [N], draft tokens that count; default n.
    uniforms: [N, n] in [0, 1), one for each node. resample_uniforms: [N], for the last token. Where they are not given
        they are drawn from ``generator``.
    Raises UsageError for shapes, types or values that do not fit.
    """
    draft = batch.check_draft(draft_ids, target_probs, draft_probs, parents, lengths)
    u = batch.check_uniforms("uniforms", uniforms, draft.ids.shape, draft.ids.device, generator)
    last_u = batch.check_uniforms("resample_uniforms", resample_uniforms, draft.ids.shape[:1], u.device, generator)
    p = target_probs[:, 0].to(torch.float64, copy=True)
    q = draft_probs[:, 0].to(torch.float64, copy=True) if draft_probs is not None and draft.size else None
    walk = batch.Walk(draft)
    for node in range(draft.size):
        at = walk.waiting_for(node)
        if not len(at):
            continue
        token = draft.ids[at, node]
        drawn = formulas.point_mass(token, p.shape[-1]) if q is None else q[at]
        chance = formulas.acceptance_probability(formulas.of(p[at], token), formulas.of(drawn, token))
        accepted = u[at, node] < chance
        lost = at[~accepted]
        p[lost] = formulas.residual(p[lost], drawn[~accepted])
        if q is not None:
            q[lost] = formulas.without(q[lost], token[~accepted])
        won = at[accepted]
        walk.accept(won, node)
        p[won] = target_probs[won, node + 1].double()
        if q is not None and draft_probs is not None and node + 1 < draft.size:
            q[won] = draft_probs[won, node + 1].double()
    return walk.finish(formulas.pick(p, last_u))
