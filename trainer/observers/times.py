"""Where a run's time goes, and how fast its steps are."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal, get_args

Activity = Literal["compile", "data_wait", "step", "evaluation", "checkpoint"]
NUM_RECENT = 100
"""Spans of which the account keeps the seconds."""


class TimeAccount:
    """Accounts for the wall-clock time of a run. What isn't measured is `other`, so that the parts add up to the whole.

    Args:
      started: `time.perf_counter()` at the start.

    >>> account = TimeAccount(time.perf_counter())
    >>> with account.measure("compile"):
    ...     pass
    >>> list(account.to_json())
    ['compile_s', 'data_wait_s', 'step_s', 'evaluation_s', 'checkpoint_s', 'other_s', 'total_s']
    """

    def __init__(self, started: float):
        self._started = started
        self._seconds: dict[Activity, float] = dict.fromkeys(get_args(Activity), 0.0)
        self._recent = {activity: deque[float](maxlen=NUM_RECENT) for activity in self._seconds}
        self.under_way: tuple[Activity, float] | None = None
        """The activity being measured, and the `time.perf_counter()` of its begin. Any thread may read it."""

    @contextlib.contextmanager
    def measure(self, activity: Activity) -> Iterator[None]:
        """Counts the time inside as one activity's. Must not be nested; `move` corrects for what happens inside."""
        begun = time.perf_counter()
        self.under_way = (activity, begun)
        try:
            yield
        finally:
            self.under_way = None
            seconds = time.perf_counter() - begun
            self._seconds[activity] += seconds
            self._recent[activity].append(seconds)

    def move(self, seconds: float, source: Activity, target: Activity) -> None:
        """Moves seconds that were counted as one activity's to another."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def seconds(self, activity: Activity) -> float:
        return self._seconds[activity]

    def recent(self, activity: Activity) -> list[float]:
        """Seconds of the last spans of an activity, as they were measured. Any thread may ask."""
        return list(self._recent[activity])

    def total(self) -> float:
        return time.perf_counter() - self._started

    def to_json(self) -> dict[str, float]:
        total, measured = self.total(), dict(self._seconds)
        return {
            **{f"{activity}_s": seconds for activity, seconds in measured.items()},
            "other_s": total - sum(measured.values()),
            "total_s": total,
        }


class StepTimes:
    """Speed of the steps of an attempt, or of its newest phase, from windows that begin and end with an idle device.

    The first step is kept apart: it pays for what happens only once (buffers, autotuning).
    """

    def __init__(self) -> None:
        self.first_s: float | None = None
        self._windows: list[tuple[int, float, int, tuple[float, float] | None]] = []

    def add_window(self, num_steps: int, seconds: float, num_tokens: int, mfu: tuple[float, float] | None) -> None:
        """Counts a window.

        Args:
          num_steps: steps in it.
          seconds: from idle device to idle device.
          num_tokens: of documents, whatever their targets' weights; padding is none.
          mfu: causal and noncausal model FLOPs utilisation, as fractions; None: unknown.
        """
        if self.first_s is None:
            self.first_s = seconds / num_steps
        self._windows.append((num_steps, seconds, num_tokens, mfu))

    def begin_phase(self) -> None:
        """Forgets the steps so far: those of the next phase take another time."""
        self.first_s, self._windows = None, []

    def typical_step_s(self) -> float | None:
        """Median seconds of a step."""
        num_steps, step_s = self._by_rank()
        return (step_s((num_steps - 1) // 2) + step_s(num_steps // 2)) / 2 if num_steps else None

    def to_json(self) -> dict[str, float | int | None]:
        steady = self._steady()
        seconds = sum(window[1] for window in steady)
        num_steps, step_s = self._by_rank()
        return {
            "num_steps": sum(window[0] for window in self._windows),
            "first_s": self.first_s,
            "median_s": self.typical_step_s(),
            "p90_s": step_s(min(num_steps - 1, int(0.9 * num_steps))) if num_steps else None,
            "tokens_per_s": sum(window[2] for window in steady) / seconds if steady else None,
            "mfu_causal": self._mean_mfu(0),
            "mfu_noncausal": self._mean_mfu(1),
        }

    def _mean_mfu(self, which: int) -> float | None:
        known = [(seconds, mfu[which]) for _, seconds, _, mfu in self._steady() if mfu is not None]
        return (
            sum(seconds * value for seconds, value in known) / sum(seconds for seconds, _ in known) if known else None
        )

    def _steady(self) -> list[tuple[int, float, int, tuple[float, float] | None]]:
        return self._windows[1:] or self._windows

    def _by_rank(self) -> tuple[int, Callable[[int], float]]:
        """The number of steps, and a function from a rank (0 is the fastest) to the seconds of the step of that rank.

        A step counts with the mean of its window. No list of the steps is made: a long run has far more than windows.
        """
        fastest_first = sorted((seconds / num_steps, num_steps) for num_steps, seconds, *_ in self._steady())
        ends = list(itertools.accumulate(num_steps for _, num_steps in fastest_first))
        return ends[-1] if ends else 0, lambda rank: fastest_first[bisect.bisect_right(ends, rank)][0]
