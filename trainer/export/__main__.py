"""`python -m trainer.export --workdir DIR --output DIR [--dtype bfloat16] [--shard-size 5GB]`.

Exit status: 0 completed; 1 failed; 2 a mistake in the command, the checkpoint, or a model that no family of
`layers.pretrained` can express, told in one message; 130 Ctrl-C. Whatever the status, a folder under the output's name
is whole. No accelerator is started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from flax_longcontext import ForeignPackage, require_ours
from trainer.errors import TrainingFailed, UserMistake, name_flags
from trainer.hosts.launch import refuse_several
from trainer.process.broken_pipe import reader_may_leave
from trainer.process.exit_status import COMPLETED, FAILED, INTERRUPTED, MISTAKE


def main(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit status."""
    try:
        require_ours("trainer", importer=__name__)
        from trainer.export.export_command import PROGRAM, parse_command_line

        refuse_several(PROGRAM, os.environ)
        command = parse_command_line(arguments)
        from trainer.export.export_run import run  # imports Flax and Orbax: seconds that a mistyped flag shouldn't cost

        run(command)
        return COMPLETED
    except (ForeignPackage, UserMistake) as mistake:
        print(f"error: {name_flags(str(mistake), arguments)}", file=sys.stderr)
        return MISTAKE
    except TrainingFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(sys.argv[1:]))
