"""TensorBoard's event files, written without a queue or a thread: an event is in the file when `write` returns.

An attempt begins one new file with everything that its run has logged so far, and then removes the files of earlier
attempts. So TensorBoard shows the run without the traces of kills and resumptions. TensorBoard reads files in the order
of their names, which hold a number: the Unix time, as in TensorBoard's own files, or more where an earlier file's
number is not lower.

A file is a sequence of records: the length of an event, that length's checksum, the event, its checksum.
"""

from __future__ import annotations

import itertools
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import text as text_summary

from trainer.files.log_file import AppendedLog
from trainer.terminal.console import Console

_NUMBER = re.compile(r"tfevents\.(\d{10})(?!\d)")
_OURS = re.compile(r"events\.out\.tfevents\.\d{10}\.flax-longcontext")


class EventLog:
    """The event file of one attempt.

    Args:
      folder: of the event files. It is made if missing. Files that others put there are left alone.
      events: called for what the run has logged so far, with steps that grow for each tag.
      console: warned of failures.
    """

    def __init__(self, folder: Path, events: Callable[[], Iterable[Event]], console: Console):
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        newest = max((int(number) for name in names for number in _NUMBER.findall(name)), default=0)
        path = folder / f"events.out.tfevents.{max(int(time.time()), newest + 1):010d}.flax-longcontext"
        now = time.time()
        opening = (
            Event(wall_time=now, file_version="brain.Event:2"),
            # It makes a TensorBoard that is showing the run drop what it has read.
            Event(wall_time=now, session_log=SessionLog(status=SessionLog.START)),
        )
        self._file = AppendedLog(
            path,
            lambda: map(_to_record, itertools.chain(opening, events())),
            console,
            replaces=event_files(folder),
        )

    def write(self, events: Iterable[Event]) -> None:
        """Appends events. The operating system then has them."""
        self._file.append(*map(_to_record, events))

    def close(self) -> None:
        self._file.close()


def scalars(values: Mapping[str, float], step: int, at: float) -> Event:
    """Numbers by tag.

    Args:
      values: tag → number.
      step: their place on the horizontal axis.
      at: when they were measured, Unix time in seconds.
    """
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
    return Event(wall_time=at, step=step, summary=summary)


def text(tag: str, markdown: str, step: int, at: float) -> Event:
    """A text, which TensorBoard shows as Markdown."""
    return Event(wall_time=at, step=step, summary=text_summary(tag, markdown))


def event_files(folder: Path) -> list[Path]:
    """The files that this module has written into a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _OURS.fullmatch(path.name) and path.is_file())


def read_events(path: Path, tag_prefix: str) -> Iterator[Event]:
    """The events of a file that hold a tag with this prefix, up to the first that is damaged or cut short."""
    wanted, size = tag_prefix.encode(), path.stat().st_size
    with path.open("rb") as file:
        while len(header := file.read(12)) == 12:
            (length,) = struct.unpack_from("<Q", header)
            if length > size:
                return
            rest = file.read(length + 4)
            event = rest[:-4]
            if wanted in event:  # to check the others' checksums would take long
                if header + rest != _framed(event):
                    return
                yield Event.FromString(event)


def _to_record(event: Event) -> bytes:
    return _framed(event.SerializeToString())


def _framed(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return b"".join((length, _checksum(length), event, _checksum(event)))


def _checksum(content: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(content))
