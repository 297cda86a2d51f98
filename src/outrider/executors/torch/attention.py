"""Attention of a segment's rows over their own sequence: the committed prefix and each row's pending ancestors.

A row's sums run over positions in the text in ascending order, whether a key is committed or pending, with zeros after
the row's own position. A row thus meets the same sums in the same order whether it is decoded alone, in a chunk of the
prompt or in a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.executors.torch.kv import SequenceKV, Slots
from outrider.executors.torch.products import dot, weighted_sum


@dataclass(frozen=True)
class TreeOrder:
    """How the pending rows of a tree, which are stored in the order of forwarding, line up as paths.

    length: committed tokens of the sequence.
    ancestors: [n, columns - length] for each row of the segment, its pending ancestor (itself included) at each depth;
        0 beyond.
    paths: the segment's rows, dealt out to paths from the prefix to a leaf: (row numbers in the segment, pending rows
        along the path), shorter paths first.
    """

    length: int
    ancestors: torch.Tensor
    paths: Sequence[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def build(cls, seq: SequenceKV, rows: Sequence[int], columns: int, device: torch.device) -> TreeOrder:
        """rows: pending row numbers of the segment, ascending. columns: positions that rows are lined up over."""
        lines = {row: seq.ancestry(row) for row in rows}
        room = columns - seq.length
        ancestors = torch.tensor([line + [0] * (room - len(line)) for line in lines.values()], device=device)
        paths: list[tuple[list[int], list[int]]] = []
        placed: set[int] = set()
        for leaf in reversed(rows):
            if leaf not in placed:
                members = [row for row in lines[leaf] if row in lines and row not in placed]
                placed.update(members)
                paths.append(([row - rows[0] for row in members], lines[leaf]))
        paths.sort(key=lambda path: len(path[1]))
        tensors = [(torch.tensor(a, device=device), torch.tensor(b, device=device)) for a, b in paths]
        return cls(seq.length, ancestors, tensors)

    def line_up(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [kv_heads, group, n, slots in order of forwarding] -> [kv_heads, group, n, columns], by position."""
        prefix, tail = scores.tensor_split((self.length,), dim=-1)
        order = self.ancestors.expand(*tail.shape[:2], -1, -1)
        return torch.cat((prefix, tail.gather(-1, order)), dim=-1)

    def weigh(self, probs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Sum values [kv_heads, slots, d] by probs [kv_heads, group, n, columns], path by path.

        Only the pending end of the values is exchanged from path to path. Beyond a path's own end it holds zeros or the
        end of an earlier path, with probability zero.
        """
        kv_heads, group, n, columns = probs.shape
        prefix, tail = values.tensor_split((self.length,), dim=1)
        lined_up = torch.cat((prefix, tail.new_zeros(kv_heads, columns - self.length, tail.shape[-1])), dim=1)
        out = probs.new_empty(kv_heads, group, n, values.shape[-1])
        for rows, path in self.paths:
            lined_up[:, self.length : self.length + len(path)] = tail.index_select(1, path)
            part = weighted_sum(probs.index_select(2, rows).reshape(kv_heads, -1, columns), lined_up)
            out[:, :, rows] = part.reshape(kv_heads, group, len(rows), -1)
        return out


@dataclass(frozen=True)
class SegmentPlan:
    """What all layers share about one segment.

    rows: its rows in the flat batch. written: slots that take their K and V. read: slots of all keys, committed and
    pending. tree: None if the pending rows are one chain in order, so that slots are in the order of positions already.
    mask, window_mask: float32 [n, columns], -inf where a row must not look and 0 elsewhere, without and with the
    sliding window. gathered: [2, kv_heads, columns or more, d], room for a copy of one layer's keys and values.
    """

    rows: slice
    written: Slots
    read: Slots
    tree: TreeOrder | None
    mask: torch.Tensor
    window_mask: torch.Tensor
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
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tree: TreeOrder | None, mask: torch.Tensor
) -> torch.Tensor:
    """Grouped-query attention: queries [n, heads, d], keys and values [kv_heads, slots, d] -> [n, heads, d].

    Products are taken in the tensors' dtype; scale, mask and softmax in float32.
    """
    n, heads, d = queries.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    grouped = queries.view(n, kv_heads, group, d).permute(1, 2, 0, 3).reshape(kv_heads, group * n, d)
    scores = dot(grouped, keys).reshape(kv_heads, group, n, -1)
    if tree is not None:
        scores = tree.line_up(scores)
    probs = torch.add(mask, scores, alpha=d**-0.5).softmax(-1).to(values.dtype)
    if tree is None:
        out = weighted_sum(probs.view(kv_heads, group * n, -1), values).reshape(kv_heads, group, n, d)
    else:
        out = tree.weigh(probs, values)
    return out.permute(2, 0, 1, 3).reshape(n, heads, d)
