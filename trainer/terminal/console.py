"""Prints for the user: plain lines, on a terminal and anywhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

from trainer.terminal.streams import visible


class Console:
    """Prints a run, a fact to a line. Control characters in what it is given become visible signs.

    Args:
      output: where to print; None: standard output.
    """

    def __init__(self, output: TextIO | None = None):
        self._output = output

    def note(self, line: str) -> None:
        """Prints a line."""
        print(visible(line), file=self._output, flush=True)

    def answer(self, line: str) -> None:
        """Prints a line for who has just sent this process a signal."""
        self.note(line)

    def warning(self, line: str) -> None:
        """Prints a line that begins with "warning"."""
        self.note(f"warning: {line}")

    def opening(self, title: str, facts: Mapping[str, str | Sequence[str]]) -> None:
        """Prints what is about to run.

        Args:
          facts: label → value, or the lines of one.
        """
        self.note(title)
        for label, value in facts.items():
            for line in [value] if isinstance(value, str) else value:
                self.note(f"  {label}: {line}")

    def closing(self, title: str, facts: Mapping[str, str | Sequence[str]]) -> None:
        """Prints the results, and where they lie."""
        self.opening(title, facts)


class QuietConsole(Console):
    """The console of a process whose run another process prints: it prints answers and warnings alone.

    Args:
      name: of the process, before each of them.
    """

    def __init__(self, name: str):
        super().__init__()
        self._name = name

    def note(self, line: str) -> None:
        """Prints nothing."""

    def answer(self, line: str) -> None:
        """Prints a line that begins with the process."""
        super().note(f"{self._name}: {line}")

    def warning(self, line: str) -> None:
        """Prints a line that begins with the process and "warning"."""
        self.answer(f"warning: {line}")
