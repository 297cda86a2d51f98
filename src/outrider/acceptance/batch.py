"""Drafts of many sequences as tensors: checked, and walked in lock-step by the public functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from outrider.core.errors import UsageError

Tensor = torch.Tensor

NOTHING = -1
"""Fills the places of a result that hold no token or node."""
_SUM_TOLERANCE = 1e-2
"""How far a row may be from adding up to 1; bfloat16 probabilities are off by several thousandths."""


@dataclass(frozen=True)
class VerifyResult:
    """What became of N drafts.

    accepted: [N] int64, number of draft tokens kept. next_token: [N] int64, the correction or bonus token.
    tokens: [N, n+1] int64, the accepted draft tokens and then the next token, padded with -1.
    path: [N, n] int64, the accepted nodes top down, padded with -1; of a chain 0, 1, …
    """

    accepted: Tensor
    tokens: Tensor
    next_token: Tensor
    path: Tensor


@dataclass(frozen=True)
class Draft:
    """Checked drafts. ids, parents: [N, n] int64. lengths: [N] int64."""

    ids: Tensor
    parents: Tensor
    lengths: Tensor

    @property
    def size(self) -> int:
        return self.ids.shape[1]

    @property
    def depth(self) -> int:
        """Length of the longest path."""
        depths = torch.zeros(len(self.ids), self.size + 1, dtype=torch.long, device=self.ids.device)
        for node in range(self.size):
            depths[:, node + 1] = depths.gather(1, self.parents[:, node : node + 1] + 1).squeeze(1) + 1
        return int(torch.where(self.rows, depths, 0).max()) if len(self.ids) else 0

    @property
    def counts(self) -> Tensor:
        """[N, n], whether each node is part of its draft, not padding."""
        return torch.arange(self.size, device=self.ids.device) < self.lengths.unsqueeze(1)

    @property
    def rows(self) -> Tensor:
        """[N, n+1], whether each of the target's rows may be read."""
        return torch.cat([torch.ones_like(self.lengths, dtype=torch.bool).unsqueeze(1), self.counts], dim=1)

    @property
    def inner_rows(self) -> Tensor:
        """[N, n], whether each of the first n rows has children."""
        children = torch.zeros_like(self.ids).scatter_add(1, self.parents + 1, self.counts.long())
        return children > 0


class Walk:
    """Where each of N sequences stands in its tree. Because parents come before their children, and siblings in the
    order in which they are tried, one pass over the nodes visits them in the right order for every sequence."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        count, size = draft.ids.shape
        self._rows = torch.arange(count, device=draft.ids.device)
        self._node = torch.full((count,), -1, device=draft.ids.device)
        self.depth = torch.zeros_like(self._node)
        self._path = torch.full((count, size), NOTHING, device=draft.ids.device)

    def waiting_for(self, node: int) -> Tensor:
        """Sequences [M] that stand at the parent of ``node``."""
        here = (self.draft.parents[:, node] == self._node) & (node < self.draft.lengths)
        return self._rows[here]

    def accept(self, rows: Tensor, node: int) -> None:
        """Move the sequences ``rows`` [M] down to ``node``."""
        self._path[rows, self.depth[rows]] = node
        self.depth[rows] += 1
        self._node[rows] = node

    @property
    def row(self) -> Tensor:
        """[N] row of the target's distributions for where each sequence stands."""
        return self._node + 1

    def finish(self, next_token: Tensor) -> VerifyResult:
        return _result(self.draft, self._path, self.depth, next_token)


def chain_result(draft: Draft, accepted: Tensor, next_token: Tensor) -> VerifyResult:
    """Result for chains of which the first ``accepted`` [N] tokens are kept."""
    numbers = torch.arange(draft.size, device=accepted.device)
    path = torch.where(numbers < accepted.unsqueeze(1), numbers, NOTHING)
    return _result(draft, path, accepted, next_token)


def tree_result(draft: Draft, last: Tensor, accepted: Tensor, next_token: Tensor) -> VerifyResult:
    """Result for trees whose accepted path, of length ``accepted`` [N], ends at the node ``last`` [N], or -1."""
    path = torch.full_like(draft.ids, NOTHING)
    node = last.clone()
    for depth in reversed(range(draft.size)):
        on_path = depth < accepted
        path[on_path, depth] = node[on_path]
        node[on_path] = draft.parents[on_path, node[on_path]]
    return _result(draft, path, accepted, next_token)


