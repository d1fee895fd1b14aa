"""`python -m trainer.export --workdir DIR --output DIR [--dtype bfloat16] [--shard-size 5GB]`.

Exit status: 0 completed; 1 failed; 2 a mistake in the command, the checkpoint, or a model that no family of
`layers.pretrained` can express, in one message; 130 Ctrl-C; 143 SIGTERM; 129 a closed terminal (SIGHUP). Whatever
the status, a folder under the output's name is whole. A process that is killed otherwise may leave parts, in a hidden
folder beside it, named `.OUTPUT.` and some letters, which may be removed. No accelerator is started.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence

from trainer.cli.command import run_command
from trainer.launch.process_exit import COMPLETED
from trainer.terminal.streams import reader_may_leave


def main(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit status."""

    def export() -> int:
        from trainer.export.export_command import parse_command_line

        command = parse_command_line(arguments)
        from trainer.export.export_run import run  # imports Flax and Orbax: seconds that a mistyped flag shouldn't cost

        with _ended_by_signals():
            run(command)
        return COMPLETED

    return run_command("python -m trainer.export", arguments, export)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the process as an exception does, which removes what has been written."""
    # What is started to outlive its terminal (`nohup`) ignores SIGHUP, and continues to.
    heeded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]

    def leave(number: int, _: object) -> None:
        for each in heeded:
            signal.signal(each, signal.SIG_IGN)  # another one mustn't disturb the removal
        sys.exit(128 + number)

    handlers = {number: signal.signal(number, leave) for number in heeded}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(sys.argv[1:]))
