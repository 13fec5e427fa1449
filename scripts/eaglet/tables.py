"""Tables for people on a terminal."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence]) -> list[str]:
    """Rows of cells as aligned lines, the first row as heading, the first column to the left."""
    texts = [["–" if c is None else f"{c:,}" if isinstance(c, int) else str(c) for c in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in texts
    ]
    return [lines[0], "─" * len(lines[0]), *lines[1:]]
