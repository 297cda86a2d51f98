"""Attention of a segment's rows over their own sequence: the committed prefix and each row's pending ancestors.

A row's sums run over positions in the text in ascending order, whether a key is committed or pending, with zeros after
the row's own position. A row thus meets the same sums in the same order whether it is decoded alone, in a chunk of the
prompt or in a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.executors.torch.kv import Slots
from outrider.executors.torch.products import dot, weighted_sum
from outrider.executors.torch.tree import TreeOrder

_ROWS_AT_ONCE = 64
"""Rows of a chain whose scores are computed together: few enough for these to stay in the cache (3 times as fast)."""


@dataclass(frozen=True)
class SegmentPlan:
    """What all layers share about one segment.

    rows: its rows in the flat batch. written: slots that take their K and V. read: slots of all keys, committed and
    pending. tree: None if the pending rows are one chain in order, so that slots are in the order of positions already.
    mask, window_mask: float32 [n, columns], -inf where a row must not look and 0 elsewhere, without and with the
    sliding window. edges: positions at which blocks of the weighted sum begin, and the number of columns. gathered: [2,
    kv_heads, slots, d], room for a copy of one layer's keys and values.
    """

    rows: slice
    written: Slots
    read: Slots
    tree: TreeOrder | None
    mask: torch.Tensor
    window_mask: torch.Tensor
    edges: Sequence[int]
    gathered: torch.Tensor

    def gather(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the sequence, from one layer's cache [2, kv_heads, slots, d]; zeros behind the last one.

        They are copied to lie dense in memory: oneDNN would otherwise copy them itself, the keys transposed, at several
        times the cost.
        """
        source = cache[:, :, self.read]
        self.gathered[:, :, : source.shape[2]].copy_(source)
        return self.gathered[0], self.gathered[1]


def causal_mask(positions: torch.Tensor, columns: int, window: int | None) -> torch.Tensor:
    """float32 [n, columns] for rows at ``positions`` [n]: 0 at the positions up to a row's own, or at the latest
    ``window`` of them, and -inf elsewhere.
    """
    column = torch.arange(columns, device=positions.device)
    hidden = column > positions[:, None]
    if window is not None:
        hidden |= column <= positions[:, None] - window
    return torch.zeros(hidden.shape, device=positions.device).masked_fill_(hidden, float("-inf"))


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, plan: SegmentPlan
) -> torch.Tensor:
    """Grouped-query attention: queries [n, heads, d], keys and values [kv_heads, slots, d] -> [n, heads, d].

    mask: [n, columns], of the plan. Products are taken in the tensors' dtype; scale, mask and softmax in float32.
    """
    n, heads, d = queries.shape
    if plan.tree is None and n > _ROWS_AT_ONCE:
        parts = [slice(start, start + _ROWS_AT_ONCE) for start in range(0, n, _ROWS_AT_ONCE)]
        return torch.cat([attend(queries[part], keys, values, mask[part], plan) for part in parts])
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    grouped = queries.view(n, kv_heads, group, d).permute(1, 2, 0, 3).reshape(kv_heads, group * n, d)
    scores = dot(grouped, keys).reshape(kv_heads, group, n, -1)
    edges = plan.edges
    if plan.tree is not None:
        scores = plan.tree.line_up(scores)
    weights = torch.add(mask, scores, alpha=d**-0.5).softmax(-1).to(values.dtype)
    if plan.tree is not None:
        weights, values, edges = plan.tree.spread_weights(weights), plan.tree.spread_values(values), plan.tree.edges
    out = weighted_sum(weights.view(kv_heads, group * n, -1), values, edges)
    return out.reshape(kv_heads, group, n, d).permute(2, 0, 1, 3).reshape(n, heads, d)