def _result(draft: Draft, path: Tensor, accepted: Tensor, next_token: Tensor) -> VerifyResult:
    kept = torch.where(path >= 0, draft.ids.gather(1, path.clamp(min=0)), NOTHING)
    tokens = torch.cat([kept, torch.full_like(accepted, NOTHING).unsqueeze(1)], dim=1)
    tokens.scatter_(1, accepted.unsqueeze(1), next_token.unsqueeze(1))
    return VerifyResult(accepted, tokens, next_token, path)


def check_draft(
    draft_ids: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    parents: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Draft:
    """Check distributions and drafts against each other. Arguments as in `rejection_sample`. Raises UsageError."""
    draft = check_ids(draft_ids, target_probs, parents, lengths)
    check_probs("target_probs", target_probs, draft.rows)
    if draft_probs is not None:
        _check_shape("draft_probs", draft_probs, (*draft.ids.shape, target_probs.shape[-1]))
        check_probs("draft_probs", draft_probs, draft.inner_rows)
    return draft


def check_ids(draft_ids: Tensor, rows: Tensor, parents: Tensor | None, lengths: Tensor | None) -> Draft:
    """Check drafts against the target's ``rows`` [N, n+1, V]. Raises UsageError."""
    if draft_ids.ndim != 2 or not _is_integer(draft_ids):
        raise UsageError(f"draft_ids must be integers [N, n], not {_describe(draft_ids)}")
    count, size = draft_ids.shape
    if rows.ndim != 3 or rows.shape[:2] != (count, size + 1) or not rows.is_floating_point():
        raise UsageError(f"the target's rows must be floats [{count}, {size + 1}, V], not {_describe(rows)}")
    device = draft_ids.device
    if lengths is None:
        lengths = torch.full((count,), size, device=device)
    _check_shape("lengths", lengths, (count,))
    if not _is_integer(lengths) or bool(((lengths < 0) | (lengths > size)).any()):
        raise UsageError(f"lengths must be integers between 0 and {size}")
    draft = Draft(draft_ids.long(), _check_parents(parents, draft_ids), lengths.long())
    if bool((draft.counts & ((draft.ids < 0) | (draft.ids >= rows.shape[-1]))).any()):
        raise UsageError(f"draft_ids hold a token outside the vocabulary of {rows.shape[-1]}")
    return replace(draft, ids=torch.where(draft.counts, draft.ids, 0))


def _check_parents(parents: Tensor | None, ids: Tensor) -> Tensor:
    size = ids.shape[1]
    numbers = torch.arange(size, device=ids.device)
    if parents is None:
        return (numbers - 1).expand_as(ids)
    if parents.shape not in (ids.shape, ids.shape[1:]) or not _is_integer(parents):
        raise UsageError(f"parents must be integers [{size}] or {list(ids.shape)}, not {_describe(parents)}")
    if bool(((parents < -1) | (parents >= numbers)).any()):
        raise UsageError("parents must be -1 for the root or the number of an earlier node")
    return parents.long().expand_as(ids)


def check_probs(name: str, probs: Tensor, used: Tensor) -> None:
    """Raise UsageError unless every row of ``probs`` [N, R, V] that is ``used`` [N, R] is a distribution."""
    if not probs.is_floating_point():
        raise UsageError(f"{name} must hold floats, not {probs.dtype}")
    sums = probs.sum(-1, dtype=torch.float64)
    wrong = used & ~(((sums - 1).abs() <= _SUM_TOLERANCE) & (probs.amin(-1) >= 0))
    if bool(wrong.any()):
        where = wrong.nonzero()[0].tolist()
        raise UsageError(
            f"{name}{where} is no distribution: it holds NaN or a negative number, or does not add up to 1"
        )


def check_logprobs(name: str, logprobs: Tensor, used: Tensor) -> None:
    """Raise UsageError unless every row of ``logprobs`` [N, R, V] that is ``used`` [N, R] leaves a token to choose."""
    wrong = used & ~logprobs.amax(-1).isfinite()
    if bool(wrong.any()):
        where = wrong.nonzero()[0].tolist()
        raise UsageError(f"{name}{where} holds NaN or +inf, or rules every token out")


def check_uniforms(
    name: str,
    values: Tensor | None,
    shape: Sequence[int],
    device: torch.device,
    generator: torch.Generator | None,
) -> Tensor:
    """``values`` as float64, drawn from ``generator`` if None. Raises UsageError unless all lie in [0, 1)."""
    if values is None:
        return torch.rand(*shape, dtype=torch.float64, device=device, generator=generator)
    _check_shape(name, values, shape)
    if not bool(((values >= 0) & (values < 1)).all()):
        raise UsageError(f"{name} must lie in [0, 1)")
    return values.double()


def _check_shape(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise UsageError(f"{name} must have the shape {list(shape)}, not {list(tensor.shape)}")


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
