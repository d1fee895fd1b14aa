"""Files that a kill or a power cut leaves whole: written beside their name, synced, renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, content: str | bytes | Iterable[bytes], *, unfinished: Path | None = None) -> None:
    """Writes a file so that a kill or a power cut at any moment leaves the old content or the new, never half of it.

    Args:
      path: the file.
      content: text is written as UTF-8, an iterable piece by piece.
      unfinished: where the content is collected first, in the same folder; by default beside the file, as `NAME.tmp`.

    Raises:
      OSError: it can't be written; the file is as it was.
    """
    unfinished = unfinished or path.with_name(f"{path.name}.tmp")
    try:
        if unfinished.is_dir() and not unfinished.is_symlink():
            set_aside(unfinished, "foreign")
        unfinished.unlink(missing_ok=True)
        with unfinished.open("xb") as file:  # a link that lies there isn't followed
            if isinstance(content, str):
                content = content.encode()
            file.writelines((content,) if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # half a file would keep the room that others need
            unfinished.unlink()
        raise
    sync(path.parent)


def set_aside(path: Path, suffix: str) -> Path:
    """Renames what lies at a path to `NAME.suffix`, or `NAME.suffix-2` and so on if there is one; returns the new path.

    Raises:
      OSError: the folder can't be written.
    """
    names = (path.with_name(f"{path.name}.{suffix}{number}") for number in ("", *(f"-{n}" for n in range(2, 10_000))))
    return path.replace(next(name for name in names if not os.path.lexists(name)))


def sync(path: Path) -> None:
    """Puts a file's content, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
