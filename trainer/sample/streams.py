"""Texts on their way to the terminal: one as it is, several side by side line by line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from trainer.console import visible

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
      width: of the terminal, in characters; None: not a terminal, where text is written as it is.
    """
    if width is not None:
        show = write
        write = lambda text: show(visible(text))  # noqa: E731
    if count == 1:
        return (_Whole(write),)
    labels = [f"[{number}] ".ljust(len(f"[{count}] ")) for number in range(1, count + 1)]
    return [_Lines(write, label, None if width is None else max(width - len(label), 1)) for label in labels]


class _Whole:
    """Shows text as it comes."""

    def __init__(self, write: Write):
        self._write = write

    def add(self, text: str) -> None:
        self._write(text)

    def end(self) -> None:
        self._write("\n")


class _Lines:
    """Shows each line once it is whole, or as wide as the terminal, behind a label."""

    def __init__(self, write: Write, label: str, width: int | None):
        self._write, self._label, self._width = write, label, width
        self._line = ""

    def add(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._show(line)
        if self._width is not None and len(self._line) > self._width:
            *rows, self._line = self._rows(self._line)
            self._write("".join(f"{self._label}{row}\n" for row in rows))

    def end(self) -> None:
        if self._line:
            self._show(self._line)
            self._line = ""

    def _show(self, line: str) -> None:
        self._write("".join(f"{self._label}{row}\n" for row in self._rows(line)))

    def _rows(self, line: str) -> list[str]:
        """The line, cut at spaces where there are any, into rows that fit the terminal."""
        rows = []
        while self._width is not None and len(line) > self._width:
            space = line.rfind(" ", 1, self._width + 1)
            cut = space if space > 0 else self._width
            rows.append(line[:cut])
            line = line[cut:].removeprefix(" ")
        return [*rows, line]
