"""`metrics.jsonl`: the losses and speeds of a run, for programs.

It has one line for each step, `{"step": 7, "loss": 3.2, …}`, the last of a log window with that window's speed, and one
for each evaluation, `{"step": 100, "validation_nats_per_token": 3.1, …}`. A value that isn't finite is null. A step
that waited for a program to be compiled again has those seconds as `recompile_s`, which no other has. `time` is when
the line was logged: Unix time in seconds.

This file is what counts: an attempt cuts off what lies after the step that it goes on from, and TensorBoard's files are
made anew from the lines that remain. On a full disk lines wait in memory (`trainer/files/log_file.py`): a process that
is killed then takes them along.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trainer.files.atomic import set_aside
from trainer.files.log_file import AppendedLog
from trainer.observers.observer import Evaluated, LogWindow, Observer, Row, Start
from trainer.terminal.console import Console

# A row has a few hundred.
_MAX_ROW_BYTES = 65_536


class MetricsFile(Observer):
    """Appends the rows of steps and evaluations.

    Args:
      path: of `metrics.jsonl`.
      console: told when it can't be written.
    """

    def __init__(self, path: Path, console: Console):
        self._path, self._console = path, console
        self._log: AppendedLog | None = None

    def started(self, start: Start) -> None:
        self._log = AppendedLog(self._path, b"".join(map(_to_line, start.rows)), self._console)

    def window(self, window: LogWindow) -> None:
        self.write(window.rows)

    def evaluated(self, evaluated: Evaluated) -> None:
        self.write([evaluated.row])

    def write(self, rows: Iterable[Row]) -> None:
        """Appends rows; the operating system has them then, whatever becomes of this process."""
        assert self._log is not None, "written before the start"
        self._log.append(*map(_to_line, rows))

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def read_logged_rows(metrics: Path, last_step: int, console: Console) -> list[dict[str, Any]]:
    """What earlier attempts have logged up to a step. A file with damaged lines is set aside as it is, and that told.

    Args:
      metrics: path of `metrics.jsonl`.
      last_step: of the rows; 0: none.
      console: told.
    """
    rows, num_unreadable = read_rows(metrics, last_step)
    if num_unreadable:
        whole = set_aside(metrics, "damaged")
        console.warning(f"{metrics}: {num_unreadable} unreadable lines are left out; {whole.name} has them all")
    return rows


def last_logged_step(metrics: Path) -> int:
    """The last step in `metrics.jsonl`; 0 if there is none."""
    return max((row["step"] for row, _ in _parse_lines(metrics) if row is not None), default=0)


def _to_line(row: Row) -> bytes:
    return json.dumps(row).encode() + b"\n"


def read_rows(metrics: Path, last_step: int) -> tuple[list[dict[str, Any]], int]:
    """The rows of `metrics.jsonl` up to a step, none if there is no file, and how many lines are none.

    A last line that a kill cut short isn't counted: it is after that step, or the checkpoint would not exist.
    """
    if last_step == 0:
        return [], 0
    rows, num_unreadable = [], 0
    for row, is_whole in _parse_lines(metrics):
        if row is not None and row["step"] <= last_step:
            rows.append(row)
        num_unreadable += row is None and is_whole
    return rows, num_unreadable


def _parse_lines(metrics: Path) -> Iterator[tuple[dict[str, Any] | None, bool]]:
    """Of each line its row, None if it is none, and whether the line has its end; nothing if there is no file.

    What is too long for a row comes in pieces, of which the last one has the end.
    """
    if not metrics.exists():
        return
    with metrics.open("rb") as file:
        while line := file.readline(_MAX_ROW_BYTES):
            yield _parse_row(line), line.endswith(b"\n")


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # ValueError: not UTF-8, or not JSON
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 0:
        return None
    return row if all(value is None or _is_number(value) for value in row.values()) else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max
