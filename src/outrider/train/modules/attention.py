"""Attention of draft chains: every chain sees the true rows up to its base, and its own rows behind them.

The part over true rows is plain causal attention, for which PyTorch has a fused kernel that never holds a [T, T]
matrix; the few keys of a chain's own are added to its softmax by their log-sum-exp (as in Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018). The kernel's backward pass rebuilds weights from the log-sum-exp
that it is given, so that with the one of both parts it returns the gradients of the joint softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Grid:
    """Where the flat rows of a batch lie in a padded grid [samples, longest].

    slots: [N] int64, of each row: sample * longest + its place in the sample.
    """

    samples: int
    longest: int
    slots: torch.Tensor

    def spread(self, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """rows [R, heads, d], each with its own slot -> [samples, heads, longest, d], zeros where there is none."""
        grid = rows.new_zeros(self.samples * self.longest, *rows.shape[1:]).index_copy(0, slots, rows)
        return grid.view(self.samples, self.longest, *rows.shape[1:]).transpose(1, 2)

    def gather(self, grid: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The reverse of `spread`: [samples, heads, longest, d] or [samples, heads, longest] -> [R, heads, …]."""
        return grid.transpose(1, 2).reshape(self.samples * self.longest, grid.shape[1], *grid.shape[3:])[slots]


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    grid: Grid,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Output [R, heads, d] of one step of R chains, differentiable, in the dtype of ``queries``.

    queries: [R, heads, d]. keys, values: of the true rows, [samples, heads, longest, d]; a chain whose base lies in a
    slot sees those of the same sample up to there. own_keys, own_values: [R, steps, kv_heads, d], the rows of each
    chain that have no true feature, the current one last; no steps: the row is a true one. slots: [R].
    """
    out: torch.Tensor = _ChainAttention.apply(  # type: ignore[no-untyped-call]
        queries, keys, values, own_keys, own_values, grid, slots
    )
    return out


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        own_keys: torch.Tensor,
        own_values: torch.Tensor,
        grid: Grid,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        spread = grid.spread(queries, slots)
        out, sums = _flash(spread, keys, values, 0.0, True)
        scores = None
        if own_keys.shape[1]:
            scores = _own_scores(queries, own_keys)
            true_sums = grid.gather(sums, slots)
            joint = torch.logaddexp(true_sums, scores.logsumexp(-1))
            rows = grid.gather(out, slots).float() * (true_sums - joint).exp().unsqueeze(-1)
            weights = (scores - joint.unsqueeze(-1)).exp()
            for step in range(own_keys.shape[1]):
                rows += weights[..., step, None] * _to_heads(own_values[:, step], rows)
            scores, rows = weights, rows.to(queries.dtype)
            out = grid.spread(rows, slots)
            sums = grid.spread(joint.unsqueeze(-1), slots).squeeze(-1)
        else:
            rows = grid.gather(out, slots)
        ctx.save_for_backward(queries, keys, values, own_keys, own_values, slots, out, sums, rows, scores)
        ctx.grid = grid
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        queries, keys, values, own_keys, own_values, slots, out, sums, rows, weights = ctx.saved_tensors
        grid: Grid = ctx.grid
        d_spread, d_keys, d_values = _flash_backward(
            grid.spread(gradient, slots), grid.spread(queries, slots), keys, values, out, sums, 0.0, True
        )
        d_queries = grid.gather(d_spread, slots)
        if weights is None:
            return d_queries, d_keys, d_values, torch.zeros_like(own_keys), torch.zeros_like(own_values), None, None
        gradient32 = gradient.float()
        mean = (gradient32 * rows.float()).sum(-1)
        scale = queries.shape[-1] ** -0.5
        d_queries, queries32 = d_queries.float(), queries.float()
        d_own_keys, d_own_values = torch.empty_like(own_keys), torch.empty_like(own_values)
        for step in range(own_keys.shape[1]):
            weight = weights[..., step]
            key, value = _to_heads(own_keys[:, step], rows), _to_heads(own_values[:, step], rows)
            d_own_values[:, step] = _to_kv_heads(gradient32 * weight.unsqueeze(-1), own_values)
            d_score = (weight * ((gradient32 * value).sum(-1) - mean) * scale).unsqueeze(-1)
            d_queries += d_score * key
            d_own_keys[:, step] = _to_kv_heads(queries32 * d_score, own_keys)
        return d_queries.to(queries.dtype), d_keys, d_values, d_own_keys, d_own_values, None, None


def _own_scores(queries: torch.Tensor, own_keys: torch.Tensor) -> torch.Tensor:
    """float32 [R, heads, steps], scaled."""
    queries32 = queries.float() * queries.shape[-1] ** -0.5
    steps = range(own_keys.shape[1])
    return torch.stack([(queries32 * _to_heads(own_keys[:, step], queries32)).sum(-1) for step in steps], dim=-1)


def _to_heads(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[R, kv_heads, d] -> float32 [R, heads, d]: neighbouring heads share keys and values."""
    return rows.float().repeat_interleave(like.shape[1] // rows.shape[1], dim=1)


def _to_kv_heads(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The gradient of `_to_heads`: [R, heads, d] -> [R, kv_heads, d], summed."""
    return rows.view(len(rows), like.shape[2], -1, rows.shape[2]).sum(2)
