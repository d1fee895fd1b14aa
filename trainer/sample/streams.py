"""Texts on their way out: one as it comes; several side by side on a terminal, and whole, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from trainer.terminal.streams import visible

Write = Callable[[str], object]


class Stream(Protocol):
    """Where one text goes."""

    def add(self, text: str) -> None:
        """Takes more of the text."""

    def end(self) -> None:
        """Shows what is left, and ends the line."""


def make_streams(count: int, write: Write, width: int | None) -> Sequence[Stream]:
    """A stream for each text.

    Args:
      count: texts.
      write: shows text at once.
      width: of the terminal, in characters, on which several texts grow side by side and `show_whole` shows them again;
        None: not a terminal, where text is written as it is, and each of several once it is whole.
    """
    if width is None:
        return (_AsItComes(write),) if count == 1 else [_OnceWhole(write, number) for number in range(1, count + 1)]
    to_terminal = lambda text: write(visible(text))  # noqa: E731
    if count == 1:
        return (_AsItComes(to_terminal),)
    labels = [f"[{number}] ".ljust(len(f"[{count}] ")) for number in range(1, count + 1)]
    return [_LabelledLines(to_terminal, label, max(width - len(label), 1)) for label in labels]


def show_whole(texts: Sequence[str], write: Write) -> None:
    """Shows texts that grew side by side on a terminal, each in one piece."""
    write("\n")
    for number, text in enumerate(texts, 1):
        _OnceWhole(lambda text: write(visible(text)), number, text).end()


class _AsItComes:
    """Shows text as it comes."""

    def __init__(self, write: Write):
        self._write = write

    def add(self, text: str) -> None:
        self._write(text)

    def end(self) -> None:
        self._write("\n")


class _OnceWhole:
    """Shows text under its number, once it is whole."""

    def __init__(self, write: Write, number: int, text: str = ""):
        self._write, self._number, self._text = write, number, text

    def add(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        self._write(f"[{self._number}]\n{self._text}\n\n")


class _LabelledLines:
    """Shows each line of the text behind a label, cut to the terminal's width. ⏎ marks the end of the text's line."""

    def __init__(self, write: Write, label: str, width: int):
        self._write, self._label, self._width = write, label, width
        self._line = ""

    def add(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._show(f"{line}⏎")
        if len(self._line) > self._width:
            *pieces, self._line = self._pieces(self._line)
            self._write("".join(f"{self._label}{piece}\n" for piece in pieces))

    def end(self) -> None:
        if self._line:
            self._show(self._line)
            self._line = ""

    def _show(self, line: str) -> None:
        self._write("".join(f"{self._label}{piece}\n" for piece in self._pieces(line)))

    def _pieces(self, line: str) -> list[str]:
        """The line, cut at spaces where there are any, into pieces that fit the terminal."""
        pieces = []
        while len(line) > self._width:
            space = line.rfind(" ", 1, self._width + 1)
            cut = space if space > 0 else self._width
            pieces.append(line[:cut])
            line = line[cut:].removeprefix(" ")
        return [*pieces, line]
