"""`metrics.jsonl`: the losses and speeds of a run, for programs.

Each step has one line, `{"step": 7, "loss": 3.2, …}`. The last step of a log window also has the window's speed. Each
evaluation has a line too, `{"step": 100, "validation_nats_per_token": 3.1, …}`; losses whose `validation_digest`
differs were measured on other sequences, or in another way. A value that isn't finite is null. In a run with phases
each line has its `phase`, from 1.
`recompile_s` stands only in the line of a step that waited for a program to be compiled again: the seconds that it
waited. `time` is when the line was logged, in Unix seconds.

An attempt cuts off what lies after the step that it resumes from. On a full disk lines wait in memory
(`trainer/files/log_file.py`): a process that is killed then loses them.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trainer.files.atomic import set_aside
from trainer.files.log_file import AppendedLog
from trainer.observers.observer import (
    VALIDATION_DIGEST,
    VALIDATION_LOSS,
    Evaluated,
    Event,
    LogEntry,
    LogWindow,
    Observer,
    Start,
)
from trainer.terminal.console import Console

# A longer line is no entry, which has a few hundred bytes.
_MAX_ENTRY_BYTES = 65_536


class LoggedEntries:
    """The entries of earlier attempts up to a step. Each iteration reads the file, so that no list is kept.

    The file is read once to begin with. If it has damaged lines, it is set aside as it is, with a warning, and read
    there. A last line that a kill cut short is no damage: its step is after the checkpoint, or that would not exist.

    Args:
      metrics: path of `metrics.jsonl`, which need not exist.
      last_step: of the entries; 0: none.
      console: warned.
    """

    def __init__(self, metrics: Path, last_step: int, console: Console):
        self._path, self._last_step, self._num_entries = metrics, last_step, 0
        self.evaluations: dict[int, LogEntry] = {}
        """The evaluations among them, by step."""
        num_unreadable = 0
        for entry, is_whole in _parse_lines(metrics) if last_step > 0 else ():
            num_unreadable += entry is None and is_whole
            if entry is not None and entry["step"] <= last_step:
                self._num_entries += 1
                if VALIDATION_LOSS in entry:
                    self.evaluations[entry["step"]] = entry
        if num_unreadable:
            self._path = set_aside(metrics)
            console.warning(
                f"{metrics}: {num_unreadable} unreadable lines are left out; {self._path.name} has them all"
            )

    def __iter__(self) -> Iterator[LogEntry]:
        # Counted, since this attempt may log another evaluation of the last step.
        logged = (entry for entry in read_entries(self._path) if entry["step"] <= self._last_step)
        return itertools.islice(logged, self._num_entries)


class MetricsFile(Observer):
    """Appends an entry for each step and each evaluation.

    Args:
      path: of `metrics.jsonl`.
      console: warned when it can't be written.
    """

    def __init__(self, path: Path, console: Console):
        self._path, self._console = path, console
        self._log: AppendedLog | None = None

    def observe(self, event: Event) -> None:
        match event:
            case Start(entries=entries):
                self._log = AppendedLog(self._path, self._console, lambda: map(_to_line, entries))
            case LogWindow():
                self._write(event.entries)
            case Evaluated():
                self._write([event.entry])

    def _write(self, entries: Iterable[LogEntry]) -> None:
        assert self._log is not None, "written before the start"
        self._log.append(*map(_to_line, entries))

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def last_logged(metrics: Path) -> tuple[int, float]:
    """The last step in `metrics.jsonl`, and the Unix time of its entry; zeros if there is none."""
    return max(((entry["step"], entry.get("time") or 0.0) for entry in read_entries(metrics)), default=(0, 0.0))


def read_entries(metrics: Path) -> Iterator[dict[str, Any]]:
    """The entries of `metrics.jsonl`, one at a time. Lines that are none are left out; there need be no file."""
    return (entry for entry, _ in _parse_lines(metrics) if entry is not None)


def _to_line(entry: LogEntry) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _parse_lines(metrics: Path) -> Iterator[tuple[dict[str, Any] | None, bool]]:
    """Yields (entry, whether the line is whole) for each line; the entry is None if the line is no entry.

    A line that is too long for an entry comes in pieces. Only the last piece is whole.
    """
    if not metrics.exists():
        return
    with metrics.open("rb") as file:
        while line := file.readline(_MAX_ENTRY_BYTES):
            yield _parse_entry(line), line.endswith(b"\n")


def _parse_entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):  # ValueError: not UTF-8, or not JSON
        return None
    if not isinstance(entry, dict) or type(entry.get("step")) is not int or not 0 <= entry["step"] < 2**31:
        return None
    return entry if all(_is_value(name, value) for name, value in entry.items()) else None


def _is_value(name: str, value: Any) -> bool:
    if name == VALIDATION_DIGEST:
        return isinstance(value, str)
    return value is None or (type(value) in (int, float) and abs(value) <= sys.float_info.max)
