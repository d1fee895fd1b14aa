"""`python -m trainer.sample --workdir DIR --prompt TEXT [--prompt TEXT …] [--FIELD VALUE …]`.

The texts go to standard output, everything else to standard error. Exit status: 0
completed; 1 failed; 2 a mistake in the command, the prompts, the tokenizer or the checkpoint, in one message; 130
Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer.cli.command import run_command
from trainer.launch.process_exit import COMPLETED
from trainer.terminal.streams import reader_may_leave


def main(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit status."""

    def sample() -> int:
        from trainer.sample.sample_command import parse_command_line

        command = parse_command_line(arguments)
        # This imports Flax and Orbax: seconds that a mistyped flag shouldn't cost.
        from trainer.sample.continuation import run

        run(command)
        return COMPLETED

    return run_command("python -m trainer.sample", arguments, sample)


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(sys.argv[1:]))
