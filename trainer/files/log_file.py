"""Log files whose writes may fail: on a full disk training goes on, and the lines wait in memory.

The console shows the first failure, with the file and the reason, and the first success after it.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from trainer.files.atomic import write_atomically
from trainer.terminal.console import Console
from trainer.terminal.units import format_bytes

# The most that waits for a disk with room: some 200,000 lines of metrics.
MAX_WAITING_BYTES = 64 * 1024 * 1024


class LogWrites:
    """Tries to write a file. It tells when that begins to fail and when it works again.

    Args:
      path: of the file, for the messages.
      console: warned.
    """

    def __init__(self, path: Path, console: Console):
        self._path, self._console = path, console
        self.failure: str | None = None
        """Why the last try failed; None if it didn't."""

    def attempt(self, write: Callable[[], None]) -> bool:
        """Calls a function that may raise `OSError`; returns whether it didn't."""
        before = self.failure
        try:
            write()
        except OSError as error:
            self.failure = error.strerror or str(error)
        else:
            self.failure = None
        # The warning comes last: the console may fail too, and everything must be in order then.
        if self.failure and not before:
            self._console.warning(
                f"{self._path} can't be written: {self.failure}; training goes on, and the next write tries again"
            )
        if before and not self.failure:
            self._console.note(f"{self._path} is written again")
        return self.failure is None


class AppendedLog:
    """A file that grows by whole entries. The operating system gets each entry at once.

    Entries that can't be written wait in memory, up to `MAX_WAITING_BYTES`, and are written in order as soon as that
    works. An entry that was written in part is cut off again.

    Args:
      path: the file; its folder is made if missing.
      content: called for what the file begins with, which replaces what it held. It is written whole or not at all; if
        not, the next `append` calls again.
      console: warned of failures.
      replaces: files that are removed once the content is on the disk.
    """

    def __init__(
        self, path: Path, content: Callable[[], Iterable[bytes]], console: Console, replaces: Sequence[Path] = ()
    ):
        self._path, self._console, self._replaces = path, console, tuple(replaces)
        self._content: Callable[[], Iterable[bytes]] | None = content
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._whole_length: int | None = None  # the length to cut the file to; None: it holds only whole entries
        self._has_dropped = False
        self._writes = LogWrites(path, console)
        self._writes.attempt(self._write)

    def append(self, *entries: bytes) -> None:
        """Writes entries, after those that still wait."""
        self._waiting.extend(entries)
        self._waiting_bytes += sum(map(len, entries))
        if self._writes.attempt(self._write):
            return
        while self._waiting_bytes > MAX_WAITING_BYTES:
            self._waiting_bytes -= len(self._waiting.popleft())
            if not self._has_dropped:
                self._has_dropped = True
                limit = format_bytes(MAX_WAITING_BYTES)
                self._console.warning(f"{self._path}: more than {limit} wait to be written; the oldest are lost")

    def close(self) -> None:
        """Tries a last time to write what waits; warns if it is lost."""
        if not self._writes.attempt(self._write):
            lost = f"its last {len(self._waiting)} entries" if self._content is None else "what this attempt logged"
            self._console.warning(f"{self._path} is left without {lost}: {self._writes.failure}")

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it under the run
        if self._content is not None:
            # TensorBoard reads every file with "tfevents" in its name, so the unfinished file has another name.
            write_atomically(self._path, self._content(), unfinished=self._path.with_name("unfinished.tmp"))
            self._content = None
            for path in self._replaces:
                with contextlib.suppress(OSError):  # the next attempt tries again
                    path.unlink()
        if not self._waiting:
            return
        try:
            # Opened anew each time, in case the file was moved away or its server was gone for a while.
            with self._path.open("ab", buffering=0) as file:
                self._cut(file.fileno())
                self._whole_length = os.fstat(file.fileno()).st_size
                rest = memoryview(b"".join(self._waiting))
                while rest:
                    rest = rest[file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError), self._path.open("ab", buffering=0) as file:
                self._cut(file.fileno())
            raise
        self._whole_length = None
        self._waiting.clear()
        self._waiting_bytes = 0

    def _cut(self, descriptor: int) -> None:
        """Removes an entry that was written in part."""
        if self._whole_length is not None:
            if os.fstat(descriptor).st_size > self._whole_length:
                os.ftruncate(descriptor, self._whole_length)
            self._whole_length = None
