"""`python -m trainer.compare runs/a runs/b … [--output compare.png] [--window 0.05]`.

The table goes to standard output. Exit status: 0 completed; 1 the picture can't be written; 2 a mistake in the command
or a damaged workdir, in one message; 130 Ctrl-C. No accelerator is started, and nothing is written to a workdir.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer.cli.command import run_command
from trainer.launch.process_exit import COMPLETED
from trainer.terminal.streams import reader_may_leave


def main(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit status."""

    def compare() -> int:
        from trainer.compare.compare_command import parse_command_line, run

        run(parse_command_line(arguments))
        return COMPLETED

    return run_command("python -m trainer.compare", arguments, compare)


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(sys.argv[1:]))
