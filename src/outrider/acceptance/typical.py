"""Typical acceptance: keep drafted tokens that the target finds likely enough. Lossy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from outrider.acceptance import batch, formulas
from outrider.acceptance.base import AcceptanceRule, Candidate, Verdict
from outrider.acceptance.batch import VerifyResult
from outrider.acceptance.distribution import target
from outrider.acceptance.walk import follow, own_token
from outrider.core.config import SpeculativeConfig
from outrider.core.errors import UsageError
from outrider.core.tree import ROOT

if TYPE_CHECKING:
    from outrider.core.tree import DraftTree

Tensor = torch.Tensor


class Typical(AcceptanceRule):
    """Medusa's typical acceptance (Cai et al., 2024): changes the output's distribution.

    A node is kept if its token is not ruled out, and the target gives it at least
    min(posterior_threshold, posterior_alpha * exp(-entropy)). The longest path of kept nodes is accepted, the first of
    equally long ones. The token after it is the target's own, as under `Coupled`. At temperature 0 the rule is greedy
    and loses nothing.
    """

    name: ClassVar[str] = "typical"
    lossless: ClassVar[bool] = False

    def __init__(self, config: SpeculativeConfig | None = None) -> None:
        config = config or SpeculativeConfig()
        self._threshold = config.posterior_threshold
        self._alpha = config.posterior_alpha

    def accept(self, candidates: Sequence[Candidate]) -> list[Verdict]:
        return [follow(c) if c.sampling.params.greedy else self._judge(c) for c in candidates]

    def _judge(self, candidate: Candidate) -> Verdict:
        tree = candidate.tree
        paths: dict[int, list[int]] = {ROOT: []}
        for parent, children in sorted(tree.children().items()):
            if parent not in paths:
                continue
            probs = target(candidate, parent, _tokens(tree, paths[parent])).probs
            least = formulas.typical_threshold(probs, self._threshold, self._alpha)
            for child in children:
                if 0 < probs[tree.tokens[child]] >= least:
                    paths[child] = [*paths[parent], child]
        best = max(sorted(paths), key=lambda node: len(paths[node]))
        return Verdict(tuple(paths[best]), own_token(candidate, best, _tokens(tree, paths[best])))


def _tokens(tree: DraftTree, nodes: Sequence[int]) -> list[int]:
    return [tree.tokens[node] for node in nodes]


def typical_accept(
    draft_ids: Tensor,
    target_probs: Tensor,
    *,
    posterior_threshold: float = 0.09,
    posterior_alpha: float = 0.3,
    parents: Tensor | None = None,
    lengths: Tensor | None = None,
    resample_uniforms: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> VerifyResult:
    """Judge N drafts at once by typical acceptance, which is lossy. Arguments and errors as in `rejection_sample`.

    The token after the accepted path is drawn from the target's distribution with ``resample_uniforms``.
    """
    for name, value in (("posterior_threshold", posterior_threshold), ("posterior_alpha", posterior_alpha)):
        if not 0 <= value <= 1:
            raise UsageError(f"{name}={value} must be between 0 and 1")
    draft = batch.check_draft(draft_ids, target_probs, None, parents, lengths)
    last_u = batch.check_uniforms(
        "resample_uniforms", resample_uniforms, draft.ids.shape[:1], draft.ids.device, generator
    )
    rows = torch.arange(len(draft.ids), device=draft.ids.device)
    depths = torch.zeros(len(rows), draft.size + 1, dtype=torch.long, device=rows.device)
    for node in range(draft.size):
        parent_row = draft.parents[:, node] + 1
        p = target_probs[rows, parent_row].double()
        least = formulas.typical_threshold(p, posterior_threshold, posterior_alpha)
        own = formulas.of(p, draft.ids[:, node])
        kept = (own > 0) & (own >= least) & (node < draft.lengths)
        kept &= (parent_row == 0) | (depths[rows, parent_row] > 0)
        depths[:, node + 1] = torch.where(kept, depths[rows, parent_row] + 1, 0)
    best = depths.argmax(1)
    next_token = formulas.pick(target_probs[rows, best].double(), last_u)
    return batch.tree_result(draft, best - 1, depths[rows, best], next_token)
