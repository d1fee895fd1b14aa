"""`python -m trainer.export --workdir DIR --output DIR [--dtype bfloat16] [--shard-size 5GB]`.

Exit status: 0 completed; 1 failed; 2 a mistake in the command, the checkpoint, or a model that no family of
`layers.pretrained` can express, told in one message; 130 Ctrl-C; 143 SIGTERM. Whatever the status, a folder under the
output's name is whole, and nothing else is left. Only SIGKILL leaves parts, in a hidden folder beside it, named
`.OUTPUT.` and some letters, which may be removed. No accelerator is started.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence

from trainer.cli.command import run_command
from trainer.process.broken_pipe import reader_may_leave
from trainer.process.exit_status import COMPLETED


def main(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit status."""

    def export() -> int:
        from trainer.export.export_command import parse_command_line

        command = parse_command_line(arguments)
        from trainer.export.export_run import run  # imports Flax and Orbax: seconds that a mistyped flag shouldn't cost

        with _ended_by_sigterm():
            run(command)
        return COMPLETED

    return run_command("python -m trainer.export", arguments, export)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the process as an exception does, which removes what has been written."""
    handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(sys.argv[1:]))
