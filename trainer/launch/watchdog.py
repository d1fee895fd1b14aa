"""Ends a run that hangs: a step, a wait for data, an evaluation or a save that takes far longer than those before it.

A collective whose peer has stopped, a disk or a network that no longer answers, and a deadlock all look alike from
outside: a job that costs as much as before, and makes nothing. A thread of its own watches, since the main thread is
stuck inside XLA then. It leaves every thread's stack, and a process that can be started again.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self, get_args

from trainer.config import WatchdogConfig
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
_NUM_RECENT = 100  # saves whose seconds are kept
_LOOK_EVERY_S = 0.5


class MeasuredTime(Protocol):
    """The account of a run's time, as far as the watchdog asks it."""

    @property
    def under_way(self) -> tuple[str, float] | None:
        """The activity of the main thread, and the `time.perf_counter()` of its begin; None: none is measured."""

    def recent(self, activity: OfTheAccount) -> list[float]:
        """Seconds of the last spans of an activity."""


class Watchdog:
    """Watches a run inside `watching`.

    Args:
      config: the limits.
      account: tells what the main thread is doing, and how long it did so before.
      typical_step_s: returns the median seconds of a step; None: too few have been.
      on_stall: called with what hangs, from the watchdog's thread.
    """

    def __init__(
        self,
        config: WatchdogConfig,
        account: MeasuredTime,
        typical_step_s: Callable[[], float | None],
        on_stall: Callable[[str], None],
    ):
        self._config, self._account, self._typical_step_s, self._on_stall = config, account, typical_step_s, on_stall
        self._save_seconds: deque[float] = deque(maxlen=_NUM_RECENT)
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
            typical_s = self._typical_step_s()
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


@dataclass(frozen=True)
class Watched:
    """Something that has to move on."""

    sign: Callable[[], Hashable]
    """Returns another value whenever it has moved on; None: nothing is expected of it now."""
    is_late: Callable[[float], bool]
    """Returns True if it may not stand still for this many seconds."""
    on_late: Callable[[float], None]
    """Called once for each sign that is late, with the seconds."""


class StillnessWatch:
    """Looks at several things every half second, and calls back for those that stand still.

    Seconds count only while this thread runs. After the process was suspended (SIGSTOP, a laptop's lid), nothing is
    late that wasn't before, and everything has its whole time to move on.

    Args:
      watched: all that is looked at. More may be added, and removed, at any time.
    """

    def __init__(self, watched: Sequence[Watched]):
        self._watched = {id(each): each for each in watched}
        self.is_paused: Callable[[], bool] = lambda: False
        """While it returns True, seconds don't count."""
        self._lock = threading.Lock()
        # By thing: its sign, the time at which the sign was first seen, and whether `on_late` was called for it.
        self._since: dict[int, tuple[Hashable, float, bool]] = {}
        self._awake_s = 0.0
        self._last_look: float | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stillness", daemon=True)

    def add(self, watched: Watched) -> None:
        """Looks at one more."""
        with self._lock:
            self._watched[id(watched)] = watched

    def remove(self, watched: Watched) -> None:
        """Looks at it no longer."""
        with self._lock:
            del self._watched[id(watched)]
            self._since.pop(id(watched), None)

    def look(self, now: float) -> None:
        """Looks once.

        Args:
          now: seconds of a clock that never goes back.
        """
        if self._last_look is not None and not self.is_paused():
            self._awake_s += min(now - self._last_look, 2 * _LOOK_EVERY_S)
        self._last_look = now
        with self._lock:
            watched = list(self._watched.items())
        for key, each in watched:
            sign = each.sign()
            before, since, is_told = self._since.get(key, (None, 0.0, False))
            if sign is None or sign != before:
                self._since[key] = (sign, self._awake_s, False)
            elif not is_told and each.is_late(self._awake_s - since):
                self._since[key] = (sign, since, True)
                each.on_late(self._awake_s - since)

    @property
    def is_running(self) -> bool:
        """True while the thread looks."""
        return self._thread.is_alive()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_LOOK_EVERY_S):
            self.look(time.perf_counter())
