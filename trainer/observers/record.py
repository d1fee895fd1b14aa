"""`record.json`: what a run was, what it ran on, and what it cost to compile and to step.

`status` is "running", "completed", "failed" (with the reason in `message`) or "preempted" (by a stop signal). `step` is
the number of steps done. An attempt that ended without a word, by SIGKILL for example, is called "killed" in the next
attempt's `attempts`, with the last step that is known of it. `trainer/compile/history.py` says what `compile` holds.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import jax

from trainer.files.atomic import set_aside, write_atomically
from trainer.files.log_file import LogWrites
from trainer.process.resident_memory import peak_resident_bytes
from trainer.process.versions import installed_versions
from trainer.terminal.console import Console

SCHEMA_VERSION = 1
Activity = Literal["compile", "data_wait", "step", "evaluation", "checkpoint"]
_DISTRIBUTIONS = ("flax-longcontext", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
# What an attempt leaves behind in the next one's list of attempts.
_OF_AN_ATTEMPT = (
    "status",
    "message",
    "started",
    "updated",
    "command",
    "resumed_from",
    "step",
    "compile",
    "steps",
    "time",
)


class TimeAccount:
    """Where the wall-clock time of a run went; whatever isn't measured is `other`, so that the parts sum to the whole.

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
        self._seconds: dict[Activity, float] = dict.fromkeys(
            ("compile", "data_wait", "step", "evaluation", "checkpoint"), 0.0
        )

    @contextlib.contextmanager
    def measure(self, activity: Activity) -> Iterator[None]:
        """Counts the time inside as one activity's; not to be nested, but see `move`."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[activity] += time.perf_counter() - begun

    def move(self, seconds: float, source: Activity, target: Activity) -> None:
        """Counts as another's what went on inside an activity."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def seconds(self, activity: Activity) -> float:
        return self._seconds[activity]

    def total(self) -> float:
        return time.perf_counter() - self._started

    def to_json(self) -> dict[str, float]:
        total, measured = self.total(), dict(self._seconds)
        return {
            **{f"{activity}_s": seconds for activity, seconds in measured.items()},
            "other_s": total - sum(measured.values()),
            "total_s": total,
        }


class RunRecord:
    """The run record, kept whole on disk: every `update` leaves the old file or the new one.

    A run that is resumed keeps what its earlier attempts recorded, under `attempts`. `steps` stays the last attempt's
    until this one has measured its own. A record that can't be written is told, and written by a later `update`.

    Args:
      path: of `record.json`.
      command: the command line.
      started: wall-clock time of the start, in seconds since the epoch.
      account: of this attempt's time.
      console: told when the record can't be written, and of an earlier attempt that was killed.
      last_logged_step: the last in the metrics log. The record of a killed attempt may be older.
    """

    def __init__(
        self,
        path: Path,
        command: Sequence[str],
        started: float,
        account: TimeAccount,
        console: Console,
        last_logged_step: int = 0,
    ):
        self._path = path
        self._account = account
        self._lock = threading.Lock()  # a stop signal is recorded from a thread of its own
        self._writes = LogWrites(path, console)
        previous = _read_previous(path, console)
        attempts = list(previous.get("attempts", []))
        if previous:
            attempt = {name: previous[name] for name in _OF_AN_ATTEMPT if name in previous}
            if attempt.get("status") == "running":
                attempt |= _killed(attempt, last_logged_step)
                console.warning(attempt["message"])
            attempts.append(attempt)
        self._fields: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "status": "running",
            "message": None,
            "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
            "updated": None,
            "command": list(command),
            "versions": {"python": platform.python_version(), **installed_versions(_DISTRIBUTIONS)},
            "resumed_from": None,
            "config_changes": [],
            "step": previous.get("step", 0),
            "steps": previous.get("steps"),
            "attempts": attempts,
        }
        self.update()

    def put(self, **fields: Any) -> None:
        """Sets top-level fields, for the next `update` to write."""
        with self._lock:
            self._fields |= fields

    def update(self, **fields: Any) -> None:
        """Sets top-level fields and writes the file."""
        with self._lock:
            self._fields |= fields
            self._fields["updated"] = datetime.now(UTC).isoformat(timespec="seconds")
            self._fields["time"] = self._account.to_json()
            content = json.dumps(self._fields, indent=2) + "\n"
            self._writes.attempt(lambda: write_atomically(self._path, content))

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]


