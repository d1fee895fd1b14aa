"""A save that all processes of a run make together: each part of it succeeds in all of them, or counts in none."""

from __future__ import annotations

import json
from collections.abc import Callable

from trainer.errors import TrainingFailed
from trainer.launch.peers import Peers


class SharedSave:
    """The messages of the processes about one save. None of them runs on a device, so any thread may send them.

    Args:
      peers: the processes.
      number: of the save in this attempt, failed ones counted.
    """

    def __init__(self, peers: Peers, number: int):
        self._peers, self._topic = peers, f"save/{number}"
        self._given_up = f"{self._topic}/given-up"

    def part(self, name: str, act: Callable[[], str | None]) -> list[str]:
        """Does this process's share of a part, and waits for the others'.

        Args:
          name: of the part, which every process begins.
          act: does the share.

        Returns:
          What `act` has returned in each process.

        Raises:
          Exception: what `act` raises here.
          TrainingFailed: it has failed in another process.
        """
        failure: Exception | None = None
        try:
            said = {"done": act() or ""}
        except Exception as error:
            failure, said = error, {"failed": f"{type(error).__name__}: {error}"}
            self._peers.post(f"{self._given_up}/{self._peers.index}", name)
        values = [json.loads(value) for value in self._peers.exchange(f"{self._topic}/{name}", json.dumps(said))]
        if failure is not None:
            raise failure
        for index, value in enumerate(values):
            if "failed" in value:
                raise TrainingFailed(f"{self._peers.name(index)}: {value['failed']}")
        return [value["done"] for value in values]

    def barrier(self, key: str, patience_s: float) -> None:
        """Waits until every process is here.

        Args:
          key: names the barrier.
          patience_s: seconds to wait.

        Raises:
          OutOfTouchError: a process doesn't come, or has failed in a part.
        """
        self._peers.exchange(f"{self._topic}/{key}", "", patience_s=patience_s, unless=self._given_up)

    def forget(self) -> None:
        """Frees what was said, once every process has begun the next save."""
        self._peers.forget(self._topic)
