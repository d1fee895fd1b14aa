"""The losses and speeds of a run: `metrics.jsonl` for programs, `tensorboard/` for eyes, with the same values.

metrics.jsonl has one line for each step, `{"step": 7, "loss": 3.2, …}`, the last of a log window with that window's
speed, and one for each evaluation, `{"step": 100, "validation_nats_per_token": 3.1, …}`. A value that isn't finite is
null. A step that waited for a program to be compiled again has those seconds as `recompile_s`, which no other has.
`time` is when the line was logged: Unix time in seconds, which TensorBoard shows as wall time.

TensorBoard also gets what compiling cost: scalars `compile/<program>/…` at the step that waited for it, and tables, as
text, `compile/programs` and `compile/recompile`.

metrics.jsonl is what counts. An attempt rewrites both logs up to the step that it goes on from, TensorBoard's from the
lines of metrics.jsonl; from then on a line is written first there. On a full disk both wait in memory
(`trainer/files/log_file.py`): a process that is killed then takes them along.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event

from trainer.compile.history import Recompile, report_scalars, reports_to_markdown
from trainer.compile.stages import CompileReport
from trainer.files.atomic import set_aside
from trainer.files.log_file import AppendedLog
from trainer.observers import tensorboard
from trainer.terminal.console import Console

VALIDATION_LOSS = "validation_nats_per_token"
# A row has a few hundred.
_MAX_ROW_BYTES = 65_536
_OF_TRAINING = ("loss", "z_loss", "grad_norm", "learning_rate", "num_targets")
_NO_VALUES = ("step", "time")
_COMPILE = "compile/"

Row = Mapping[str, float | None]


class MetricsLog:
    """Appends to both logs, first cutting off what lies after the step that the run goes on from.

    Args:
      metrics: path of `metrics.jsonl`.
      events: folder of TensorBoard's event files.
      restored_step: the last step that is kept; 0 empties the log.
      console: told when a log can't be written.
      reports: what was compiled ahead of this attempt's first step, for TensorBoard.
    """

    def __init__(
        self,
        metrics: Path,
        events: Path,
        restored_step: int,
        console: Console,
        reports: Sequence[CompileReport] = (),
    ):
        kept, num_unreadable = read_rows(metrics, restored_step)
        if num_unreadable:
            whole = set_aside(metrics, "damaged")
            console.warning(f"{metrics}: {num_unreadable} unreadable lines are left out; {whole.name} has them all")
        self.evaluations: dict[int, dict[str, Any]] = {
            row["step"]: {name: value for name, value in row.items() if name != "time"}
            for row in kept
            if VALIDATION_LOSS in row
        }
        """Rows of the evaluations, by step."""
        self._metrics = AppendedLog(metrics, b"".join(map(_to_line, kept)), console)
        compiled = _programs_to_events(reports, restored_step)
        earlier = _earlier_compile_events(events, restored_step, but=compiled)
        rows = (_to_event(row) for row in kept)
        self._events = tensorboard.EventLog(events, [*earlier, *compiled, *rows], console)

    def write(self, rows: Iterable[Row]) -> None:
        """Appends rows, each with its `step`; the operating system has them then, whatever becomes of this process."""
        logged = []
        for row in rows:
            finite = {name: value if value is None or math.isfinite(value) else None for name, value in row.items()}
            logged.append(finite | {"time": round(time.time(), 3)})
            if VALIDATION_LOSS in row:
                self.evaluations[int(row["step"] or 0)] = finite
        self._metrics.append(*map(_to_line, logged))
        self._events.write(map(_to_event, logged))

    def write_recompile(self, recompile: Recompile) -> None:
        """What compiling another time cost, and why it had to be, to TensorBoard."""
        markdown, step, now = recompile.to_markdown(), recompile.step, time.time()
        table = tensorboard.text(f"{_COMPILE}recompile", markdown, step, now)
        self._events.write([*_reports_to_events([recompile.report], step, now), table])

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


def last_logged_step(metrics: Path) -> int:
    """The last step in `metrics.jsonl`; 0 if there is none."""
    return max((row["step"] for row, _ in _parse_lines(metrics) if row is not None), default=0)


def _programs_to_events(reports: Sequence[CompileReport], step: int) -> list[Event]:
    now = time.time()
    table = tensorboard.text(f"{_COMPILE}programs", reports_to_markdown(reports), step, now)
    return [*_reports_to_events(reports, step, now), table] if reports else []


def _reports_to_events(reports: Sequence[CompileReport], step: int, at: float) -> list[Event]:
    tagged = [
        {f"{_COMPILE}{report.name}/{name}": value for name, value in report_scalars(report).items()}
        for report in reports
    ]
    return [tensorboard.scalars(values, step, at) for values in tagged]


def _earlier_compile_events(folder: Path, last_step: int, *, but: Sequence[Event]) -> list[Event]:
    """What earlier attempts compiled, up to a step, without the points in whose place there are new ones."""
    replaced = {(value.tag, event.step) for event in but for value in event.summary.value}
    kept = []
    for path in tensorboard.event_files(folder)[-1:]:  # it holds what was kept of those before
        for event in tensorboard.read_events(path, _COMPILE):
            values = [value for value in event.summary.value if (value.tag, event.step) not in replaced]
            del event.summary.value[:]
            event.summary.value.extend(values)
            if values and event.step <= last_step:
                kept.append(event)
    return kept


def _to_line(row: Row) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _to_event(row: Row) -> Event:
    values = {_tag(name): value for name, value in row.items() if name not in _NO_VALUES and value is not None}
    return tensorboard.scalars(values, int(row["step"] or 0), row.get("time") or time.time())


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


def _tag(name: str) -> str:
    """TensorBoard groups its charts by what stands before the slash."""
    if name.startswith("validation_"):
        return name.replace("_", "/", 1)
    return f"{'train' if name in _OF_TRAINING else 'speed'}/{name}"
