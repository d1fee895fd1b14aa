"""Shown texts for the terminal, with colours where it has some: rich's rules, `NO_COLOR` among them."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from trainer.show.marks import Marked

_COLORS = ("cyan", "green", "yellow", "magenta", "blue")


def color_text(pieces: Iterable[Marked], document: int) -> str:
    """The text that shows marked pieces on standard output.

    Args:
        pieces: of a document.
        document: which of the sequence's; the next has another colour.
    """
    color = _COLORS[document % len(_COLORS)]
    segments = [Segment(piece.text, _style_of(piece, color)) for piece in pieces]
    console = Console()
    with console.capture() as captured:
        console.print(Segments(segments), end="", soft_wrap=True)
    return captured.get()


def _style_of(piece: Marked, color: str) -> Style:
    if piece.token is None:
        return Style(dim=True)
    weight = piece.token.weight or 0.0
    return Style(color=color, bold=weight != 0, dim=weight == 0, underline=weight < 0, reverse=piece.token.is_special)
