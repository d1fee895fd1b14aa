"""Prints for the user: panels and a progress bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import rich.console
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Column, Table
from rich.text import Text

from trainer.terminal.streams import visible


class Console:
    """Prints a run. Control characters in what it is given become visible signs.

    Args:
      output: where to print; by default standard output. Without a terminal, lines have no control codes.
    """

    def __init__(self, output: rich.console.Console | None = None):
        self._output = output or rich.console.Console(highlight=False)
        self._is_terminal = self._output.is_terminal and not self._output.is_dumb_terminal
        self._description = ""
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def note(self, line: str, *, whole: bool = False) -> None:
        """Prints a line.

        Args:
          whole: the line must not be broken, since somebody else wrote it. Other lines are broken
            between words if the terminal is too narrow.
        """
        # rich would make pictures of words between colons (`:bug:`), too.
        soft_wrap = whole or not self._is_terminal
        self._output.print(visible(line), markup=False, highlight=False, emoji=False, soft_wrap=soft_wrap)

    def answer(self, line: str) -> None:
        """Prints a line for who has just sent this process a signal."""
        self.note(line)

    def warning(self, line: str) -> None:
        """Prints a line that begins with "warning"."""
        self.note(f"warning: {line}")

    def description(self, line: str) -> None:
        """Prints what the run is: as the first line, or on a terminal as the first line of the opening panel."""
        self._description = line
        if line and not self._is_terminal:
            self.note(line)

    def opening(self, title: str, facts: Mapping[str, str | Sequence[str]]) -> None:
        """Prints what is about to run.

        Args:
          facts: label → value, or the lines of one.
        """
        self._facts(title, self._description, facts)

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Shows on a terminal that work goes on, and for how long. Elsewhere it shows nothing.

        Args:
          what: the work, as in "compiling".
        """
        if not self._is_terminal:
            yield
            return
        text = TextColumn("{task.description} …", markup=False)
        with self._moving(SpinnerColumn(), text, TimeElapsedColumn(), transient=True) as progress:
            progress.add_task(visible(what), total=None)
            yield

    @contextlib.contextmanager
    def loading(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Shows on a terminal how much has been loaded, by a bar. Elsewhere it shows nothing.

        Args:
          what: is loaded, as in "loading parameters".

        Returns:
          To be called with the bytes that are loaded, and the bytes in all.
        """
        if not self._is_terminal:
            yield lambda done, total: None
            return
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with self._moving(SpinnerColumn(), *columns, transient=True) as progress:
            task = progress.add_task(visible(what), total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    def start_steps(self, done: int, num_steps: int) -> None:
        """Shows the progress bar on a terminal."""
        if self._is_terminal:
            self._progress = self._moving(
                SpinnerColumn(),
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),  # takes what the others leave of the line
                TextColumn("{task.fields[status]}", markup=False, table_column=Column(no_wrap=True)),
            )
            self._task = self._progress.add_task("step", total=num_steps, completed=done, status="first step …")

    def advance(self, done: int) -> None:
        """Moves the bar to the number of steps that the device has finished."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done)

    def step_line(self, line: str, *, short: str, done: int, status: str) -> None:
        """Prints a line about steps; on a terminal it stands above the bar.

        Args:
          line: what to print.
          short: the same for a terminal that is too narrow for the line.
          done: to where the bar moves.
          status: what stands at the bar's end from now on.
        """
        self.note(short if self._is_terminal and len(line) > self._output.width else line)
        if self._progress is not None:
            self._progress.update(self._task, completed=done, status=status)

    def quote(self, label: str, text: str) -> None:
        """Prints a text that somebody else wrote, unbroken. A log file gets it as it is."""
        if self._is_terminal:
            self.note(f"{label}{text}", whole=True)
        else:
            print(f"{label}{text}", file=self._output.file)  # rich would drop some of the control characters

    def stop_steps(self) -> None:
        """Removes the progress bar. May be called at any time."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def closing(self, title: str, facts: Mapping[str, str | Sequence[str]]) -> None:
        """Prints the results, and where they lie.

        Args:
          title: how it ended.
          facts: label → value, or the lines of one.
        """
        self._facts(title, "", facts)

    def _moving(self, *columns: ProgressColumn, transient: bool = False) -> Progress:
        """Starts a line at the bottom of the terminal, which a thread redraws ten times a second."""
        progress = Progress(*columns, console=self._output, expand=not transient, transient=transient)
        progress.start()
        self._output.show_cursor(True)  # a killed process could not show it again
        return progress

    def _facts(self, title: str, description: str, facts: Mapping[str, str | Sequence[str]]) -> None:
        lines = [(label, [value] if isinstance(value, str) else list(value)) for label, value in facts.items()]
        if not self._is_terminal:
            self.note(title)
            for label, values in lines:
                self.note("\n".join(f"  {label}: {value}" for value in values))
            return
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column()
        for label, values in lines:
            grid.add_row(Text(visible(label)), Text(visible("\n".join(values))))
        content: Table = grid
        if description:
            content = Table.grid(padding=(0, 0, 1, 0))
            content.add_row(Text(visible(description)))
            content.add_row(grid)
        self._output.print(Panel(content, title=Text(visible(title)), title_align="left"), markup=False)


class QuietConsole(Console):
    """The console of a process whose run another process prints: it prints answers and warnings alone.

    Args:
      name: of the process, before each of them.
      output: as in `Console`.
    """

    def __init__(self, name: str, output: rich.console.Console | None = None):
        super().__init__(output)
        self._name, self._is_terminal = name, False

    def note(self, line: str, *, whole: bool = False) -> None:
        """Prints nothing."""

    def quote(self, label: str, text: str) -> None:
        """Prints nothing."""

    def answer(self, line: str) -> None:
        """Prints a line that begins with the process."""
        super().note(f"{self._name}: {line}")

    def warning(self, line: str) -> None:
        """Prints a line that begins with the process and "warning"."""
        super().note(f"{self._name}: warning: {line}")
