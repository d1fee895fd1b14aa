"""The frame of the commands beside training: they run in one process, and one message tells why they end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from flax_longcontext import ForeignPackage, require_ours
from trainer.errors import TrainingFailed, UserMistake, name_flags
from trainer.launch.launcher import refuse_several
from trainer.launch.process_exit import FAILED, INTERRUPTED, MISTAKE


def run_command(program: str, arguments: Sequence[str], run: Callable[[], int]) -> int:
    """Runs a command line.

    Args:
      program: how the command is called, for messages: `python -m trainer.sample`.
      arguments: the command line's.
      run: does what it asks for, and returns the exit status. It imports what takes seconds itself.

    Returns:
      The exit status: that of `run`; 2 for a mistake and 1 for a failure, with a message on standard error; 130 for
      Ctrl-C.
    """
    try:
        require_ours("trainer", importer=__name__)
        refuse_several(program, os.environ)
        return run()
    except (ForeignPackage, UserMistake) as mistake:
        print(f"error: {name_flags(str(mistake), arguments)}", file=sys.stderr)
        return MISTAKE
    except TrainingFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
