"""`python -m trainer.sample --workdir DIR --prompt TEXT [--prompt TEXT …] [--FIELD VALUE …]`.

The texts go to standard output, on a terminal as they are written; everything else to standard error. Exit status: 0
completed; 1 failed; 2 a mistake in the command, the prompts, the tokenizer or the checkpoint, told in one message; 130
Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from flax_longcontext import ForeignPackage, require_ours
from trainer.errors import TrainingFailed, UserMistake, name_flags
from trainer.hosts.launch import refuse_several
from trainer.process.broken_pipe import reader_may_leave
from trainer.process.exit_status import INTERRUPTED


def main(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit status."""
    try:
        require_ours("trainer", importer=__name__)
        from trainer.sample.sample_command import parse_command_line

        refuse_several("python -m trainer.sample", os.environ)
        command = parse_command_line(arguments)
        # This imports Flax and Orbax: seconds that a mistyped flag shouldn't cost.
        from trainer.sample.continuation import run

        run(command)
        return 0
    except (ForeignPackage, UserMistake) as mistake:
        print(f"error: {name_flags(str(mistake), arguments)}", file=sys.stderr)
        return 2
    except TrainingFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(sys.argv[1:]))
