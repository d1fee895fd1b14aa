"""For commands whose reader may leave early (`--help | head`), or whose output can't be written."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
from collections.abc import Iterator
from typing import TextIO

from trainer.process.standard_streams import printable_streams

_CANNOT_BE_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Ends the process quietly, with status 0, when the reader of its output leaves.

    Without this, Python would end in a traceback, or complain when it flushes the output at its end. A broken pipe
    other than the output is still an error, and an exit status other than 0 is kept. If the output can't be written for
    another reason (a full disk), the process ends with one message.

    Raises:
      SystemExit: with status 0 when a write failed because the reader had left, with 1 when it failed otherwise.
    """
    try:
        ended: SystemExit | None = None
        try:
            with printable_streams():
                yield
        except SystemExit as exit_:
            if exit_.code:
                raise
            ended = exit_
        for stream in _streams():  # buffers may hold text that isn't written yet
            stream.flush()
        if ended is not None:
            raise ended
    except BrokenPipeError:
        if not any(_reader_has_left(stream.fileno()) for stream in _streams()):
            raise
        raise SystemExit(0) from None
    except OSError as error:
        if error.errno not in _CANNOT_BE_WRITTEN:
            raise
        with contextlib.suppress(OSError):
            print(f"error: {error.filename or 'the output'} can't be written: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        for stream in _streams():
            if not _can_be_flushed(stream) or _reader_has_left(stream.fileno()):
                # The interpreter then flushes what is left in the buffer to nowhere.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _streams() -> list[TextIO]:
    """Standard output and standard error, unless the process was started without them."""
    return [stream for stream in (sys.__stdout__, sys.__stderr__) if stream is not None]


def _can_be_flushed(stream: TextIO) -> bool:
    try:
        stream.flush()
    except OSError:
        return False
    return True


def _reader_has_left(descriptor: int) -> bool:
    """Whether a descriptor is the writing end of a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
