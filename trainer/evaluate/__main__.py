"""`python -m trainer.evaluate --workdir DIR | --model DIR --lengths 4k,32k,128k [--FIELD VALUE …]`.

The tables go to standard output, everything else to standard error. Exit status: 0 completed; 1 failed; 2 a mistake in
the command, the data, the tokenizer or the checkpoint, in one message; 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer.cli.command import run_command
from trainer.launch.process_exit import COMPLETED
from trainer.terminal.streams import reader_may_leave


def main(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit status."""

    def evaluate() -> int:
        from trainer.evaluate.evaluate_command import parse_command_line

        command = parse_command_line(arguments)
        # This imports Flax and Orbax: seconds that a mistyped flag shouldn't cost.
        from trainer.evaluate.evaluate_model import run

        run(command)
        return COMPLETED

    return run_command("python -m trainer.evaluate", arguments, evaluate)


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(sys.argv[1:]))
