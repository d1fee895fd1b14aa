"""Refuses processes that don't run the same experiment, before anything is compiled."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import UserMistake
from trainer.launch.peers import Peers

_NUM_NAMED = 5


def require_same(peers: Peers, what: str, facts: Mapping[str, Any]) -> None:
    """Compares what every process knows.

    Args:
      peers: the processes.
      what: names the facts, and the exchange.
      facts: JSON values by name.

    Raises:
      UserMistake: in every process, the same: a process knows something else than process 0.
    """
    first, *others = map(json.loads, peers.exchange(f"same/{what}", json.dumps(facts)))
    for index, theirs in enumerate(others, 1):
        names = [name for name in first | theirs if first.get(name) != theirs.get(name)]
        if names:
            lines = [f"{name}: {first.get(name)!r} and {theirs.get(name)!r}" for name in names[:_NUM_NAMED]]
            more = [f"and {len(names) - _NUM_NAMED} more"] if len(names) > _NUM_NAMED else []
            raise UserMistake(
                "\n  ".join([f"{peers.name(0)} and {peers.name(index)} differ in their {what}:", *lines, *more])
                + "\nstart all processes with the same command, files and versions; "
                "runs of their own are started with --distributed off"
            )


def require_shared(peers: Peers, folder: Path) -> None:
    """Sees that a folder is one and the same for all processes, and not each machine's own.

    Args:
      peers: the processes.
      folder: which process 0 has locked.

    Raises:
      UserMistake: in every process, the same: a process sees another folder, or none. In process 0: the folder can't
        be written.
    """
    lock = folder / ".lock"

    def write_sign() -> str:
        sign = secrets.token_hex(16)
        try:
            lock.write_text(sign)
        except OSError as error:
            raise UserMistake(
                f"{lock} can't be written: {error.strerror}; make room, or see its permissions"
            ) from error
        return sign

    if peers.count == 1:
        return
    sign = peers.of_first("workdir", write_sign)
    try:
        seen = lock.read_text()
    except OSError as error:
        seen = f"{error.strerror}"
    for index, is_same in enumerate(peers.exchange("workdir/seen", "yes" if seen == sign else "no")):
        if is_same == "no":
            raise UserMistake(
                f"workdir {folder} is not the same folder for {peers.name(0)} and {peers.name(index)}; "
                "choose one with --workdir on a file system that all machines share"
            )
