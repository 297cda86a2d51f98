"""Attention of a segment's rows over their own sequence: the committed prefix and each row's pending ancestors.

Keys are always walked in the order of their positions in the text, whether they are committed or pending, and masked
keys only ever come after a row's own. A row thus meets the same sums in the same order whether it is decoded alone, in
a prompt's chunk or in a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.executors.torch.kv import SequenceKV, Slots


@dataclass(frozen=True)
class TreeOrder:
    """How the pending rows of a tree, which are stored in the order of forwarding, line up as paths.

    length: committed tokens of the sequence.
    ancestors: [n, depth] for each row of the segment, its pending ancestor (itself included) at each depth; 0 beyond.
    paths: the segment's rows, dealt out to paths from the prefix to a leaf: (row numbers in the segment, pending rows
        along the path), shorter paths first.
    """

    length: int
    ancestors: torch.Tensor
    paths: Sequence[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def build(cls, seq: SequenceKV, rows: Sequence[int], device: torch.device) -> TreeOrder:
        """rows: pending row numbers of the segment, ascending."""
        lines = {row: seq.ancestry(row) for row in rows}
        depth = max(map(len, lines.values()))
        ancestors = torch.tensor([line + [0] * (depth - len(line)) for line in lines.values()], device=device)
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
        """Scores [kv_heads, group, n, length + pending] with pending columns replaced by each row's ancestors."""
        prefix, tail = scores.tensor_split((self.length,), dim=-1)
        order = self.ancestors.expand(*tail.shape[:2], -1, -1)
        return torch.cat((prefix, tail.gather(-1, order)), dim=-1)

    def weigh(self, probs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Sum values [kv_heads, length + pending, d] by probs [kv_heads, group, n, length + depth], path by path.

        Only the pending end of the values is exchanged from path to path. Beyond a path's own end it holds zeros or the
        end of an earlier path, with probability zero.
        """
        kv_heads, group, n, columns = probs.shape
        prefix, tail = values.tensor_split((self.length,), dim=1)
        lined_up = torch.cat((prefix, tail.new_zeros(kv_heads, columns - self.length, tail.shape[-1])), dim=1)
        out = probs.new_empty(kv_heads, group, n, values.shape[-1])
        for rows, path in self.paths:
            lined_up[:, self.length : self.length + len(path)] = tail.index_select(1, path)
            part = torch.bmm(probs.index_select(2, rows).reshape(kv_heads, -1, columns), lined_up)
            out[:, :, rows] = part.view(kv_heads, group, len(rows), -1)
        return out


@dataclass(frozen=True)
class SegmentPlan:
    """What all layers share about one segment.

    rows: its rows in the flat batch. written: slots that take their K and V. read: slots of all keys, committed and
    pending. tree: None if the pending rows are one chain in order, so that slots are in the order of positions already.
    hidden, hidden_by_window: [n, columns], True where a row must not look, without and with the sliding window; None
    where every row sees every column.
    """

    rows: slice
    written: Slots
    read: Slots
    tree: TreeOrder | None
    hidden: torch.Tensor | None
    hidden_by_window: torch.Tensor | None


def hidden_columns(positions: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """Mask [n, columns] for rows at ``positions`` [n], columns being the positions up to the last row's.

    A row sees the positions up to its own, or the latest ``window`` of them. None if nothing is hidden.
    """
    last = int(positions.max())
    columns = torch.arange(last + 1)
    hidden = columns > positions[:, None]
    if window is not None:
        hidden |= columns <= positions[:, None] - window
    return hidden if bool(hidden.any()) else None


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tree: TreeOrder | None, hidden: torch.Tensor | None
) -> torch.Tensor:
    """Grouped-query attention: queries [n, heads, d], keys and values [kv_heads, columns, d] -> [n, heads * d].

    Products are taken in the tensors' dtype, scale, mask and softmax in float32.
    """
    n, heads, d = queries.shape
    kv_heads = keys.shape[0]
    grouped = queries.view(n, kv_heads, heads // kv_heads, d).permute(1, 2, 0, 3).reshape(kv_heads, -1, d)
    scores = torch.bmm(grouped, keys.transpose(1, 2)).float().mul_(d**-0.5).view(kv_heads, heads // kv_heads, n, -1)
    if tree is not None:
        scores = tree.line_up(scores)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    probs = scores.softmax(-1).to(values.dtype)
    if tree is not None:
        out = tree.weigh(probs, values)
    else:
        out = torch.bmm(probs.view(kv_heads, -1, probs.shape[-1]), values).view(kv_heads, heads // kv_heads, n, d)
    return out.permute(2, 0, 1, 3).reshape(n, heads * d)
