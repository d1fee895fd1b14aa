"""A run of several processes: they meet, agree on what to train, and train it as one. Process 0 writes the workdir."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Sequence

from trainer.cli.train_command import TrainCommand
from trainer.config.changes import field_values
from trainer.errors import TrainingFailed, UserMistake, name_flags
from trainer.hosts.agreement import require_same, require_shared
from trainer.hosts.connect import connect
from trainer.hosts.launch import Launch
from trainer.hosts.membership import ALONE, Membership
from trainer.hosts.peers import Peers
from trainer.process.exit_status import FAILED, MISTAKE
from trainer.process.versions import installed_versions
from trainer.train import train
from trainer.workdir import FollowedWorkdir, Workdir, claim_workdir

_VERSIONS = ("flax-longcontext", "jax", "jaxlib", "orbax-checkpoint")


def train_together(
    command: TrainCommand, launch: Launch, *, line: Sequence[str], started: float, ending: threading.Event
) -> int:
    """Meets the other processes and trains with them.

    If the run fails, this process ends here: JAX's own end would wait for the others.

    Args:
      command: from the command line.
      launch: where this process stands among the others.
      line, started, ending: as in `train`.

    Returns:
      The exit status, as of `train`.
    """
    membership = ALONE
    try:
        peers = connect(launch)
        membership = Membership(peers)
        with membership:
            require_same(peers, "config", field_values(command.train) | {"--profile-steps": command.profile_steps})
            require_same(peers, "versions", installed_versions(_VERSIONS))
            workdir = _claim(command, peers)
            return train(
                command.train,
                workdir,
                command=line,
                started=started,
                ending=ending,
                membership=membership,
                traced=command.traced,
            )
    except BaseException as error:
        if not membership.is_told:
            _tell(error, membership.peers, line)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(MISTAKE if isinstance(error, UserMistake) else FAILED)


def _claim(command: TrainCommand, peers: Peers) -> Workdir:
    """Process 0 claims the workdir. The others see whether it is theirs, too."""
    workdir = claim_workdir(command.workdir, command.train) if peers.is_first else FollowedWorkdir(command.workdir)
    require_shared(peers, workdir.path)
    return workdir


def _tell(error: BaseException, peers: Peers, line: Sequence[str]) -> None:
    who = "" if peers.is_first else f"{peers.name(peers.index)}: "
    if isinstance(error, UserMistake | TrainingFailed):
        print(f"error: {who}{name_flags(str(error), line)}", file=sys.stderr)
    else:
        traceback.print_exception(error)
