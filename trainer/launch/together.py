"""Several processes as one run: they meet, agree on what to train, and train it. Process 0 writes the workdir."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from trainer.errors import TrainingFailed, UserMistake, name_flags
from trainer.hardware import installed_versions
from trainer.launch.launcher import Launch
from trainer.launch.membership import Membership
from trainer.launch.peers import Peers, require_same
from trainer.launch.process_exit import FAILED, MISTAKE

_VERSIONS = ("flax-longcontext", "jax", "jaxlib", "orbax-checkpoint")
CONNECT_WITHIN_S = 300
"""Seconds that machines may take to start after each other."""
# JAX beats every half of it, and so misses a process half to all of it after its death: later than a membership
# (SILENT_AFTER_S), which ends a run within half a minute and with a word in its record.
_HEARTBEAT_TIMEOUT_S = 60
_ABORT_AFTER_S = 60


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
    peers = Peers()
    try:
        peers = connect(launch)
        with Membership(peers) as membership:
            require_same(peers, "config", config)
            require_same(peers, "versions", installed_versions(_VERSIONS))
            return run(membership)
    except BaseException as error:
        who = "" if peers.is_first else f"{peers.name(peers.index)}: "
        if isinstance(error, UserMistake | TrainingFailed):
            print(f"error: {who}{name_flags(str(error), line)}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(MISTAKE if isinstance(error, UserMistake) else FAILED)


def connect(launch: Launch, timeout_s: int = CONNECT_WITHIN_S) -> Peers:
    """Waits for all processes, before any of them starts a device, and returns them.

    Args:
      launch: where this process stands among them.
      timeout_s: seconds to wait.

    Raises:
      UserMistake: nothing tells where the processes are.
      TrainingFailed: process 0 can't be reached, or a process doesn't come.
    """
    from jax._src import distributed  # JAX has no public way to its coordination service; Orbax takes this one, too

    # JAX's own handler of SIGTERM would replace ours.
    jax.config.update("jax_enable_preemption_service", False)
    logging.getLogger("jax._src.distributed").setLevel(logging.ERROR)
    outcome: list[Exception | None] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                coordinator_address=launch.coordinator,
                num_processes=launch.count,
                process_id=launch.index,
                cluster_detection_method=None if launch.coordinator is None else "deactivate",
                initialization_timeout=timeout_s + _ABORT_AFTER_S,
                heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S,
            )
            outcome.append(None)
        except Exception as error:  # raised by the thread that waits
            outcome.append(error)

    # In another thread: when time is over, JAX aborts the process from C++, and this comes first.
    thread = threading.Thread(target=initialize, name="connect", daemon=True)
    thread.start()
    thread.join(timeout_s)
    error = outcome[0] if outcome else TimeoutError("time is over")
    if isinstance(error, ValueError):
        raise UserMistake(
            f"--distributed: the environment doesn't tell JAX this process's place ({error}); give it: "
            "--distributed HOST:PORT,PROCESSES,INDEX"
        ) from error
    if error is not None:
        where, reason = launch.coordinator or "the launcher's first node", str(error).strip().split("\n", 1)[0]
        raise TrainingFailed(
            f"the processes haven't all met at {where} within {timeout_s} s: {reason}; see that each is started, with "
            "the same address and number of processes and an index of its own, and that the first one's port is free "
            "and open"
        )
    state = distributed.global_state
    peers = Peers(state.process_id, state.num_processes, state.client)
    peers.hosts = peers.exchange("hosts", socket.gethostname(), patience_s=timeout_s)
    return peers
