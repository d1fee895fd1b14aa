"""`python -m trainer.export --workdir DIR --output DIR [--dtype bfloat16]`.

Exit status: 0 completed; 1 failed; 2 a mistake in the command, the checkpoint, or a model that no family of
`layers.pretrained` can express, in one message; 130 Ctrl-C. Whatever the status, a folder under the output's name is
whole. A process that is killed may leave parts, in a hidden folder beside it, named `.OUTPUT.` and some letters, which
may be removed. No accelerator is started.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer.cli.command import run_command
from trainer.launch.process_exit import COMPLETED
from trainer.terminal.streams import reader_may_leave


def main(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit status."""

    def export() -> int:
        from trainer.export.export_command import parse_command_line

        command = parse_command_line(arguments)
        from trainer.export.export_run import run  # imports Flax and Orbax: seconds that a mistyped flag shouldn't cost

        run(command)
        return COMPLETED

    return run_command("python -m trainer.export", arguments, export)


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(sys.argv[1:]))
