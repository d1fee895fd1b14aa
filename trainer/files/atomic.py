"""Files that a kill or a power cut leaves whole: written under another name, synced, renamed."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, content: str | bytes | Iterable[bytes]) -> None:
    """Writes a file. A kill or a power cut at any moment leaves either the old content or the new.

    Args:
      path: the file.
      content: text is written as UTF-8, an iterable piece by piece.

    Raises:
      OSError: it can't be written; the file is as it was.
    """
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.unlink(missing_ok=True)
        with unfinished.open("xb") as file:  # doesn't follow a link
            if isinstance(content, str):
                content = content.encode()
            file.writelines((content,) if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # half a file would take up space
            unfinished.unlink()
        raise
    sync(path.parent)


def set_aside(path: Path) -> Path:
    """Renames what is damaged to `NAME.damaged`, or `NAME.damaged-2` and so on if that exists; returns the new path.

    Raises:
      OSError: the folder can't be written.
    """
    names = (path.with_name(f"{path.name}.damaged{number}") for number in ("", *(f"-{n}" for n in range(2, 10_000))))
    return path.replace(next(name for name in names if not os.path.lexists(name)))


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_full_disk(error: BaseException) -> bool:
    """True if something was not written because the disk, or a quota or limit on it, is full.

    Args:
      error: with its causes; libraries hide the system's number in the text of errors of their own.
    """
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    texts = tuple(map(os.strerror, numbers))
    each: BaseException | None = error
    while each is not None:
        if (isinstance(each, OSError) and each.errno in numbers) or any(text in str(each) for text in texts):
            return True
        each = each.__cause__ or each.__context__
    return False
