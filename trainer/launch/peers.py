"""The processes that train together, and words that they exchange by way of JAX's coordination service.

The service is a table of keys and values in process 0. Words in it need no device, so that a thread that saves can
exchange some while the main thread runs steps: two collectives of a device at a time could each wait for the other.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer.errors import TrainingFailed, UserMistake

_ROOT = "trainer"
_LOOK_EVERY_S = 1.0
# A process that has ended is noticed by the watch, much sooner. One that lives may make tokens or hash a checkpoint for
# hours.
_PATIENCE_S = 86_400.0
_NUM_NAMED = 5


class Table(Protocol):
    """JAX's `DistributedRuntimeClient`, as far as it is used here."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...
    def key_value_delete(self, key: str) -> None: ...


class OutOfTouchError(TrainingFailed):
    """Another process didn't say what this one waits for."""


class Peers:
    """The processes of a run.

    Args:
      index: of this process, from 0. Process 0 writes the workdir.
      count: processes in all.
      table: the coordination service; None: this process trains alone.
    """

    def __init__(self, index: int = 0, count: int = 1, table: Table | None = None):
        assert count == 1 or table is not None, "several processes need a table"
        self.index, self.count = index, count
        self._table = table
        self.hosts: Sequence[str] = ("",) * count
        """The name of each process's machine."""

    @property
    def is_first(self) -> bool:
        """True: this process writes the workdir, and talks to the user."""
        return self.index == 0

    def name(self, index: int) -> str:
        """A process, for a message."""
        return f"process {index} ({self.hosts[index]})" if self.hosts[index] else f"process {index}"

    def exchange(
        self, topic: str, value: str, *, patience_s: float = _PATIENCE_S, unless: str | None = None
    ) -> list[str]:
        """Waits until every process has said its value, and returns all of them, by index.

        Any thread may call it. Process 0 collects the values, so that the cost grows with the number of processes and
        not with its square.

        Args:
          topic: names the exchange. Every process must hold the same exchanges; a topic is used once.
          value: of this process.
          patience_s: seconds to wait for the others.
          unless: a key. A process that has posted something below it won't take part.

        Raises:
          OutOfTouchError: a process says nothing, or has posted something below `unless`.
        """
        if self._table is None:
            return [value]
        deadline = time.monotonic() + patience_s
        self.post(f"{topic}/from/{self.index}", value)
        if not self.is_first:
            return list(json.loads(self._wait_for(0, f"{topic}/all", deadline, unless)))
        values = [self._wait_for(each, f"{topic}/from/{each}", deadline, unless) for each in range(self.count)]
        self.post(f"{topic}/all", json.dumps(values))
        return values

    def of_first(self, topic: str, make: Callable[[], str]) -> str:
        """A value that process 0 makes, in every process.

        Args:
          topic: as in `exchange`.
          make: called in process 0 alone.

        Raises:
          OutOfTouchError: process 0 says nothing.
        """
        return self.exchange(topic, make() if self.is_first else "")[0]

    def post(self, key: str, value: str, *, overwrites: bool = False) -> None:
        """Says something that others may look up."""
        if self._table is not None:
            self._table.key_value_set(f"{_ROOT}/{key}", value, allow_overwrite=overwrites)

    def posted(self, key: str) -> dict[int, str]:
        """The values that processes have posted below a key, by index."""
        assert self._table is not None
        return {int(name.rpartition("/")[2]): value for name, value in self._table.key_value_dir_get(f"{_ROOT}/{key}/")}

    def forget(self, topic: str) -> None:
        """Frees the memory of an exchange, once every process is known to be past it."""
        if self._table is not None and self.is_first:
            self._table.key_value_delete(f"{_ROOT}/{topic}/")

    def _wait_for(self, whom: int, key: str, deadline: float, unless: str | None) -> str:
        assert self._table is not None
        while True:
            try:
                return self._table.blocking_key_value_get(f"{_ROOT}/{key}", int(_LOOK_EVERY_S * 1000))
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    reason = str(error).split("\n", 1)[0]
                    raise OutOfTouchError(f"{self.name(0)} can't be reached any more: {reason}") from error
            if unless is not None and (spoken := self.posted(unless)):
                raise OutOfTouchError(f"{self.name(min(spoken))} has given up")
            if time.monotonic() > deadline:
                raise OutOfTouchError(f"{self.name(whom)} didn't answer in time (about {key}); its own log may say why")


def require_same(peers: Peers, what: str, facts: Mapping[str, Any]) -> None:
    """Refuses processes that don't run the same experiment, before anything is compiled.

    Args:
      peers: the processes.
      what: names the facts, and the exchange.
      facts: JSON values by name, as this process knows them.

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
    if peers.count == 1:
        return
    lock, sign, seen = folder / ".lock", secrets.token_hex(16), None
    try:
        if peers.is_first:
            lock.write_text(sign)
        sign = peers.of_first("workdir", lambda: sign)
        seen = lock.read_text()
    except OSError as error:
        if peers.is_first:
            raise UserMistake(
                f"{lock} can't be written: {error.strerror}; make room, or see its permissions"
            ) from error
    for index, is_same in enumerate(peers.exchange("workdir/seen", "yes" if seen == sign else "no")):
        if is_same == "no":
            raise UserMistake(
                f"workdir {folder} is not the same folder for {peers.name(0)} and {peers.name(index)}; "
                "choose one with --workdir on a file system that all machines share"
            )
