"""Log files whose writes may fail: on a full disk training goes on, and the lines wait in memory.

The console shows the first failure, with the file and the reason, and the first success after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from trainer.files.atomic import write_atomically
from trainer.terminal.console import Console


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
        before, self.failure = self.failure, None
        try:
            write()
        except OSError as error:
            self.failure = error.strerror or str(error)
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

    Entries that can't be written wait in memory, and are written in order as soon as that works. An entry that was
    written in part is cut off again.

    Args:
      path: the file; its folder is made if missing.
      console: warned of failures.
      content: called for what the file begins with, which replaces what it held. It is written whole or not at all; if
        not, the next `append` calls again. None: the file begins with the first entry.
    """

    def __init__(self, path: Path, console: Console, content: Callable[[], Iterable[bytes]] | None = None):
        self._path, self._console, self._content = path, console, content
        self._waiting: list[bytes] = []
        self._writes = LogWrites(path, console)
        self._writes.attempt(self._write)

    def append(self, *entries: bytes) -> None:
        """Writes entries, after those that still wait."""
        self._waiting += entries
        self._writes.attempt(self._write)

    def close(self) -> None:
        """Tries a last time to write what waits; warns if it is lost."""
        if not self._writes.attempt(self._write):
            lost = f"its last {len(self._waiting)} entries" if self._content is None else "what this attempt logged"
            self._console.warning(f"{self._path} is left without {lost}: {self._writes.failure}")

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it under the run
        if self._content is not None:
            write_atomically(self._path, self._content())
            self._content = None
        if not self._waiting:
            return
        whole_length: int | None = None
        try:
            # Opened anew each time, in case the file was moved away or its server was gone for a while.
            with self._path.open("ab", buffering=0) as file:
                whole_length = os.fstat(file.fileno()).st_size
                rest = memoryview(b"".join(self._waiting))
                while rest:
                    rest = rest[file.write(rest) :]
        except OSError:
            if whole_length is not None:
                os.truncate(self._path, whole_length)  # an entry that was written in part goes
            raise
        self._waiting.clear()
