"""Ends a run that hangs: a step, a wait for data, an evaluation or a save that takes far longer than those before it.

A collective whose peer has stopped, a disk or a network that no longer answers, and a deadlock all look alike from
outside: a job that costs as much as before, and makes nothing. A thread of its own watches, since the main thread is
stuck inside XLA then. It leaves every thread's stack, and a process that can be started again.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from trainer.config import WatchdogConfig
from trainer.terminal.units import format_seconds

_NAMES = {
    "data_wait": "the wait for a batch",
    "step": "a step",
    "evaluation": "an evaluation",
    "save": "a save",
}
_NUM_FIRST = 3  # that have nothing to be compared with: the second evaluation, of samples, compiles too
_NUM_RECENT = 100  # saves whose seconds are kept
_LOOK_EVERY_S = 0.5


class MeasuredTime(Protocol):
    """The account of a run's time, as far as the watchdog asks it."""

    @property
    def under_way(self) -> tuple[str, float] | None:
        """The activity of the main thread, and the `time.perf_counter()` of its begin; None: none is measured."""

    def recent(self, activity: Any) -> list[float]:
        """Seconds of the last spans of an activity."""


class Watchdog:
    """Watches a run inside `watching`.

    Seconds count only while its thread runs. After the process was suspended (SIGSTOP, a laptop's lid), nothing is late
    that wasn't before, and everything has its whole time to move on.

    Args:
      config: the limits.
      account: tells what the main thread is doing, and how long it did so before.
      typical_step_s: returns the median seconds of a step; None: too few have been.
      on_stall: called once for each thing that hangs, with a message, from the watchdog's thread.
    """

    def __init__(
        self,
        config: WatchdogConfig,
        account: MeasuredTime,
        typical_step_s: Callable[[], float | None],
        on_stall: Callable[[str], None],
    ):
        self._config, self._account, self._typical_step_s, self._on_stall = config, account, typical_step_s, on_stall
        self._is_compiling: Callable[[], bool] = lambda: False
        self._saves: set[tuple[str, float]] = set()  # that are under way
        self._save_seconds: deque[float] = deque(maxlen=_NUM_RECENT)
        # By what is under way: the time at which it was first seen; infinite once the console has printed it.
        self._since: dict[tuple[str, float], float] = {}
        self._awake_s = 0.0
        self._last_look: float | None = None

    @contextlib.contextmanager
    def watching(self, is_compiling: Callable[[], bool]) -> Iterator[None]:
        """Watches inside.

        Args:
          is_compiling: whether the main thread waits for a program to be compiled, which takes as long as it takes.
        """
        if not self._config.enabled:
            yield
            return
        self._is_compiling, closing = is_compiling, threading.Event()

        def run() -> None:
            while not closing.wait(_LOOK_EVERY_S):
                self.look(time.perf_counter())

        thread = threading.Thread(target=run, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            closing.set()
            thread.join()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """A save goes on inside, in whichever thread."""
        save = ("save", time.perf_counter())
        self._saves.add(save)
        try:
            yield
        finally:
            self._saves.remove(save)
            self._save_seconds.append(time.perf_counter() - save[1])

    def look(self, now: float) -> None:
        """Looks once.

        Args:
          now: seconds of a clock that never goes back.
        """
        if self._last_look is not None and not self._is_compiling():
            self._awake_s += min(now - self._last_look, 2 * _LOOK_EVERY_S)
        self._last_look = now
        activity = self._account.under_way
        under_way = [*self._saves.copy(), *([activity] if activity is not None and activity[0] in _NAMES else [])]
        self._since = {each: self._since.get(each, self._awake_s) for each in under_way}
        for each, since in self._since.items():
            kind, seconds = each[0], self._awake_s - since
            if seconds <= self._config.min_seconds:
                continue
            typical_s = self._typical_s(kind)
            if seconds > (self._config.first_seconds if typical_s is None else self._config.factor * typical_s):
                self._since[each] = math.inf
                usual = (
                    "and none was done before" if typical_s is None else f"where {format_seconds(typical_s)} is usual"
                )
                self._on_stall(f"stalled: {_NAMES[kind]} has taken {format_seconds(seconds)}, {usual}")

    def _typical_s(self, kind: str) -> float | None:
        """Median seconds of a kind so far; None: too few have been."""
        if kind == "step":
            return self._typical_step_s()
        seconds = [*self._save_seconds] if kind == "save" else self._account.recent(kind)
        return statistics.median(seconds) if len(seconds) >= _NUM_FIRST else None
