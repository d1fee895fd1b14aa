"""`record.json`: what a run was, what it ran on, and what compiling and stepping cost.

`status` is "running", "completed", "failed" (with the reason in `message`) or "preempted" (by a stop signal). `step` is
the number of steps done. If an attempt ended without a word, by SIGKILL for example, the next attempt's `attempts` call
it "killed", with its last known step. `num_skipped_updates` counts the steps that changed nothing
(`trainer/step/skipping.py`). `init_from` tells what the parameters began as; None: they were random. `mixture` has the
tokens drawn from each source of a mixture.
`trainer/observers/goodput.py` says what `goodput` is, and `trainer/compile/history.py` what `compile` holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from trainer.compile.history import CompileHistory, Recompile
from trainer.files.atomic import set_aside, write_atomically
from trainer.files.log_file import LogWrites
from trainer.hardware import installed_versions, peak_resident_bytes
from trainer.observers.goodput import UsefulSteps, goodput, plausible_seconds
from trainer.observers.observer import Advanced, Ending, Event, LogEntry, LogWindow, Observer, Start
from trainer.observers.times import StepTimes, TimeAccount
from trainer.terminal.console import Console

SCHEMA_VERSION = 1
_UPDATE_EVERY_S = 10.0
_MAX_NUMBER, _MAX_DEPTH = 1e30, 20  # of what a record holds; a step of the largest models has 1e20 FLOPs
_DISTRIBUTIONS = ("flax-longcontext", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
# The fields of an attempt that the next one keeps in its list of attempts.
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


class RunRecord:
    """The run record. Every `update` leaves either the old or the new file on the disk.

    `attempts` keeps what earlier attempts recorded. `steps` is the last attempt's until this one has measured its own.
    If the record can't be written, the console is warned and a later `update` writes it.

    Args:
      path: of `record.json`; None: another process writes the run's, and this one is kept in memory.
      command: the command line.
      started: wall-clock time of the start, in seconds since the epoch.
      account: of this attempt's time.
      console: warned when the record can't be written, and of an earlier attempt that was killed.
      last_logged: the last step in the metrics log and its Unix time. A killed attempt's record may be older.
    """

    def __init__(
        self,
        path: Path | None,
        command: Sequence[str],
        started: float,
        account: TimeAccount,
        console: Console,
        last_logged: tuple[int, float] = (0, 0.0),
    ):
        self._path = path
        self._account = account
        self.useful_step_s: float | None = None
        """The useful seconds that `goodput` is measured by; None: unknown before the first step of this attempt."""
        self._lock = threading.Lock()  # a stop signal is recorded by another thread
        self._writes = None if path is None else LogWrites(path, console)
        previous = {} if path is None else _read_previous(path, console)
        attempts = list(previous.get("attempts", []))
        if previous:
            attempt = {name: previous[name] for name in _OF_AN_ATTEMPT if name in previous}
            if attempt.get("status") == "running":
                attempt |= _killed(attempt, *last_logged)
                console.warning(attempt["message"])
            attempts.append(attempt)
        self._fields: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "status": "running",
            "message": None,
            "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="milliseconds"),
            "updated": None,
            "command": list(command),
            "versions": {"python": platform.python_version(), **installed_versions(_DISTRIBUTIONS)},
            "resumed_from": None,
            "init_from": previous.get("init_from"),
            "config_changes": [],
            "step": previous.get("step", 0),
            "num_skipped_updates": previous.get("num_skipped_updates", 0),
            "steps": previous.get("steps"),
            "goodput": None,
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
            self._fields["updated"] = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._fields["time"] = self._account.to_json()
            if self.useful_step_s is not None:
                self._fields["goodput"] = goodput([*self._fields["attempts"], self._fields], self.useful_step_s)
            if self._path is not None and self._writes is not None:
                path, content = self._path, json.dumps(self._fields, indent=2) + "\n"
                self._writes.attempt(lambda: write_atomically(path, content))

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]


class RecordUpdates(Observer):
    """Keeps the record up to date while a run goes on.

    Args:
      record: the run's.
      history: of what it compiles.
      times: of its steps.
    """

    def __init__(self, record: RunRecord, history: CompileHistory, times: StepTimes):
        self._record, self._history, self._times = record, history, times
        self._useful = UsefulSteps()
        self._last_update = time.perf_counter()

    def observe(self, event: Event) -> None:
        match event:
            case Start():
                self._count(event.entries)
                self._record.update(compile=self._history.to_json())
            case Advanced():
                self._record.put(step=event.step)
            case Recompile():
                self._record.update(compile=self._history.to_json())
            case LogWindow():
                self._count(event.entries)
                self._record.put(num_skipped_updates=event.num_skipped)
                if event.mixture is not None:
                    self._record.put(mixture=event.mixture)
                # An update waits for the disk, so a run of fast steps can't afford one for every window.
                if time.perf_counter() - self._last_update > _UPDATE_EVERY_S:
                    self._record.update(compile=self._history.to_json(), steps=self._times.to_json())
                    self._last_update = time.perf_counter()
            case Ending():
                self._end(event)

    def _end(self, ending: Ending) -> None:
        evaluation: dict[str, Any] | None = None
        if ending.evaluation is not None:
            losses = {name: value for name, value in ending.evaluation.items() if name != "time"}
            evaluation = losses | {"unigram_nats_per_token": ending.unigram_nats_per_token}
        self._record.update(
            status=ending.status,
            compile=self._history.to_json(),
            memory=ending.memory,
            evaluation=evaluation,
            **({} if self._times.first_s is None else {"steps": self._times.to_json()}),
        )

    def _count(self, entries: Iterable[LogEntry]) -> None:
        for entry in entries:
            self._useful.add(entry)
        self._record.useful_step_s = self._useful.seconds


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
    """Peak bytes so far, of this process on the host and of one device; None if its runtime doesn't count them."""
    stats = device.memory_stats() or {}
    return {
        "host_peak_bytes": peak_resident_bytes(),
        "device_peak_bytes": stats.get("peak_bytes_in_use"),
    }


