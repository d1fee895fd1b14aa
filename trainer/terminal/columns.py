"""Tables in aligned columns."""

from __future__ import annotations

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: labels in the first column, numbers in the others.

    Args:
      rows: each with the same number of cells; the first has the titles.

    >>> align([["source", "tokens"], ["web", "1,024"]])
    ['source  tokens', 'web      1,024']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]
        for row in rows
    )
    return ["  ".join(row).rstrip() for row in padded]
