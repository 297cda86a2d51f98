"""How the pending rows of a tree, which are stored in the order of forwarding, are lined up by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.executors.torch.kv import SequenceKV
from outrider.executors.torch.products import COLUMN_MULTIPLE, Arithmetic


@dataclass(frozen=True)
class TreeOrder:
    """Index tables for attention over a tree of n rows.

    Scores are lined up by position: column p of a row is its own ancestor at position p. For the weighted sum all rows
    share one matrix of values, in which the tree is spread out: positions of a path stand in ascending order with the
    values of other branches between them, whose weight is zero. Groups of positions that a kernel adds in one step are
    kept together, and so are blocks (see `Arithmetic`), so that a row's sum is the one it would have alone.

    start: columns before this one hold the same position of the committed prefix in both layouts.
    by_position: [n, columns - start], for each row and position the slot, counted from ``start``; 0 past its own.
    spread: [n, tail], for each row and column of the values from ``start`` on, the position whose weight stands there;
        the last position, where no row has any weight, if none does.
    sources: [tail], the slot of the value in each of these columns; ``start`` where there is none.
    edges: columns at which blocks of the weighted sum begin, and the number of columns.
    """

    start: int
    by_position: torch.Tensor
    spread: torch.Tensor
    sources: torch.Tensor
    edges: Sequence[int]

    def line_up(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [kv_heads, group, n, slots] -> [kv_heads, group, n, columns], by position."""
        prefix, tail = scores.tensor_split((self.start,), dim=-1)
        return torch.cat((prefix, tail.gather(-1, self.by_position.expand(*tail.shape[:2], -1, -1))), dim=-1)

    def spread_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Weights [kv_heads, group, n, columns], by position -> [kv_heads, group, n, columns of the values]."""
        tail = weights.gather(-1, self.spread.expand(*weights.shape[:2], -1, -1))
        return torch.cat((weights[..., : self.start], tail), dim=-1)

    def spread_values(self, values: torch.Tensor) -> torch.Tensor:
        """Values [kv_heads, slots, d] -> [kv_heads, columns of the values, d]."""
        return torch.cat((values[:, : self.start], values.index_select(1, self.sources)), dim=1)


def order_tree(
    seq: SequenceKV, rows: Sequence[int], columns: int, arithmetic: Arithmetic, device: torch.device
) -> TreeOrder:
    """Tables for the pending rows ``rows`` of ``seq``. columns: positions, one more than any row needs at least."""
    layout = _Layout(seq.length // arithmetic.group * arithmetic.group, arithmetic)
    lines = {row: layout.line(seq, row) for row in rows}
    for row in sorted(rows, key=lambda row: -len(lines[row])):
        layout.add(lines[row])
    layout.place()
    spread = torch.full((len(rows), len(layout.sources)), columns - 1)
    for number, row in enumerate(rows):
        for column, position in layout.columns_of(lines[row]):
            spread[number, column] = position
    room = columns - layout.start
    by_position = [[slot - layout.start for slot in line] + [0] * (room - len(line)) for line in lines.values()]
    return TreeOrder(
        start=layout.start,
        by_position=torch.tensor(by_position, device=device),
        spread=spread.to(device),
        sources=torch.tensor(layout.sources, device=device),
        edges=layout.edges,
    )


class _Layout:
    """Deals out columns of the values to groups of positions. A group that two rows share is stored once.

    A row's *line* are the slots of its positions from ``start`` on. A group is known by its first position and its
    slots; a row that ends in the middle of one may use any group that begins like its own.
    """

    def __init__(self, start: int, arithmetic: Arithmetic) -> None:
        self.start = start
        self.sources: list[int] = []
        self.edges = list(range(0, start, arithmetic.block)) or [0]
        self._arithmetic = arithmetic
        self._groups: list[tuple[int, tuple[int, ...]]] = []
        self._number: dict[tuple[int, tuple[int, ...]], int] = {}
        self._column: dict[int, int] = {}

    def line(self, seq: SequenceKV, row: int) -> list[int]:
        return [*range(self.start, seq.length), *(seq.length + ancestor for ancestor in seq.ancestry(row))]

    def add(self, line: Sequence[int]) -> None:
        for group in self._split(line):
            if group not in self._number:
                position, slots = group
                for count in range(1, len(slots) + 1):
                    self._number.setdefault((position, slots[:count]), len(self._groups))
                self._groups.append(group)

    def place(self) -> None:
        """Give every group its columns, by position; a block begins where its first position stands."""
        block = self._arithmetic.block
        for number in sorted(range(len(self._groups)), key=lambda number: self._groups[number][0]):
            position, slots = self._groups[number]
            if position // block > len(self.edges) - 1:
                self._fill()
                self.edges.append(self.start + len(self.sources))
            self._column[number] = len(self.sources)
            self.sources.extend([*slots, *[self.start] * (self._arithmetic.group - len(slots))])
        self._fill()
        self.edges.append(self.start + len(self.sources))

    def columns_of(self, line: Sequence[int]) -> list[tuple[int, int]]:
        """(column counted from ``start``, position) of everything on a line."""
        return [
            (self._column[self._number[position, slots]] + i, position + i)
            for position, slots in self._split(line)
            for i in range(len(slots))
        ]

    def _split(self, line: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        size = self._arithmetic.group
        return [(self.start + i, tuple(line[i : i + size])) for i in range(0, len(line), size)]

    def _fill(self) -> None:
        self.sources.extend([self.start] * (-(self.start + len(self.sources)) % COLUMN_MULTIPLE))
