"""One request's part of a round: the rows it forwards, and what came back for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from outrider.acceptance.base import Candidate, Verdict
from outrider.core.tree import EMPTY, DraftTree
from outrider.drafters.base import Observation
from outrider.engine.outputs import TokenLogprob
from outrider.executors.base import ForwardOutput, Segment

if TYPE_CHECKING:
    from outrider.engine.request import Request
    from outrider.executors.base import Executor


@dataclass(frozen=True)
class Draft:
    """tree: what is to be verified. proposed: the drafter's tree, before the planner left out what does not pay.

    seconds: the request's part of the time that drafting took; None if its drafter was not asked.
    """

    tree: DraftTree = EMPTY
    proposed: DraftTree = EMPTY
    seconds: float | None = None


NO_DRAFT = Draft()
"""Of a request whose drafter was not asked."""


@dataclass
class Share:
    """Rows ``tokens`` (tokens that are not in the KV cache yet; the last one is the root), then the draft's nodes.

    start: position of the first row.
    chunk: the rows are a piece of a long prompt that ends before the root; they need no logits and get no draft.
    logits: [1 + len(tree), V] after the forward pass: of the root, then of the nodes. hidden: layer -> [all rows, H].
    """

    request: Request
    start: int
    tokens: list[int]
    draft: Draft = NO_DRAFT
    chunk: bool = False
    logits: torch.Tensor | None = None
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)

    @property
    def tree(self) -> DraftTree:
        return self.draft.tree

    @property
    def rows(self) -> int:
        return len(self.tokens) + len(self.tree)

    def segment(self) -> Segment:
        """What the executor is to forward."""
        assert self.request.seq is not None
        root = len(self.tokens) - 1
        parents = [*range(-1, root), *(root + 1 + parent for parent in self.tree.parents)]
        wanted = () if self.chunk else tuple(range(root, root + 1 + len(self.tree)))
        return Segment(self.request.seq, [*self.tokens, *self.tree.tokens], parents, wanted)

    def candidate(self) -> Candidate:
        """What the acceptance rule is to judge."""
        assert self.logits is not None
        return Candidate(self.tree, self.logits, self.request.sampling)

    def accepted_rows(self, verdict: Verdict | None) -> list[int]:
        """Rows of the segment whose KV is kept: all of a chunk; else up to the root, and the accepted nodes."""
        root = len(self.tokens) - 1
        return [*range(root + 1), *(root + row for row in verdict.rows()[1:])] if verdict else list(range(root + 1))

    def observation(self, executor: Executor, verdict: Verdict | None, emitted: Sequence[int]) -> Observation:
        """What the drafter is to be told, after the tokens were emitted."""
        wants = self.request.speculation.drafter.wants
        context = self.tokens if self.chunk else self.tokens[:-1]
        top_ids = top_logprobs = None
        # Gathering candidates for a drafter that is not asked, since it does not pay, would cost without end.
        if wants.top_k and self.logits is not None and self.draft.seconds is not None:
            number = min(wants.top_k, self.logits.shape[-1])
            top_ids, top_logprobs = executor.top_k(self.logits, number)
        return Observation(
            view=self.request.view,
            committed=emitted,
            rows=[] if self.chunk else [self.tokens[-1], *self.tree.tokens],
            path=verdict.rows() if verdict else [],
            tree=self.tree,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            context=context,
            start=self.start,
            hidden={layer: self.hidden[layer] for layer in wants.hidden_layers},
            finished=self.request.finished,
        )

    def logprobs(self, verdict: Verdict, emitted: int) -> list[TokenLogprob]:
        """Log-probabilities of the emitted tokens under the target itself, drafted or not."""
        assert self.logits is not None
        number = min(self.request.sampling.params.logprobs or 0, self.logits.shape[-1])
        tokens = [*(self.tree.tokens[node] for node in verdict.path), verdict.token]
        result: list[TokenLogprob] = []
        for row, token in list(zip(verdict.rows(), tokens, strict=True))[:emitted]:
            of_row = torch.log_softmax(self.logits[row], dim=-1)
            best = of_row.topk(number)
            top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            result.append(TokenLogprob(token, float(of_row[token]), top))
        return result


def distribute(output: ForwardOutput, shares: Sequence[Share], segments: Sequence[Segment]) -> None:
    """Hand every share its rows of a forward pass."""
    logits = _split(output.logits, [segment.num_logits for segment in segments])
    for share, rows in zip(shares, logits, strict=True):
        share.logits = rows
    counts = [len(segment.tokens) for segment in segments]
    hidden = {layer: _split(rows, counts) for layer, rows in output.hidden.items()}
    for at, share in enumerate(shares):
        share.hidden = {layer: rows[at] for layer, rows in hidden.items()}


def _split(rows: torch.Tensor, counts: Sequence[int]) -> Sequence[torch.Tensor]:
    return (rows,) if len(counts) == 1 else rows.split_with_sizes(list(counts))
