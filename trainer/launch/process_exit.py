"""The statuses that `python -m trainer` ends with, and the end of a process that hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

COMPLETED = 0
FAILED = 1
MISTAKE = 2
"""In the command, the config or the data."""
PEER_LOST = 69
"""Another process of the run is gone (sysexits.h's EX_UNAVAILABLE): run the same command again."""
STALLED = 70
"""The watchdog ended a run that hung (EX_SOFTWARE): run the same command again."""
PREEMPTED = 75
"""Stopped by a signal (EX_TEMPFAIL): run the same command again."""
INTERRUPTED = 130
"""Stopped by a second Ctrl-C, without saving; what a shell reports for a process that Ctrl-C ended."""

# A disk or terminal that hangs must not keep the process: it may be what made it hang.
_LAST_WORDS_S = 10.0


def leave(status: int, *last_words: Callable[[], None]) -> NoReturn:
    """Ends the process at once, whatever its threads do.

    Args:
      status: the exit status.
      *last_words: called before, all at the same time, each in a thread of its own. They get ten seconds together.
    """
    try:
        threads = [threading.Thread(target=word, daemon=True) for word in last_words]
        done_by = time.monotonic() + _LAST_WORDS_S
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, done_by - time.monotonic()))
    finally:  # there may be no more threads to be had
        os._exit(status)


def write_stacks(path: Path) -> None:
    """Writes what every thread of this process is doing, if the file can be written."""
    with contextlib.suppress(OSError), path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def print_stacks(message: str) -> None:
    """Prints a message on standard error, and below it what every thread of this process is doing."""
    print(message, file=sys.stderr, flush=True)
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
