"""`python -m trainer.compile --config FILE [--topology NAME] [--longest-context | --compare FIELD=A,B]`.

Exit status: 0 the step compiles and fits in the devices' memory, or that memory is unknown; 3 it doesn't fit, whether
or not a change was found with which it does (of a run with phases: one of them doesn't fit; with `--compare`: one of
the variants doesn't; with `--longest-context`: no length does); 2 a mistake in the command or the config, in one
message; 1 the compiler failed; 130 Ctrl-C. Every compilation happens in a process of its own. So this process starts no
device, and the compiler's environment is set for the other one alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer.cli.command import run_command
from trainer.launch.process_exit import COMPLETED
from trainer.terminal.streams import reader_may_leave

DOES_NOT_FIT = 3


def main(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit status."""

    def compile_step() -> int:
        from trainer.compile.command.compile_command import parse_command_line

        task = parse_command_line(arguments)
        from trainer.compile.command.run_task import run  # imports Flax: seconds that a mistyped flag shouldn't cost

        fits = run(task, command=["python", "-m", "trainer.compile", *arguments])
        return DOES_NOT_FIT if fits is False else COMPLETED

    return run_command("python -m trainer.compile", arguments, compile_step)


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(sys.argv[1:]))
