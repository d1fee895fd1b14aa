"""Saves a run, tries again when a save fails, and says which checkpoints stay."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from trainer.checkpoints.training_state import Checkpoints, NotRemovedError
from trainer.config import CheckpointConfig, TrainConfig
from trainer.errors import TrainingFailed
from trainer.files.atomic import is_full_disk
from trainer.launch.signals import StopRequest
from trainer.observers.observer import VALIDATION_LOSS, Observers, Saved
from trainer.observers.times import TimeAccount
from trainer.terminal.console import Console
from trainer.workdir import Workdir

# Pauses before further tries of the last save: somebody who reads the warning can make room meanwhile. After a stop
# signal there is only one further try, since its sender may not wait for long.
_SAVE_AGAIN_AFTER_S = (2.0, 8.0, 20.0, 60.0)
_FULL = "full disk"


class Snapshot(NamedTuple):
    """The content of a checkpoint."""

    step: int
    state: Any
    place: Any
    """Of the data, as JSON values."""
    config_history: Any
    """As JSON values."""
    base: str | None = None
    """Digest of the frozen base that the state's adapters belong to."""


class Saver:
    """Saves a run in the background. When a save fails, it warns, and the next save tries again.

    A second failure of the same kind ends the run, unless the disk is full, where room may be made.

    Args:
      checkpoints: of the run.
      workdir: of the run; made again if somebody has removed it.
      config: of the steps to come.
      console: warned of failures.
      account: of the run's time.
      observers: hear of checkpoints once they lie on the disk.
      stop: the stop signals. After one there is little time for further tries.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        workdir: Workdir,
        config: TrainConfig,
        console: Console,
        account: TimeAccount,
        observers: Observers,
        stop: StopRequest,
    ):
        self._workdir, self._config = workdir, config
        self._checkpoints, self._console, self._account = checkpoints, console, account
        self._observers, self._stop = observers, stop
        self._told_step = checkpoints.newest_step
        self._failures: list[TrainingFailed] = []  # since the last save that succeeded

    def rehearse(self, devices: Sequence[jax.Device]) -> None:
        """Tries to save before the first step, rather than find after hours that nothing can be saved.

        Args:
          devices: of all processes.

        Raises:
          TrainingFailed: nothing can be saved, for another reason than a full disk, which is only a warning.
        """
        try:
            with self._account.measure("checkpoint"):
                self._checkpoints.rehearse(devices)
        except TrainingFailed as failure:
            if not is_full_disk(failure):
                raise
            self._console.warning(str(failure))

    def save(self, take: Callable[[], Snapshot]) -> None:
        """Starts saving the current step, unless it is saved already.

        Raises:
          TrainingFailed: saving has failed twice in the same way, and not because of a full disk.
        """
        self.finish()
        self._refuse_to_fail_on()
        self._start_or_tell(take())
        self._refuse_to_fail_on()

    def save_at_last(self, take: Callable[[], Snapshot]) -> None:
        """Saves the current step, and tries again if that fails.

        Raises:
          TrainingFailed: no try succeeded.
        """
        self.finish()
        snapshot = take()
        self._start_or_tell(snapshot)
        self.finish()
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

    def _start_or_tell(self, snapshot: Snapshot) -> None:
        if not self._is_saved(snapshot):
            try:
                self._start(snapshot)
            except TrainingFailed as failure:
                self._tell(failure)

    def _refuse_to_fail_on(self) -> None:
        if len(self._failures) > 1 and _kind(self._failures[-1]) == _kind(self._failures[-2]) != _FULL:
            raise TrainingFailed(
                f"{self._failures[-1]}, then run the same command again: saving failed twice in the same way, and all "
                "further steps would be lost"
            ) from self._failures[-1]

    def _is_saved(self, snapshot: Snapshot) -> bool:
        return snapshot.step == self._checkpoints.newest_step

    def _start(self, snapshot: Snapshot) -> None:
        with contextlib.suppress(OSError):  # the save then fails, and says so
            if self._workdir.make_again(self._config):
                self._console.warning(f"workdir {self._workdir.path} was removed; it is made again, for what follows")
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
                self._failures.clear()
                self._observers.observe(Saved(self._told_step, newest))

    def _tell(self, failure: TrainingFailed, *, tries_again: bool = True) -> None:
        is_missing = not isinstance(failure, NotRemovedError)
        if is_missing:
            self._failures.append(failure)
        self._console.warning(f"{failure}. The next save tries again" if tries_again and is_missing else str(failure))


def spared_steps(
    steps: Sequence[int], config: CheckpointConfig, evaluations: Mapping[int, Mapping[str, Any]]
) -> set[int]:
    """The steps whose checkpoints are kept however old they are.

    Args:
      steps: of all checkpoints, ascending.
      config: says which are kept.
      evaluations: log entries by step, of losses that compare. Another thread may add to them meanwhile.

    >>> losses = {step: {VALIDATION_LOSS: loss} for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5), (40, None))}
    >>> sorted(spared_steps([10, 20, 30, 40, 50], CheckpointConfig(5, 1, 25, True), losses))
    [20, 50]
    """
    every = config.keep_every_num_steps
    spared = {step for step in steps if every is not None and step % every == 0}
    if config.keep_best:
        losses = {step: evaluations[step][VALIDATION_LOSS] for step in steps if step in evaluations}
        finite = {step: loss for step, loss in losses.items() if loss is not None}
        spared |= {min(finite, key=finite.__getitem__)} if finite else set()
    return spared


def _kind(failure: TrainingFailed) -> str:
    """The text that failures of one cause have in common: without paths, which have steps in them."""
    return _FULL if is_full_disk(failure) else re.sub(r"/\S*", "", str(failure))
