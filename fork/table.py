"""Plain tables for terminals."""

from __future__ import annotations

from collections.abc import Sequence


def text(head: Sequence[str], rows: Sequence[Sequence[object]], right: frozenset[int] = frozenset()) -> str:
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