class StepTimes:
    """Speed of the steps of one attempt, from windows that begin and end with an idle device.

    The first step stands alone: it pays for what happens only once (buffers, autotuning).
    """

    def __init__(self) -> None:
        self.first_s: float | None = None
        self._windows: list[tuple[int, float, int, float, float]] = []

    def add_window(self, num_steps: int, seconds: float, num_tokens: int, mfu: tuple[float, float]) -> None:
        """Counts a window.

        Args:
          num_steps: steps in it.
          seconds: from idle device to idle device.
          num_tokens: positions processed, padding among them.
          mfu: causal and noncausal model FLOPs utilisation, as fractions.
        """
        if self.first_s is None:
            self.first_s = seconds / num_steps
        self._windows.append((num_steps, seconds, num_tokens, *mfu))

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
            "mfu_causal": sum(window[3] * window[1] for window in steady) / seconds if steady else None,
            "mfu_noncausal": sum(window[4] * window[1] for window in steady) / seconds if steady else None,
        }

    def _steady(self) -> list[tuple[int, float, int, float, float]]:
        return self._windows[1:] or self._windows

    def _by_rank(self) -> tuple[int, Callable[[int], float]]:
        """The number of steps, and the seconds of the step of a rank, 0 for the fastest; each took its window's mean.

        No list of the steps is made: a long run has far more of them than windows.
        """
        fastest_first = sorted((seconds / num_steps, num_steps) for num_steps, seconds, *_ in self._steady())
        ends = list(itertools.accumulate(num_steps for _, num_steps in fastest_first))
        return ends[-1] if ends else 0, lambda rank: fastest_first[bisect.bisect_right(ends, rank)][0]


def describe_devices(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """The accelerator and the host, for the record."""
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "processes": jax.process_count(),
        "host_cpus": os.cpu_count(),
    }


def measured_memory(device: jax.Device) -> dict[str, int | None]:
    """Peak bytes so far: of this process on the host, and on one device where its runtime counts them."""
    stats = device.memory_stats() or {}
    return {
        "host_peak_bytes": peak_resident_bytes(),
        "device_peak_bytes": stats.get("peak_bytes_in_use"),
    }


def _read_previous(path: Path, console: Console) -> dict[str, Any]:
    """An earlier attempt's record. One that can't be read is set aside, not overwritten."""
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        attempts = record.get("attempts", [])
        if not isinstance(attempts, list) or not all(isinstance(attempt, dict) for attempt in attempts):
            raise ValueError("its attempts are no list of objects")
        if type(record.get("step", 0)) is not int:
            raise ValueError("its step is no integer")
        return record
    except (OSError, ValueError, AttributeError, RecursionError):  # AttributeError: JSON, but no object
        with contextlib.suppress(OSError):  # what can't be renamed is told when the record can't be written
            console.warning(f"{path} can't be read as a record; it is now {set_aside(path, 'damaged').name}")
        return {}


def _killed(attempt: Mapping[str, Any], last_logged_step: int) -> dict[str, Any]:
    """What is to be said of an attempt whose record still says that it runs."""
    step = attempt.get("step", 0)
    if "compile" in attempt:  # else the log is still that of the attempt before it
        step = max(step, last_logged_step)
    message = f"the last attempt ended without a word at step {step} (killed, or out of memory?)"
    return {"status": "killed", "step": step, "message": message}
