"""`python -m trainer.show --config FILE [--num-sequences 2] [--ids] [--whole] [--html FILE] [--phase N]`.

The sequences and the tables go to standard output, and other messages to standard error. Exit status: 0 completed;
1 a file can't be written, or the documents are used up; 2 a mistake in the command, the config or the data, in one
message; 130 Ctrl-C. No device is started, and nothing is compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer.cli.command import run_command
from trainer.launch.process_exit import COMPLETED
from trainer.terminal.streams import reader_may_leave


def main(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit status."""

    def show() -> int:
        from trainer.show.show_command import parse_command_line

        command = parse_command_line(arguments)
        from trainer.show.show_sequences import run  # imports grain: seconds that a mistyped flag shouldn't cost

        run(command)
        return COMPLETED

    return run_command("python -m trainer.show", arguments, show)


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(sys.argv[1:]))
