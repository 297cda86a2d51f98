"""Cross-entropy against the target's distribution, without ever holding the logits of all rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_BLOCK = 2048
"""Rows whose gradients by logits are held at once: enough for that of the output matrix to be one good product."""
_CHUNK = 256
"""Rows whose logits are turned to probabilities at once: few enough to stay in the cache."""


@dataclass(frozen=True)
class Wanted:
    """Distributions to be met. probs: [N, D]. likeliest: [N] int64, the largest column of each."""

    probs: torch.Tensor
    likeliest: torch.Tensor

    @classmethod
    def of_target(cls, normed: torch.Tensor, output: torch.Tensor, dtype: torch.dtype) -> Wanted:
        """The softmax of normed [N, H] through output [D, H], kept in ``dtype``; sums in the dtype of ``output``."""
        probs = torch.empty(len(normed), len(output), dtype=dtype)
        likeliest = torch.empty(len(normed), dtype=torch.int64)
        for start in range(0, len(normed), _CHUNK):
            part = slice(start, start + _CHUNK)
            logits = normed[part].to(output.dtype) @ output.T
            likeliest[part] = logits.max(-1).indices
            probs[part] = logits.float().softmax(-1)
        return cls(probs, likeliest)


@dataclass(frozen=True)
class CrossEntropy:
    """total: scalar, sum over rows of scale * cross-entropy, differentiable by rows and matrix.

    entropy: [R] float32, each row's cross-entropy. hit: [R] bool, whether its likeliest column is the target's.
    """

    total: torch.Tensor
    entropy: torch.Tensor
    hit: torch.Tensor


def soft_cross_entropy(
    x: torch.Tensor, output: torch.Tensor, wanted: Wanted, index: torch.Tensor, scale: torch.Tensor
) -> CrossEntropy:
    """-sum_v p(v) log softmax(x output^T)(v) for every row.

    x: [R, H]. output: [D, H], in the dtype of ``x``, as are ``wanted.probs``; row r is to meet distribution
    ``index[r]``. scale: [R] float32, weight of each row in the total.
    """
    total, entropy, best = _SoftCrossEntropy.apply(x, output, wanted.probs, index, scale)  # type: ignore[no-untyped-call]
    return CrossEntropy(total, entropy, best == wanted.likeliest[index])


class _SoftCrossEntropy(torch.autograd.Function):
    """Gradients are computed along with the values, since both need the same logits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        output: torch.Tensor,
        probs: torch.Tensor,
        index: torch.Tensor,
        scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        entropy, best = torch.empty(len(x)), torch.empty(len(x), dtype=torch.int64)
        learns_x, learns_output = ctx.needs_input_grad[:2]
        d_x = torch.empty_like(x) if learns_x else None
        d_output = torch.zeros(output.shape) if learns_output else None
        held = torch.empty(min(len(x), _BLOCK), len(output), dtype=x.dtype)
        for start in range(0, len(x), _BLOCK):
            block = slice(start, min(start + _BLOCK, len(x)))
            d_logits = held[: block.stop - block.start]
            for first in range(block.start, block.stop, _CHUNK):
                part = slice(first, min(first + _CHUNK, block.stop))
                inner = slice(part.start - block.start, part.stop - block.start)
                wanted = probs[index[part]]
                logits = x[part] @ output.T
                entropy[part], best[part], q = _compare(logits, wanted)
                torch.mul(q.sub_(wanted), scale[part, None].to(q.dtype), out=d_logits[inner])
                if d_x is not None:
                    torch.mm(d_logits[inner], output, out=d_x[part])
            if d_output is not None:
                d_output += d_logits.T @ x[block]
        ctx.save_for_backward(d_x, d_output)
        ctx.dtype = output.dtype
        ctx.mark_non_differentiable(entropy, best)
        return (entropy * scale).sum(), entropy, best

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *unused: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_x, d_output = ctx.saved_tensors
        d_x = None if d_x is None else d_x * gradient.to(d_x.dtype)
        d_output = None if d_output is None else (d_output * gradient).to(ctx.dtype)
        return d_x, d_output, None, None, None


def _compare(logits: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross-entropy, the likeliest columns, and the softmax of ``logits`` in their dtype."""
    largest, best = logits.max(-1)
    q = logits.softmax(-1)
    log_sum = largest.float() - q.gather(1, best[:, None]).squeeze(1).float().log()
    mean = torch.linalg.vecdot(wanted, logits).float()
    return log_sum - mean, best, q
