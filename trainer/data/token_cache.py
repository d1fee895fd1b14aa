"""A cache on the disk of files that are derived from the corpus's files.

An entry is a folder named by a key. It is built beside its final place and renamed into it, so it is there
whole or not at all. Builders of one key wait for each other, across processes and, where the file system shares
locks, across hosts: of processes that start at once, the first builds. On a file system without locks each builds in
a folder of its own, and the first to end is used by all. A killed builder's leavings are cleared by the next one.

entry.json holds the length and the hash of each of an entry's files. They are checked each time that the entry is
opened: an entry that a disk or a person has damaged is built again. While an entry is in use, its entry.json has a
shared lock. The cache is held to its size by removing entries that nobody has locked, those unused for longest first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.files import OpenFile
from trainer.data.token_files import TokenFile, open_tokens
from trainer.errors import DataError

# Called with a line about work that takes long.
OnProgress = Callable[[str], None]

_ABOUT = "entry.json"
# What flock fails with on file systems that have no locks: NFS, others, and Lustre mounted without them.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_CHUNK_BYTES = 8 * 2**20
_MAX_HASH_THREADS = 8
# Checking more than this takes seconds, so a line tells of it.
_BYTES_WORTH_A_NOTE = 4 * 2**30


@dataclass(frozen=True)
class Entry:
    """A whole entry that was checked. No process removes it as long as this object lives.

    Args:
        folder: holds its files.
        about: what its builder returned.
        lock: its entry.json, open and locked.
    """

    folder: Path
    about: dict[str, Any]
    lock: OpenFile

    def open_tokens(self, name: str, dtype: np.dtype) -> TokenFile:
        """One of its files as tokens, which keep the entry in use.

        Raises:
            DataError: the file can't be read.
        """
        with self._reading(name) as path:
            file = OpenFile(path)
            return open_tokens(path, dtype, open_file=lambda _: file, owner=self)

    def load_array(self, name: str) -> np.ndarray:
        """One of its files, an array of NumPy's, in memory. Raises as `open_tokens` does."""
        with self._reading(name) as path:
            return np.load(path, allow_pickle=False)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[Path]:
        try:
            yield self.folder / name
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{self.folder / name} cannot be read: {error}; run again") from error


@dataclass(frozen=True)
class TokenCache:
    """A folder of entries.

    Args:
        directory: made when first needed; `~` is understood.
        max_bytes: the size that the entries are held to, by removing those that were last used longest ago whenever
            one is built. What is in use stays, whatever its size.
        on_progress: called with a line about entries that are damaged or removed, and about checks that take long.
    """

    directory: Path
    max_bytes: float = math.inf
    on_progress: OnProgress = lambda line: None

    def get_or_build(self, key: str, build: Callable[[Path], dict[str, Any]]) -> Entry:
        """The entry of a key, built first if it isn't there whole.

        Checking an entry reads all of it, and hashes it with SHA-256 in several threads. That takes far less time than
        making the tokens, but minutes for terabytes.

        Args:
            key: names the entry; must differ whenever the content would.
            build: writes the entry's files into the folder that it is given, and returns what is to be known about
                them, ready for JSON.

        Raises:
            DataError: the cache cannot be written; or whatever `build` raises, leaving no entry.
        """
        directory = self.directory.expanduser()
        folder = directory / key
        try:
            return self._open(folder)
        except FileNotFoundError:
            pass
        except _Damaged as damage:
            self.on_progress(f"{folder}: this entry of the token cache is damaged ({damage}); it is made again")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with _exclusive(directory / f"{key}.lock") as is_locked:
                with contextlib.suppress(FileNotFoundError, _Damaged):
                    return self._open(folder)  # Another process has built it while we waited.
                partial = directory / (f"{key}.partial" if is_locked else f"{key}.{uuid.uuid4().hex}.partial")
                _remove(partial)
                partial.mkdir()
                try:
                    about = build(partial)
                    files = {path.name: _measure(path) for path in partial.iterdir()}
                except BaseException:
                    with contextlib.suppress(OSError):
                        _remove(partial)
                    raise
                (partial / _ABOUT).write_text(json.dumps(_sealed({"about": about, "files": files})))
                _sync(*partial.iterdir(), partial)
                entry = self._publish(partial, folder)
            self._trim(directory)
        except (OSError, _Damaged) as error:
            raise DataError(
                f"the token cache {directory} cannot be written: {error}; "
                "free some space, or set data.token_cache_dir to a writable folder"
            ) from error
        return entry

    def _publish(self, partial: Path, folder: Path) -> Entry:
        """Moves what was built to its place, unless a builder that didn't wait for this one has been there first."""
        try:
            entry = self._open(folder)
        except (FileNotFoundError, _Damaged) as reason:
            if isinstance(reason, _Damaged):  # Otherwise nothing was there, and what is by now another builder made.
                _remove(folder)
            try:
                partial.rename(folder)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            _sync(folder.parent)
            entry = self._open(folder)
        _remove(partial)
        return entry

    def _open(self, folder: Path) -> Entry:
        if not os.path.lexists(folder):
            raise FileNotFoundError
        try:
            lock = OpenFile(folder / _ABOUT)
            with contextlib.suppress(OSError):  # Some network file systems have no locks; nothing is removed there.
                fcntl.flock(lock, fcntl.LOCK_SH)
            if lock.stat().st_ino != (folder / _ABOUT).stat().st_ino:
                return self._open(folder)  # While we waited it was removed, and made anew.
            about = _unsealed(_read(lock))
            num_bytes = sum(file["num_bytes"] for file in about["files"].values())
            if num_bytes > _BYTES_WORTH_A_NOTE:
                self.on_progress(f"checking {num_bytes / 1e9:,.1f} GB of {folder}")
            for name, expected in about["files"].items():
                if _measure(folder / name) != expected:
                    raise _Damaged(f"{name} is not what was written")
            with contextlib.suppress(OSError):  # Another user's, or a disk that can't be written.
                os.utime(lock.fileno())
        except OSError as error:
            if not os.path.lexists(folder):  # It was removed while we waited.
                raise FileNotFoundError from error
            raise _Damaged(error.strerror) from error
        return Entry(folder, about["about"], lock)

    def _trim(self, directory: Path) -> None:
        """Removes what nobody uses, the longest unused first, until the entries are within their size."""
        found = []
        for lock in directory.glob("*.lock"):  # Only what has a lock beside it is ours.
            folder = directory / lock.stem
            if not folder.is_dir():  # Leavings of a builder that was killed or failed.
                _remove_if_unused(folder, lock)
            else:
                found.append((_last_use(folder), _num_bytes(folder), folder, lock))
        total = sum(num_bytes for _, num_bytes, _, _ in found)
        for _, num_bytes, folder, lock in sorted(found):
            if total <= self.max_bytes:
                break
            if _remove_if_unused(folder, lock):
                total -= num_bytes
                self.on_progress(
                    f"removed {folder} from the token cache, unused for longest ({num_bytes / 1e9:,.2f} GB): "
                    f"the cache is held to {self.max_bytes / 2**30:g} GiB (data.token_cache_gib)"
                )


