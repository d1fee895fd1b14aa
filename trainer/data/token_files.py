"""Tokens in files. They are read when they are needed, and checked after every read.

A memory map would end the process without a word (SIGBUS) when a file shrinks, and would return whatever another
program writes into it. So each part is read separately, and then the file must still be the one that was opened.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.data.files import OpenFile
from trainer.errors import TrainingFailed

# A process may hold 1,024 files open by default, and a corpus may have more.
_MAX_OPEN_FILES = 128


def reopening_files() -> Callable[[Path], OpenFile]:
    """Opens files by path and holds the last used open: for the many files of one corpus."""
    return functools.lru_cache(maxsize=_MAX_OPEN_FILES)(OpenFile)


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids as a flat array of which slices can be taken, by several threads at once.

    Args:
        path: the file.
        dtype: of a token.
        offset: bytes before the first token.
        num_tokens: tokens from there on.
        stamp: what `stamp_of` says of the file that is meant.
        open_file: opens it, for each read.
        owner: lives as long as this does.
        largest_id: no token is larger; None: any may be there.
    """

    path: Path
    dtype: np.dtype
    offset: int
    num_tokens: int
    stamp: tuple[int, int, int]
    open_file: Callable[[Path], OpenFile]
    owner: object = None
    largest_id: int | None = None

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def __getitem__(self, part: slice) -> np.ndarray:
        """The tokens of a slice without step, checked.

        Raises:
            TrainingFailed: the file has changed since it was opened, or can't be read any more.
        """
        start, stop, _ = part.indices(self.num_tokens)
        tokens = self.read(start, max(start, stop))
        check_tokens([(self, tokens)])
        return tokens

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop), which `check_tokens` has to be asked about.

        Raises:
            TrainingFailed: the file has become shorter, or can't be read any more.
        """
        num_bytes = (stop - start) * self.dtype.itemsize
        try:
            data = self.open_file(self.path).read(num_bytes, self.offset + start * self.dtype.itemsize)
        except OSError as error:
            raise self._unreadable(error) from error
        if len(data) < num_bytes:
            self.check_unchanged()
            raise TrainingFailed(f"{self.path} ends before token {stop:,}; write it again")
        return np.frombuffer(data, self.dtype)

    def check_unchanged(self) -> None:
        """Raises `TrainingFailed` unless the file is still what was opened."""
        try:
            now = stamp_of(self.open_file(self.path).stat())
        except OSError as error:
            raise self._unreadable(error) from error
        if now != self.stamp:
            before, after = self.stamp[1], now[1]
            how = "written to" if before == after else f"{before:,} bytes before, {after:,} now"
            raise TrainingFailed(
                f"{self.path} was changed while this run was reading it ({how}); "
                "run the same command again, and leave the file alone until the run has ended"
            )

    def is_at_its_path(self) -> bool:
        """True if whoever opened the path now would find this file, unchanged."""
        try:
            return stamp_of(self.path.stat()) == self.stamp
        except OSError:
            return False

    def _unreadable(self, error: OSError) -> TrainingFailed:
        return TrainingFailed(
            f"{self.path} can't be read any more: {error.strerror}; put it back and run the same command again"
        )


def check_tokens(parts: Sequence[tuple[TokenFile, np.ndarray]]) -> None:
    """Checks what was read of some files. One check after all reads is cheaper than one after each.

    Args:
        parts: files, and tokens that were read of them.

    Raises:
        TrainingFailed: a file has changed since it was opened, or a token is larger than any in it.
    """
    checked = None
    for file, tokens in parts:
        if file is not checked:  # Often all parts are of one file.
            file.check_unchanged()
            checked = file
        # For a few hundred tokens the ufunc's own method takes less time than `max`.
        if file.largest_id is not None and len(tokens) and np.maximum.reduce(tokens) > file.largest_id:
            raise TrainingFailed(
                f"{file.path}: a token {int(tokens.max())} has appeared since the file was read through, when the "
                f"largest was {file.largest_id}; it or its disk is damaged, write it again"
            )


def open_tokens(
    path: Path, dtype: np.dtype, *, offset: int = 0, open_file: Callable[[Path], OpenFile], owner: object = None
) -> TokenFile:
    """All tokens from a place in a file to its end.

    Args:
        path: the file.
        dtype: of a token.
        offset: bytes before the first token.
        open_file: opens it, now and for each read.
        owner: what must live as long as the tokens.

    Raises:
        OSError: it can't be opened.
    """
    status = open_file(path).stat()
    return TokenFile(
        path, dtype, offset, (status.st_size - offset) // dtype.itemsize, stamp_of(status), open_file, owner
    )


def stamp_of(status: os.stat_result) -> tuple[int, int, int]:
    """The properties that change when a file is replaced or written to: its inode, size and time of the last change."""
    return status.st_ino, status.st_size, status.st_mtime_ns
