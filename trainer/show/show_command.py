"""The command line: a config and flags for its fields, as for training, and how to show its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from trainer.cli.flags import OptionParser, apply_overrides, check_phase, read_bool, read_path, require_writable
from trainer.config import TrainConfig
from trainer.errors import UserMistake

PROGRAM = "python -m trainer.show"


@dataclass(frozen=True, kw_only=True)
class ShowCommand:
    """Shows the first packed sequences of an experiment as text, with the targets that count in the loss marked.

    Then come the documents of the first batches by source and by length. A document has a colour of its own; targets
    that count stand between ⟪ and ⟫, and between ⟦ and ⟧ stands whatever is no text: special tokens, weights other
    than 1, and the number of tokens that are left out.
    """

    config: str
    """As for training: a page's name or file, with arguments after a colon, or a run's config.json."""
    num_sequences: int = 2
    """Sequences to show."""
    ids: bool = False
    """Show the tokens' ids behind their text."""
    whole: bool = False
    """Show all of each document. Otherwise long ones are shown by their first and last tokens."""
    html: Path | None = None
    """HTML file for the sequences, with ids and weights as tooltips; the terminal then shows the tables alone."""
    phase: int | None = None
    """Show the beginning of this phase, from 1. None: the run's."""
    train: Annotated[TrainConfig, tyro.conf.arg(name="")]


def parse_command_line(arguments: Sequence[str]) -> ShowCommand:
    """Reads the config file and applies the flags to it.

    Args:
      arguments: what follows `python -m trainer.show`.

    Raises:
      UserMistake: unknown flag, ill-typed value, no such phase, a file that can't be written, a config file that
        doesn't work, or settings that can't work together.
      SystemExit: with status 0, after `--help` was printed.
    """
    parser = OptionParser(takes_config=True)
    parser.add_argument("--num-sequences", type=int, default=ShowCommand.num_sequences)
    parser.add_argument("--ids", nargs="?", const=True, default=False, type=read_bool)
    parser.add_argument("--whole", nargs="?", const=True, default=False, type=read_bool)
    parser.add_argument("--html", type=read_path)
    parser.add_argument("--phase", type=int)
    options, overrides = parser.parse_known_args(arguments)
    if options.num_sequences < 1:
        raise UserMistake(f"--num-sequences {options.num_sequences} must be at least 1")
    if options.html is not None:
        require_writable("--html", options.html)
    command = apply_overrides(ShowCommand, vars(options), overrides, program=PROGRAM)
    if command.phase is not None:
        check_phase(command.phase, command.train)
    return command