def cache_key(files: Sequence[Path], **settings: Any) -> str:
    """A key that changes with the files and with the settings that shape an entry.

    Files differ by path, size and time of modification, as `make` and `rsync` do, so that a corpus of
    any size opens at once. A file rewritten to the same size with its old time put back goes unnoticed.

    Raises:
        DataError: a file is gone, or can't be looked at.
    """
    stamps = []
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; put it back, or leave it out") from error
        stamps.append((str(path), status.st_size, status.st_mtime_ns))
    return hashlib.sha256(json.dumps([stamps, settings], sort_keys=True).encode()).hexdigest()[:32]


class _Damaged(Exception):
    """An entry is not what was written; says why."""


def _sealed(content: dict[str, Any]) -> dict[str, Any]:
    return content | {"sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def _unsealed(data: bytes) -> dict[str, Any]:
    """The content given to `_sealed`, if these are its bytes."""
    try:
        sealed = json.loads(data)
        content = {"about": sealed["about"], "files": sealed["files"]}
    except (ValueError, RecursionError, TypeError, KeyError):
        raise _Damaged(f"{_ABOUT} is not what was written") from None
    if _sealed(content) != sealed:
        raise _Damaged(f"{_ABOUT} is not what was written")
    return content


def _read(file: OpenFile) -> bytes:
    return file.read(file.stat().st_size, offset=0)


def _measure(path: Path) -> dict[str, Any]:
    """Length and hash of a file; the hash is that of its chunks' hashes, so that several threads can share the work."""
    file = OpenFile(path)
    num_bytes = file.stat().st_size

    def hash_chunk(start: int) -> bytes:
        return hashlib.sha256(file.read(_CHUNK_BYTES, offset=start)).digest()

    starts = range(0, num_bytes, _CHUNK_BYTES)
    with ThreadPoolExecutor(max(1, min(_MAX_HASH_THREADS, os.cpu_count() or 1, len(starts)))) as threads:
        whole = hashlib.sha256(b"".join(threads.map(hash_chunk, starts)))
    return {"num_bytes": num_bytes, "sha256": whole.hexdigest()}


@contextlib.contextmanager
def _exclusive(path: Path, flags: int = 0) -> Iterator[bool]:
    """Holds a file's lock. The file may be removed by whoever held it before, so it is then made anew.

    Where the file system has no locks, builders don't wait for each other, and get False. One that asks not to wait
    (LOCK_NB), to remove what nobody uses, can't know that and gets the OSError.
    """
    while True:
        descriptor, is_locked = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), True
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
            except OSError as error:
                if error.errno not in _NO_LOCKS or flags & fcntl.LOCK_NB:
                    raise
                is_locked = False
            if os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                yield is_locked
                return
        finally:
            os.close(descriptor)


def _remove_if_unused(folder: Path, lock: Path) -> bool:
    """Removes an entry, what is left of unfinished ones, and their lock, unless somebody builds or uses the entry."""
    partial = folder.with_name(f"{lock.stem}.partial")
    try:
        with _exclusive(lock, fcntl.LOCK_NB):
            _remove(partial)
            if (folder / _ABOUT).is_file():
                with _exclusive(folder / _ABOUT, fcntl.LOCK_NB):
                    folder.rename(partial)  # At once, so that nobody opens half an entry.
            _remove(partial)
            _remove(folder)
            lock.unlink()
    except OSError:  # In use, or another user's.
        return False
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _last_use(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return (folder / _ABOUT).stat().st_mtime
    return 0.0


def _num_bytes(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(path.lstat().st_size for path in folder.iterdir())
    return 0


def _sync(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
