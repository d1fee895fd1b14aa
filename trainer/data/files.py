"""Finds the files of globs, and reads files up to a size."""

from __future__ import annotations

import fnmatch
import glob
import os
import stat
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.errors import DataError

_READ_AT_ONCE = 2**20
_FILE_TYPES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


class OpenFile:
    """A file held open for reading by several threads. It is closed when its last user lets go of it.

    Args:
        path: the file.

    Raises:
        OSError: there is no such file, or it is a folder, a device or a pipe.
    """

    def __init__(self, path: Path):
        # Without O_NONBLOCK, opening a pipe waits for its other end.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        # Not `__del__`: at Python's end `os` may be gone already. The system closes the file then.
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        mode = self.stat().st_mode
        if not stat.S_ISREG(mode):
            raise OSError(0, f"it is {_file_type(mode)}, not a file")

    def fileno(self) -> int:
        return self._descriptor

    def stat(self) -> os.stat_result:
        return os.fstat(self._descriptor)

    def read(self, num_bytes: int, offset: int) -> bytes:
        """Reads bytes from a place in the file on; fewer only if the file ends there."""
        data = os.pread(self._descriptor, num_bytes, offset)
        while 0 < len(data) < num_bytes:  # One call reads at most 2 GiB, on a network disk perhaps less.
            more = os.pread(self._descriptor, num_bytes - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data


def printable(path: Path) -> str:
    """A path in a form that can be printed, whatever bytes its name has."""
    return str(path).encode(errors="backslashreplace").decode()


def read_at_most(path: Path, num_bytes: int) -> bytes | None:
    """The content of a file or pipe; None if it is longer than the limit.

    Args:
        path: what to read. Of a device that never ends only `num_bytes` are read.
        num_bytes: the most that is read.

    Raises:
        OSError: it can't be read.
    """
    content = bytearray()
    with path.open("rb") as file:
        # `file.read(num_bytes + 1)` would take that much memory for a small file.
        while len(content) <= num_bytes and (piece := file.read(min(_READ_AT_ONCE, num_bytes + 1 - len(content)))):
            content += piece
    return bytes(content) if len(content) <= num_bytes else None


def find_files(patterns: Sequence[str], *, field: str) -> tuple[Path, ...]:
    """Expands globs into non-empty files, sorted by path, each once.

    Args:
        patterns: globs; `**` and `~` are understood. The name of what is there means that, whatever characters it has.
        field: the config field that holds them, for error messages.

    Raises:
        DataError: a glob matches no file, or a file is empty or unreadable.
    """
    file_of_target: dict[str, Path] = {}  # Two names of one file count once.
    for pattern in patterns:
        others, any_file = [], False
        for path in sorted({Path(match).absolute() for match in _matches(pattern)}):
            try:
                mode = path.stat().st_mode
            except PermissionError as error:
                raise DataError(f"{path} cannot be read: permission denied; leave it out of {field}") from error
            except OSError:  # A link that leads nowhere or in a circle, or a file that was just removed.
                others.append(f"{path} is a link that leads nowhere")
                continue
            if stat.S_ISREG(mode):
                any_file = True
                file_of_target.setdefault(os.path.realpath(path), path)
            else:
                others.append(f"{path} is {_file_type(mode)}")
        if not any_file:
            raise DataError(
                f"{field}: {pattern!r} matches no file (looked from {os.getcwd()}"
                f"{f'; {others[0]}' if others else ''}); correct the path, and use `**/*` to reach into folders"
            )
    files = tuple(sorted(file_of_target.values()))
    for path in files:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; leave it out of {field}") from error
        if size == 0:
            raise DataError(f"{path} is empty (0 bytes); remove it or leave it out of {field}")
        if not os.access(path, os.R_OK):
            raise DataError(f"{path} cannot be read: permission denied; change its mode or leave it out of {field}")
    return files


def _matches(pattern: str) -> Iterator[str]:
    expanded = os.path.expanduser(pattern)
    return _expand("/" if expanded.startswith("/") else "", [part for part in expanded.split("/") if part])


def _expand(folder: str, parts: Sequence[str]) -> Iterator[str]:
    """The paths that the parts of a glob match in a folder; "" is the working folder.

    A part that is the name of what is there, brackets and all, means that: `a[1].txt` isn't `a1.txt`. `**` enters each
    folder once, even if it has several names. `glob` would follow links in circles, perhaps for ever.
    """
    if not parts:
        yield folder
        return
    part, rest = parts[0], parts[1:]
    if part == "**":
        entered = set()
        for inner, subfolders, _ in os.walk(folder or ".", followlinks=True):
            target = os.path.realpath(inner)
            if target in entered:
                subfolders.clear()
                continue
            entered.add(target)
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            yield from _expand(inner, rest or ["*"])
        return
    # A name of `*` and `?` alone matches itself, among others.
    is_name = os.path.lexists(os.path.join(folder, part)) and not fnmatch.fnmatchcase(part, part)
    for name in [part] if is_name else glob.iglob(part, root_dir=folder or None):
        yield from _expand(os.path.join(folder, name), rest)


def _file_type(mode: int) -> str:
    return _FILE_TYPES.get(stat.S_IFMT(mode), "something else")
