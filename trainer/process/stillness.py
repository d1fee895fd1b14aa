"""Notices what no longer moves on, from a thread of its own, even while the main thread is stuck inside XLA."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Watched:
    """Something that has to move on."""

    sign: Callable[[], Hashable]
    """Returns another value whenever it has moved on; None: nothing is expected of it now."""
    is_late: Callable[[float], bool]
    """Whether it may not stand still for so many seconds."""
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
        self._since: dict[int, tuple[Hashable, float, bool]] = {}  # the sign, when it was first seen, whether it's told
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
        """Whether the thread looks."""
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
