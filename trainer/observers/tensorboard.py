"""`tensorboard/`: shows what `metrics.jsonl` holds, and what compiling cost.

The cost of compiling is shown as scalars, `compile/<program>/…` at the step that waited, and as tables in the texts
`compile/programs` and `compile/recompile`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tensorboardX.proto import event_pb2

from trainer.compile.history import Recompile, report_scalars, reports_to_markdown
from trainer.compile.stages import CompileReport
from trainer.observers.event_file import EventLog, event_files, read_events, scalars, text
from trainer.observers.observer import MIXTURE, NOT_DRAWN, Evaluated, Event, LogEntry, LogWindow, Observer, Start
from trainer.terminal.console import Console

_OF_TRAINING = (
    "loss",
    "z_loss",
    "load_balance_loss",
    "router_z_loss",
    "grad_norm",
    "learning_rate",
    "num_targets",
    "num_skipped",
    "num_losses_recomputed",
)
_COMPILE = "compile/"


class TensorBoard(Observer):
    """Writes an attempt's event file.

    Args:
      folder: of the event files.
      console: warned when they can't be written.
    """

    def __init__(self, folder: Path, console: Console):
        self._folder, self._console = folder, console
        self._events: EventLog | None = None

    def observe(self, event: Event) -> None:
        match event:
            case Start():
                self._begin(event)
            case Recompile(step=step):
                now = time.time()
                table = text(f"{_COMPILE}recompile", event.to_markdown(), step, now)
                self._write([*_reports_to_events([event.report], step, now), table])
            case LogWindow():
                self.write(event.entries)
            case Evaluated():
                self.write([event.entry])

    def _begin(self, start: Start) -> None:
        compiled = _programs_to_events(start.reports, start.step)
        earlier = _earlier_compile_events(self._folder, start.step, but=compiled)
        self._events = EventLog(
            self._folder,
            lambda: itertools.chain(earlier, compiled, map(_to_event, start.entries)),
            self._console,
        )

    def write(self, entries: Iterable[LogEntry]) -> None:
        """Appends entries. The operating system then has them."""
        self._write(map(_to_event, entries))

    def close(self) -> None:
        if self._events is not None:
            self._events.close()

    def _write(self, events: Iterable[event_pb2.Event]) -> None:
        assert self._events is not None, "written before the start"
        self._events.write(events)


def _programs_to_events(reports: Sequence[CompileReport], step: int) -> list[event_pb2.Event]:
    now = time.time()
    table = text(f"{_COMPILE}programs", reports_to_markdown(reports), step, now)
    return [*_reports_to_events(reports, step, now), table] if reports else []


def _reports_to_events(reports: Sequence[CompileReport], step: int, at: float) -> list[event_pb2.Event]:
    tagged = [
        {f"{_COMPILE}{report.name}/{name}": value for name, value in report_scalars(report).items()}
        for report in reports
    ]
    return [scalars(values, step, at) for values in tagged]


def _earlier_compile_events(folder: Path, last_step: int, *, but: Sequence[event_pb2.Event]) -> list[event_pb2.Event]:
    """The compile events of earlier attempts up to a step, without the points that new ones replace."""
    replaced = {(value.tag, event.step) for event in but for value in event.summary.value}
    kept = []
    for path in event_files(folder)[-1:]:  # it holds what was kept of the files before it
        for event in read_events(path, _COMPILE):
            values = [value for value in event.summary.value if (value.tag, event.step) not in replaced]
            del event.summary.value[:]
            event.summary.value.extend(values)
            if values and event.step <= last_step:
                kept.append(event)
    return kept


def _to_event(entry: LogEntry) -> event_pb2.Event:
    values = {_tag(name): value for name, value in entry.items() if name not in NOT_DRAWN and value is not None}
    return scalars(values, int(entry["step"] or 0), entry.get("time") or time.time())


def _tag(name: str) -> str:
    """The tag of a value. TensorBoard groups charts by the part before the slash."""
    if name.startswith("validation_"):
        return name.replace("_", "/", 1)
    if name.startswith(MIXTURE):
        return name
    return f"{'train' if name in _OF_TRAINING else 'speed'}/{name}"
