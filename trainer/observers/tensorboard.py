"""`tensorboard/`: shows what `metrics.jsonl` holds, and what compiling cost.

The cost of compiling is shown as scalars, `compile/<program>/…` at the step that waited, and what changed in the text
`compile/recompile`. In a run with phases `phase/sequence_length` shows where each begins.

Each attempt writes a file of its own, without a queue or a thread: the operating system has an event at once. The file
begins with TensorBoard's mark of a restart. It makes TensorBoard drop the steps of earlier files that this attempt
takes again. TensorBoard reads files in the order of their names, which hold a number: the Unix time, or more where an
earlier file's number is not lower.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tensorboardX.proto import event_pb2
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import text as text_summary

from trainer.compile.history import Recompile, report_scalars
from trainer.compile.stages import CompileReport
from trainer.files.log_file import AppendedLog
from trainer.observers.observer import (
    MIXTURE,
    PHASE_LENGTH,
    Evaluated,
    EvaluatedAtLength,
    Event,
    LogEntry,
    LogWindow,
    Observer,
    PhaseBegun,
    Start,
    curves_of,
)
from trainer.terminal.console import Console

_OF_TRAINING = (
    "loss",
    "z_loss",
    "load_balance_loss",
    "router_z_loss",
    "grad_norm",
    "learning_rate",
    "num_targets",
    "num_tokens",
    "num_skipped",
    "num_losses_recomputed",
    "window",
)
_NUMBER = re.compile(r"tfevents\.(\d{10})(?!\d)")


class TensorBoard(Observer):
    """Writes an attempt's event file.

    Args:
      folder: of the event files.
      console: warned when they can't be written.
      sequence_lengths: of each phase; empty: the run has none.
    """

    def __init__(self, folder: Path, console: Console, sequence_lengths: Sequence[int] = ()):
        self._folder, self._console, self._sequence_lengths = folder, console, sequence_lengths
        self._log: AppendedLog | None = None

    def observe(self, event: Event) -> None:
        match event:
            case Start(step=step, reports=reports):
                self._begin(first_step=step + 1 if step else 0)
                self._write(_to_events(reports, step))
            case PhaseBegun(step=step, reports=reports):
                self._write(_to_events(reports, step))
            case Recompile(step=step):
                self._write([*_to_events([event.report], step), _text("compile/recompile", str(event), step)])
            case LogWindow():
                self._write(map(self._to_event, event.entries))
            case Evaluated():
                self._write([self._to_event(event.entry)])

            case EvaluatedAtLength(step=step):
                images = [
                    _image(f"evaluation/{picture.stem}", picture.read_bytes(), step) for picture in event.pictures
                ]
                self._write([_scalars(event.values, step, time.time()), *images])

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _begin(self, first_step: int) -> None:
        names = os.listdir(self._folder) if self._folder.is_dir() else []
        newest = max((int(number) for name in names for number in _NUMBER.findall(name)), default=0)
        name = f"events.out.tfevents.{max(int(time.time()), newest + 1):010d}.flax-longcontext"
        self._log = AppendedLog(self._folder / name, self._console)
        restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(
            [
                event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"),
                event_pb2.Event(wall_time=time.time(), step=first_step, session_log=restart),
            ]
        )

    def _to_event(self, entry: LogEntry) -> event_pb2.Event:
        values = curves_of(entry, self._sequence_lengths)
        return _scalars({_tag(name): value for name, value in values.items()}, entry["step"], entry["time"])

    def _write(self, events: Iterable[event_pb2.Event]) -> None:
        assert self._log is not None, "written before the start"
        self._log.append(*map(_to_record, events))


def _to_record(event: event_pb2.Event) -> bytes:
    """A record of TensorBoard's files: the length of an event, the length's checksum, the event, its checksum."""
    body = event.SerializeToString()
    length = struct.pack("<Q", len(body))
    return length + struct.pack("<I", masked_crc32c(length)) + body + struct.pack("<I", masked_crc32c(body))


def _to_events(reports: Sequence[CompileReport], step: int) -> list[event_pb2.Event]:
    tagged = [
        {f"compile/{report.name}/{name}": value for name, value in report_scalars(report).items()} for report in reports
    ]
    return [_scalars(values, step, time.time()) for values in tagged]


def _scalars(values: Mapping[str, float], step: int, at: float) -> event_pb2.Event:
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
    return event_pb2.Event(wall_time=at, step=step, summary=summary)


def _text(tag: str, markdown: str, step: int) -> event_pb2.Event:
    return event_pb2.Event(wall_time=time.time(), step=step, summary=text_summary(tag, markdown))


def _image(tag: str, png: bytes, step: int) -> event_pb2.Event:
    width, height = struct.unpack(">II", png[16:24])  # of the first chunk, which describes the image
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
    return event_pb2.Event(
        wall_time=time.time(), step=step, summary=Summary(value=[Summary.Value(tag=tag, image=image)])
    )


def _tag(name: str) -> str:
    """The tag of a value. TensorBoard groups charts by the part before the slash."""
    if name == PHASE_LENGTH:
        return name
    if name.startswith("validation_"):
        return name.replace("_", "/", 1)
    if name.startswith(MIXTURE):
        return name
    return f"{'train' if name in _OF_TRAINING else 'speed'}/{name}"
