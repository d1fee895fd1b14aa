"""Joins the processes of a run, before any of them starts a device."""

from __future__ import annotations

import functools
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import jax

from trainer.errors import TrainingFailed, UserMistake
from trainer.launch.launcher import Launch
from trainer.launch.peers import Peers

CONNECT_WITHIN_S = 300
"""Seconds that machines may take to start after each other."""
# JAX beats every half of it, and so misses a process half to all of it after its death: later than the watch
# (SILENT_AFTER_S), which ends a run within half a minute and with a word in its record.
_HEARTBEAT_TIMEOUT_S = 60
_ABORT_AFTER_S = 60


def connect(launch: Launch, timeout_s: int = CONNECT_WITHIN_S) -> Peers:
    """Waits for all processes, and returns them.

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
    arguments: dict[str, Any] = {
        "coordinator_address": launch.coordinator,
        "num_processes": launch.count,
        "process_id": launch.index,
        "cluster_detection_method": None if launch.coordinator is None else "deactivate",
        "initialization_timeout": timeout_s + _ABORT_AFTER_S,
        "heartbeat_timeout_seconds": _HEARTBEAT_TIMEOUT_S,
    }
    _within(timeout_s, functools.partial(jax.distributed.initialize, **arguments), launch)
    state = distributed.global_state
    peers = Peers(state.process_id, state.num_processes, state.client)
    peers.hosts = peers.exchange("hosts", socket.gethostname(), patience_s=timeout_s)
    return peers


def _within(timeout_s: float, initialize: Callable[[], None], launch: Launch) -> None:
    """Initialises in another thread: when time is over, JAX aborts the process from C++, and this comes first."""
    where = launch.coordinator or "the launcher's first node"
    outcome: list[Exception | None] = []

    def run() -> None:
        try:
            initialize()
            outcome.append(None)
        except Exception as error:  # raised by the thread that waits
            outcome.append(error)

    thread = threading.Thread(target=run, name="connect", daemon=True)
    thread.start()
    thread.join(timeout_s)
    reason = "time is over"
    if outcome:
        if outcome[0] is None:
            return
        if isinstance(outcome[0], ValueError):
            raise UserMistake(
                f"--distributed: the environment doesn't tell JAX this process's place ({outcome[0]}); give it: "
                "--distributed HOST:PORT,PROCESSES,INDEX"
            ) from outcome[0]
        reason = str(outcome[0]).strip().split("\n", 1)[0]
    raise TrainingFailed(
        f"the processes haven't all met at {where} within {timeout_s} s: {reason}; see that each is started, with the "
        "same address and number of processes and an index of its own, and that the first one's port is free and open"
    )
