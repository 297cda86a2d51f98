"""Plain text tables, the same on a terminal and in a file."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str = "l") -> str:
    """Columns padded to their widest cell. align: "l" or "r" for each column; "r" for those beyond it.

    An empty header draws no header line. Every row must have as many cells as the first.
    """
    lines = [header, *rows] if any(header) else list(rows)
    if not lines:
        return ""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]

    def draw(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if align[column : column + 1] == "l" else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    drawn = [draw(cells) for cells in lines]
    if any(header):
        drawn.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(drawn)
