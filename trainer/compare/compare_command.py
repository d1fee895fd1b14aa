"""The command line: the runs, and where the picture goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from trainer.cli.flags import OptionParser, apply_flags, read_path, refuse_unknown_flags, wants_help
from trainer.compare.compared_run import read_runs
from trainer.compare.picture import draw_comparison
from trainer.compare.table import comparison_table
from trainer.errors import TrainingFailed, UserMistake
from trainer.terminal.console import Console

PROGRAM = "python -m trainer.compare"


@dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """Shows runs side by side: configs, losses, speed, memory, seconds to compile, and evaluations at length.

    Losses are compared at equal steps, equal tokens trained on (padding is none) and equal seconds of training steps
    (compiling, evaluations and saves are left out), at each quarter of what all runs have reached. Between logged
    steps, and between evaluations, they are interpolated. A difference or a ratio is to the first run.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Workdirs, two or more: what `python -m trainer` printed as its workdir. The runs may be under way."""
    output: Path = Path("compare.png")
    """PNG file to write, outside the workdirs. It takes matplotlib (the `plots` extra)."""
    window: float = 0.05
    """A training loss is a mean over a window that ends there, as wide in each run: this fraction of the steps, tokens
    or seconds that all runs have reached. 0: the step's own."""

    def __post_init__(self):
        if len(self.runs) < 2:
            raise ValueError(
                f"got {len(self.runs)} of the two or more workdirs to compare; for example: {PROGRAM} runs/a runs/b"
            )
        if not 0 <= self.window <= 1:
            raise ValueError(f"window={self.window} must be a fraction, from 0 to 1")
        if self.output.suffix.lower() != ".png":
            raise ValueError(f"output={self.output} is to be a PNG file; give it a name that ends in .png")


def parse_command_line(arguments: Sequence[str]) -> CompareCommand:
    """Reads the runs and the flags.

    Args:
      arguments: what follows `python -m trainer.compare`.

    Raises:
      UserMistake: unknown flag, ill-typed value, or fewer than two runs.
      SystemExit: with status 0, after `--help` was printed.
    """
    parser = OptionParser()
    parser.add_argument("runs", nargs="*", action="extend", type=read_path)
    parser.add_argument("--output", type=read_path, default=CompareCommand.output)
    parser.add_argument("--window", type=float, default=CompareCommand.window)
    options, flags = parser.parse_known_intermixed_args(arguments)
    refuse_unknown_flags(flags, ["output", "window"], PROGRAM)
    if wants_help(flags):
        apply_flags(CompareCommand, flags, None, program=PROGRAM)
    try:
        command = CompareCommand(**vars(options) | {"runs": tuple(options.runs)})
    except ValueError as refused:
        raise UserMistake(str(refused)) from None
    return apply_flags(CompareCommand, flags, command, program=PROGRAM)


def run(command: CompareCommand) -> None:
    """Prints the table and draws the picture.

    Raises:
      UserMistake: a folder is no workdir, is given twice, or holds a damaged file, or the picture would lie in one.
      TrainingFailed: the picture can't be written.
    """
    runs, console = read_runs(command.runs), Console()
    for each in runs:
        if each.path.resolve() in command.output.resolve().parents:
            raise UserMistake(
                f"--output {command.output} lies in workdir {each.path}, which is only read; name a file elsewhere"
            )
    for line in comparison_table(runs, command.window):
        console.note(line)
    try:
        is_drawn = draw_comparison(runs, command.window, command.output)
    except OSError as error:
        raise TrainingFailed(f"--output {command.output} can't be written: {error.strerror}") from error
    no_picture = "no picture: matplotlib isn't installed; install the plots extra"
    console.note(f"\nwritten: {command.output}" if is_drawn else f"\n{no_picture}")