def read_record(path: Path) -> dict[str, Any]:
    """An earlier attempt's record.

    Raises:
      OSError: it can't be read.
      ValueError: it is none, or holds what no run writes.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(record, dict) or not _is_plain(record, _MAX_DEPTH):
        raise ValueError("it is no object of plain values")
    attempts = record.get("attempts", [])
    if not isinstance(attempts, list) or not all(isinstance(attempt, dict) for attempt in attempts):
        raise ValueError("its attempts are no list of objects")
    for name in ("step", "num_skipped_updates"):
        if type(record.get(name, 0)) is not int or not 0 <= record.get(name, 0) < 2**31:
            raise ValueError(f"its {name} is no count of steps")
    return record


def _is_plain(value: Any, depth: int) -> bool:
    """True if sums of the numbers in it stay finite, and it can be written again, deeper in another record."""
    if isinstance(value, dict | list):
        return depth > 0 and all(
            _is_plain(item, depth - 1) for item in (value.values() if type(value) is dict else value)
        )
    return not isinstance(value, int | float) or abs(value) <= _MAX_NUMBER  # NaN compares as False


def _read_previous(path: Path, console: Console) -> dict[str, Any]:
    """An earlier attempt's record. If it can't be read, it is set aside instead of overwritten."""
    if not path.exists():
        return {}
    try:
        return read_record(path)
    except (OSError, ValueError):
        with contextlib.suppress(OSError):  # then the record can't be written either, and the next write warns
            console.warning(f"{path} can't be read as a record; it is now {set_aside(path).name}")
        return {}


def _killed(attempt: Mapping[str, Any], last_logged_step: int, last_logged_at: float) -> dict[str, Any]:
    """The corrected fields of an attempt whose record still says that it is running."""
    step, time_account = attempt.get("step", 0), attempt.get("time")
    if "compile" in attempt:  # otherwise the log is still the attempt's before it
        step = max(step, last_logged_step)
        if isinstance(time_account, dict):
            time_account = _with_unrecorded(time_account, attempt.get("updated"), last_logged_at)
    message = f"the last attempt ended without a word at step {step} (killed, or out of memory?)"
    return {"status": "killed", "step": step, "message": message, "time": time_account}


def _with_unrecorded(time_account: dict[str, Any], updated: Any, ended: float) -> dict[str, Any]:
    """An account with the seconds after the record's last update, `unrecorded_s`."""
    try:
        unrecorded_s = plausible_seconds(ended - datetime.fromisoformat(updated).timestamp())
        return time_account | {"unrecorded_s": unrecorded_s, "total_s": time_account["total_s"] + unrecorded_s}
    except (KeyError, TypeError, ValueError, OverflowError):  # a record of somebody else's making
        return time_account
