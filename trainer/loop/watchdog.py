"""Ends a run that hangs: a step, a wait for data, an evaluation or a save that takes far longer than those before it.

A collective whose peer has stopped, a disk or a network that no longer answers, and a deadlock all look alike from
outside: a job that costs as much as before, and makes nothing. A thread of its own watches, since the main thread is
stuck inside XLA then. It leaves every thread's stack, and a process that can be started again.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal, get_args

from trainer.config import WatchdogConfig
from trainer.observers.times import NUM_RECENT, StepTimes, TimeAccount
from trainer.process.stillness import StillnessWatch, Watched
from trainer.terminal.units import format_seconds

OfTheAccount = Literal["data_wait", "step", "evaluation"]
Kind = OfTheAccount | Literal["save"]

_NAMES: dict[Kind, str] = {
    "data_wait": "the wait for a batch",
    "step": "a step",
    "evaluation": "an evaluation",
    "save": "a save",
}
_NUM_FIRST = 3  # that have nothing to be compared with: the second evaluation, of samples, compiles too


class Watchdog:
    """Watches a run inside `watching`.

    Args:
      config: the limits.
      account: tells what the main thread is doing, and how long it did so before.
      times: how long steps take.
      on_stall: called with what hangs, from the watchdog's thread.
    """

    def __init__(self, config: WatchdogConfig, account: TimeAccount, times: StepTimes, on_stall: Callable[[str], None]):
        self._config, self._account, self._times, self._on_stall = config, account, times, on_stall
        self._save_seconds: deque[float] = deque(maxlen=NUM_RECENT)
        self.watch = StillnessWatch([self._watched(kind, self._sign(kind)) for kind in get_args(OfTheAccount)])

    @contextlib.contextmanager
    def watching(self, is_compiling: Callable[[], bool]) -> Iterator[None]:
        """Watches inside.

        Args:
          is_compiling: whether the main thread waits for a program to be compiled, which takes as long as it takes.
        """
        if not self._config.enabled:
            yield
            return
        self.watch.is_paused = is_compiling
        with self.watch:
            yield

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """A save goes on inside, in whichever thread."""
        begun = time.perf_counter()
        watched = self._watched("save", lambda: begun)
        self.watch.add(watched)
        try:
            yield
        finally:
            self.watch.remove(watched)
            self._save_seconds.append(time.perf_counter() - begun)

    def limit_s(self, kind: Kind) -> tuple[float, float | None]:
        """Seconds after which one of a kind hangs, and the median seconds so far; None: too few have been."""
        if kind == "step":
            typical_s = self._times.typical_step_s()
        else:
            seconds = self._save_seconds if kind == "save" else self._account.recent(kind)
            typical_s = statistics.median(seconds) if len(seconds) >= _NUM_FIRST else None
        config = self._config
        limit_s = config.first_seconds if typical_s is None else config.factor * typical_s
        return max(config.min_seconds, limit_s), typical_s

    def _sign(self, activity: OfTheAccount) -> Callable[[], float | None]:
        def begun() -> float | None:
            under_way = self._account.under_way
            return under_way[1] if under_way is not None and under_way[0] == activity else None

        return begun

    def _watched(self, kind: Kind, sign: Callable[[], float | None]) -> Watched:
        return Watched(sign, functools.partial(self._is_late, kind), functools.partial(self._tell, kind))

    def _is_late(self, kind: Kind, seconds: float) -> bool:
        return seconds > self._config.min_seconds and seconds > self.limit_s(kind)[0]

    def _tell(self, kind: Kind, seconds: float) -> None:
        typical_s = self.limit_s(kind)[1]
        usual = "and none was done before" if typical_s is None else f"where {format_seconds(typical_s)} is usual"
        self._on_stall(f"stalled: {_NAMES[kind]} has taken {format_seconds(seconds)}, {usual}")
