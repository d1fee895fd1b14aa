"""When a run saves, and what it does when a save fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from trainer.checkpoints.training_state import Checkpoints, NotRemovedError
from trainer.errors import TrainingFailed
from trainer.observers.observer import Observers
from trainer.observers.times import TimeAccount
from trainer.process.signals import StopRequest
from trainer.terminal.console import Console

# Pauses before further tries of the last save: somebody who reads the warning can make room meanwhile. After a stop
# signal there is only one further try, since its sender may not wait for long.
_SAVE_AGAIN_AFTER_S = (2.0, 8.0, 20.0, 60.0)


class Snapshot(NamedTuple):
    """What a checkpoint holds."""

    step: int
    state: Any
    place: Any
    """Of the data, as JSON values."""
    config_history: Any
    """As JSON values."""


class Saver:
    """Saves a run in the background. When a save fails, it warns, and the next save tries again.

    Args:
      checkpoints: of the run.
      console: warned of failures.
      account: of the run's time.
      observers: told of checkpoints once they lie on the disk.
      stop: the stop signals. After one there is little time for further tries.
    """

    def __init__(
        self, checkpoints: Checkpoints, console: Console, account: TimeAccount, observers: Observers, stop: StopRequest
    ):
        self._checkpoints, self._console, self._account = checkpoints, console, account
        self._observers, self._stop = observers, stop
        self._told_step = checkpoints.newest_step

    def save(self, take: Callable[[], Snapshot]) -> None:
        """Starts saving the current step, unless it is saved already."""
        self.finish()
        snapshot = take()
        if snapshot.step != self._checkpoints.newest_step:
            try:
                self._start(snapshot)
            except TrainingFailed as failure:
                self._tell(failure)

    def save_at_last(self, take: Callable[[], Snapshot]) -> None:
        """Saves the current step, and tries again if that fails.

        Raises:
          TrainingFailed: no try succeeded.
        """
        self.save(take)
        self.finish()
        snapshot = take()
        for num_tries, pause_s in enumerate(_SAVE_AGAIN_AFTER_S, 1):
            if self._is_saved(snapshot):
                return
            is_last = num_tries == len(_SAVE_AGAIN_AFTER_S) or self._stop.requested
            if self._stop.wait(pause_s):
                time.sleep(_SAVE_AGAIN_AFTER_S[0])
            try:
                self._start(snapshot)
                self._wait()
            except TrainingFailed as failure:
                if is_last and not self._is_saved(snapshot):
                    raise TrainingFailed(f"{failure}, then run the same command again") from failure
                self._tell(failure)

    def finish(self, *, tries_again: bool = True) -> None:
        """Waits for the save in progress; if it failed, warns and says whether another will be tried."""
        try:
            self._wait()
        except TrainingFailed as failure:
            self._tell(failure, tries_again=tries_again)

    def close(self) -> None:
        """Finishes a save in progress, and lets its threads go.

        A failure is only a warning: a run that ends well has waited for its last save, so another error ends this one.
        """
        try:
            self._checkpoints.close()
        except TrainingFailed as failure:
            self._console.warning(str(failure))

    def _is_saved(self, snapshot: Snapshot) -> bool:
        return snapshot.step == self._checkpoints.newest_step

    def _start(self, snapshot: Snapshot) -> None:
        with self._account.measure("checkpoint"):
            self._checkpoints.save(*snapshot)

    def _wait(self) -> None:
        try:
            with self._account.measure("checkpoint"):
                self._checkpoints.wait()
        finally:
            newest = self._checkpoints.newest
            if newest is not None and self._checkpoints.newest_step != self._told_step:
                self._told_step = self._checkpoints.newest_step
                self._observers.saved(self._told_step, newest)

    def _tell(self, failure: TrainingFailed, *, tries_again: bool = True) -> None:
        is_missing = not isinstance(failure, NotRemovedError)
        self._console.warning(f"{failure}. The next save tries again" if tries_again and is_missing else str(failure))
