"""Several processes as one run: they meet, agree on what to train, and train it. Process 0 writes the workdir."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.errors import TrainingFailed, UserMistake, name_flags
from trainer.hardware import installed_versions
from trainer.launch.agreement import require_same
from trainer.launch.connect import connect
from trainer.launch.launcher import Launch
from trainer.launch.membership import ALONE, Membership
from trainer.launch.peers import Peers
from trainer.launch.process_exit import FAILED, MISTAKE

_VERSIONS = ("flax-longcontext", "jax", "jaxlib", "orbax-checkpoint")


def run_together(
    launch: Launch, config: Mapping[str, Any], run: Callable[[Membership], int], *, line: Sequence[str]
) -> int:
    """Meets the other processes and runs with them.

    If the run fails, this process ends here: JAX's own end would wait for the others.

    Args:
      launch: the place of this process among the others.
      config: JSON values by name, which must be the same in every process.
      run: called with this process's membership; returns the exit status.
      line: the command line, for messages.

    Returns:
      The exit status of `run`.
    """
    membership = ALONE
    try:
        peers = connect(launch)
        membership = Membership(peers)
        with membership:
            require_same(peers, "config", config)
            require_same(peers, "versions", installed_versions(_VERSIONS))
            return run(membership)
    except BaseException as error:
        if not membership.is_told:
            _print_error(error, membership.peers, line)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(MISTAKE if isinstance(error, UserMistake) else FAILED)


def _print_error(error: BaseException, peers: Peers, line: Sequence[str]) -> None:
    who = "" if peers.is_first else f"{peers.name(peers.index)}: "
    if isinstance(error, UserMistake | TrainingFailed):
        print(f"error: {who}{name_flags(str(error), line)}", file=sys.stderr)
    else:
        traceback.print_exception(error)
