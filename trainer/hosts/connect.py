"""Joins the processes of a run, before any of them starts a device."""

from __future__ import annotations

import logging
import socket

import jax

from trainer.errors import TrainingFailed, UserMistake
from trainer.hosts.launch import Launch
from trainer.hosts.peers import Peers

CONNECT_WITHIN_S = 300
"""Seconds that machines may take to start after each other."""
# JAX beats every half of it, and so misses a process half to all of it after its death: later than the watch
# (SILENT_AFTER_S), which ends a run within half a minute and with a word in its record.
_HEARTBEAT_TIMEOUT_S = 60


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
    given = launch.coordinator is not None
    try:
        jax.distributed.initialize(
            launch.coordinator,
            launch.count,
            launch.index,
            cluster_detection_method="deactivate" if given else None,
            initialization_timeout=timeout_s,
            heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S,
        )
    except ValueError as error:
        raise UserMistake(
            f"--distributed on: JAX finds no launcher that it knows ({error}); give this process's place instead: "
            "--distributed HOST:PORT,PROCESSES,INDEX"
        ) from error
    except RuntimeError as error:
        where = launch.coordinator or "the launcher's first node"
        place = "" if launch.index is None else f"process {launch.index} of {launch.count}: "
        raise TrainingFailed(
            f"{place}the processes haven't all met at {where} within {timeout_s} s: {_reason(error)}; see that every "
            "process is started, with the same address and number, and that the first one's port is free and open"
        ) from error
    state = distributed.global_state
    peers = Peers(state.process_id, state.num_processes, state.client)
    peers.hosts = peers.exchange("hosts", socket.gethostname(), patience_s=timeout_s)
    return peers


def _reason(error: RuntimeError) -> str:
    return str(error).strip().split("\n", 1)[0]
