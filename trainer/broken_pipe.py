"""Commands whose reader may leave before they are done: `--help | head`."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Ends the process quietly, with status 0, when whoever reads its output has had enough.

    Python would end in a traceback, or complain when it flushes the output at its end. Another pipe that breaks is
    still an error, and an exit keeps its status.

    Raises:
      SystemExit: with status 0, when a write failed because the reader had left.
    """
    try:
        yield
        for stream in _streams():
            stream.flush()
    except BrokenPipeError:
        if not any(_reader_has_left(stream.fileno()) for stream in _streams()):
            raise
        raise SystemExit(0) from None
    finally:
        for stream in _streams():
            with contextlib.suppress(BrokenPipeError):
                stream.flush()
            if _reader_has_left(stream.fileno()):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _streams() -> list[TextIO]:
    """The process's standard output and error, those that weren't closed by whoever started it."""
    return [stream for stream in (sys.__stdout__, sys.__stderr__) if stream is not None]


def _reader_has_left(descriptor: int) -> bool:
    """Whether a descriptor is the writing end of a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
