"""Goodput: the part of a run's time that made the steps which its state now consists of.

    goodput = useful step time ÷ time of all attempts

- Useful is the time of each step behind the current state, once: in the attempt whose update the state holds. It is the
  time of the log windows in `metrics.jsonl`, which an attempt cuts to the checkpoint that it resumes from, without the
  waits for data and the recompiles in them. Of a window with skipped updates, their share isn't useful.
- The time of an attempt is the wall-clock time from its process's start to its end. An attempt that was killed ended
  with the last that it recorded or logged.
- Lost is step time that isn't useful: steps that were made again after a restart, and those whose update was skipped.
- Down is the time between an attempt's end and the next one's start. It says more about the queue than about the run,
  so goodput leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from trainer.observers.observer import LogEntry

_MAX_SECONDS = 1e12
_PARTS = ("compile_s", "data_wait_s", "evaluation_s", "checkpoint_s")


class UsefulSteps:
    """Adds up the useful time of steps, from the entries of `metrics.jsonl` in order.

    >>> useful = UsefulSteps()
    >>> useful.add({"step": 1, "loss": 3.0, "num_skipped": 0})
    >>> useful.add({"step": 2, "loss": None, "num_skipped": 1, "step_s": 5.0, "data_wait_s": 2.0})
    >>> useful.seconds
    4.0
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._num_steps, self._num_skipped = 0, 0  # steps of the window, and updates skipped before it

    def add(self, entry: LogEntry) -> None:
        """Counts an entry. The last one of a window has its speed; entries of evaluations count as nothing."""
        if "loss" not in entry:
            return
        self._num_steps += 1
        if entry.get("step_s") is None:
            return
        seconds = self._num_steps * plausible_seconds(entry["step_s"]) - plausible_seconds(entry.get("data_wait_s"))
        num_skipped = entry.get("num_skipped") or 0
        share_skipped = min(max(0.0, (num_skipped - self._num_skipped) / self._num_steps), 1.0)
        self.seconds += seconds * (1 - share_skipped)
        self._num_steps, self._num_skipped = 0, num_skipped


def plausible_seconds(value: Any) -> float:
    """Seconds that a file holds; 0 in the place of what no run can have measured, in a file of somebody else's making.

    >>> plausible_seconds(2.5), plausible_seconds(-1), plausible_seconds("a"), plausible_seconds(1e300)
    (2.5, 0.0, 0.0, 0.0)
    """
    return float(value) if isinstance(value, int | float) and 0 <= value <= _MAX_SECONDS else 0.0


def goodput(attempts: Sequence[Mapping[str, Any]], useful_step_s: float) -> dict[str, float | int | None]:
    """The record's `goodput`: seconds whose parts, from `useful_step_s` to `other_s`, sum to `total_s`, and the rest.

    Args:
      attempts: the record's, with the current one as the last: `started`, and `time` as `TimeAccount.to_json` has it,
        in which `unrecorded_s` may follow.
      useful_step_s: from `UsefulSteps`.

    >>> time = {"step_s": 6.0, "compile_s": 2.0, "data_wait_s": 0.0, "evaluation_s": 0.0, "checkpoint_s": 1.0}
    >>> killed = {"started": "2026-01-01T00:00:00+00:00", "time": time | {"other_s": 0.5, "total_s": 9.5}}
    >>> current = {"started": "2026-01-01T00:01:00+00:00", "time": time | {"other_s": 1.5, "total_s": 10.5}}
    >>> account = goodput([killed, current], useful_step_s=8.0)
    >>> account["fraction"], account["lost_step_s"], account["compile_s"], account["downtime_s"]
    (0.4, 4.0, 4.0, 50.5)
    """
    total_s = sum(_seconds(attempt, "total_s") for attempt in attempts)
    step_s = sum(_seconds(attempt, "step_s") + _seconds(attempt, "unrecorded_s") for attempt in attempts)
    parts = {
        "useful_step_s": useful_step_s,
        "lost_step_s": max(0.0, step_s - useful_step_s),
        **{name: sum(_seconds(attempt, name) for attempt in attempts) for name in _PARTS},
    }
    return {
        "fraction": useful_step_s / total_s if total_s > 0 else None,
        **parts,
        "other_s": total_s - sum(parts.values()),
        "total_s": total_s,
        "downtime_s": sum(_downtime_s(*both) for both in pairwise(attempts)),
        "num_attempts": len(attempts),
    }


def _downtime_s(attempt: Mapping[str, Any], following: Mapping[str, Any]) -> float:
    try:
        begins = [datetime.fromisoformat(each["started"]) for each in (attempt, following)]
        return max(0.0, (begins[1] - begins[0]).total_seconds() - _seconds(attempt, "total_s"))
    except (KeyError, TypeError, ValueError, OverflowError):  # a record of somebody else's making
        return 0.0


def _seconds(attempt: Mapping[str, Any], name: str) -> float:
    time = attempt.get("time")
    return plausible_seconds(time.get(name)) if isinstance(time, dict) else 0.0
