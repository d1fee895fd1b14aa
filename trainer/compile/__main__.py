"""`python -m trainer.compile --config FILE [--topology NAME] [--compare FIELD=A,B] [--output FILE] [--FIELD VALUE …]`.

Exit status: 0 the step compiles and fits in the devices' memory, or that memory is unknown; 3 it doesn't fit, whether
or not a change was found with which it does (with `--compare`: one of the variants doesn't fit); 2 a mistake in the
command or the config, told in one message; 1 the compiler failed; 130 Ctrl-C. Every compilation happens in a process of
its own. So this process starts no device, and the compiler's environment is set for the other one alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from flax_longcontext import ForeignPackage, require_ours
from trainer.errors import TrainingFailed, UserMistake, name_flags
from trainer.hosts.launch import refuse_several
from trainer.process.broken_pipe import reader_may_leave

DOES_NOT_FIT = 3


def main(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit status."""
    try:
        require_ours("trainer", importer=__name__)
        from trainer.compile.command.compile_command import parse_command_line

        refuse_several("python -m trainer.compile", os.environ)
        task = parse_command_line(arguments)
        from trainer.compile.command.run_task import run  # imports Flax: seconds that a mistyped flag shouldn't cost

        fits = run(task, command=["python", "-m", "trainer.compile", *arguments])
        return DOES_NOT_FIT if fits is False else 0
    except (ForeignPackage, UserMistake) as mistake:
        print(f"error: {name_flags(str(mistake), arguments)}", file=sys.stderr)
        return 2
    except TrainingFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(sys.argv[1:]))
