"""Standard output and standard error that may go away without ending the program.

When a reader leaves (`| head -5`), a terminal closes or the disk behind `> log.txt` is full, a `print` raises. If the
text still waited in a buffer, the interpreter ends with status 120 although all went well. Training goes on without its
output. A command that exists only for its output ends when its reader leaves (`reader_may_leave`).

In both, text that the stream's encoding can't write is written with escapes, and messages hold no control characters:
`visible` replaces these, and does so in `Console`'s lines, too.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any, TextIO

# Unicode has a picture of each control character, and none of the second set, U+0080 to U+009F.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """The text with visible signs in the place of control characters, except line ends and tabs: no terminal obeys it.

    >>> visible("red: \\x1b[31m")
    'red: ␛[31m'
    """
    return text.translate(_PICTURES)


@contextlib.contextmanager
def outlive_readers() -> Iterator[None]:
    """Drops text that can't be written to standard output or error, inside and at the end of the process.

    Each write tries again, so a log file grows again once its disk has room.
    """
    streams = sys.stdout, sys.stderr
    # A process that is started without a stream (`>&-`) has None in its place, and the stream's descriptor is free. No
    # file may get that descriptor, since libraries print there.
    wrapped = [_Lasting(stream or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")) for stream in streams]
    sys.stdout, sys.stderr = wrapped  # type: ignore[assignment]
    try:
        with printable_streams():
            yield
    finally:
        for stream in wrapped:
            _leave_nothing(stream.rich_proxied_file)
        sys.stdout, sys.stderr = streams


@contextlib.contextmanager
def writable_in_any_encoding() -> Iterator[None]:
    """Has standard output and error write any text inside, with escapes for what their encoding can't write.

    A path whose bytes aren't UTF-8 can be written in none.
    """
    # A test's own stream, or a notebook's, may have another class.
    streams = [stream for stream in (sys.stdout, sys.stderr) if hasattr(stream, "reconfigure")]
    before = [stream.errors for stream in streams]
    try:
        for stream in streams:
            stream.reconfigure(errors="backslashreplace")
        yield
    finally:
        for stream, errors in zip(streams, before, strict=True):
            with contextlib.suppress(OSError, ValueError):  # it flushes, and may be closed
                stream.reconfigure(errors=errors)


@contextlib.contextmanager
def printable_streams() -> Iterator[None]:
    """For a command: writes in any encoding, and standard error has no control characters.

    A message may quote what somebody else wrote, such as a name with escape sequences. So may a traceback, which Python
    prints after the end of this.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_traceback
    with writable_in_any_encoding():
        before = sys.stderr
        if before is not None:
            sys.stderr = _Messages(before)  # type: ignore[assignment]
        try:
            yield
        finally:
            sys.stderr = before


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Ends the process quietly, with status 0, when the reader of its output leaves.

    Without this, Python would end in a traceback, or complain when it flushes the output at its end. A broken pipe
    other than the output is still an error, and an exit status other than 0 is kept.

    Raises:
      SystemExit: with status 0 when a write failed because the reader had left.
    """
    # Without those that the process was started without.
    streams = [stream for stream in (sys.__stdout__, sys.__stderr__) if stream is not None]
    ended: SystemExit | None = None
    try:
        try:
            with printable_streams():
                yield
        except SystemExit as exit_:
            ended = exit_
        for stream in streams:  # buffers may hold text that isn't written yet
            stream.flush()
    except BrokenPipeError:
        if not any(_reader_has_left(stream) for stream in streams):
            raise
        ended = ended or SystemExit(0)
    finally:
        for stream in streams:
            _leave_nothing(stream)
    if ended is not None:
        raise ended


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(visible("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


class _Wrapped:
    """A text stream around another one."""

    def __init__(self, stream: TextIO):
        self.rich_proxied_file = stream
        """Where rich writes, which has codes of its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)


class _Messages(_Wrapped):
    """A text stream for messages, whose control characters become visible signs."""

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(visible(text))
        return len(text)


class _Lasting(_Wrapped):
    """A text stream whose writes never raise `OSError`."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.rich_proxied_file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.rich_proxied_file.flush()


def _leave_nothing(stream: TextIO) -> None:
    """Leaves nothing in the buffer that the interpreter would fail to write when it ends."""
    try:
        stream.flush()
        is_gone = _reader_has_left(stream)
    except OSError:
        is_gone = True
    if is_gone:
        with contextlib.suppress(OSError):
            descriptor = stream.fileno()
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
            stream.flush()


def _reader_has_left(stream: TextIO) -> bool:
    """True if a stream writes to a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
