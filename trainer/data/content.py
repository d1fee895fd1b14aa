"""The content of files of text, read through gzip and Zstandard."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from trainer.data.files import OpenFile
from trainer.data.formats import HEAD_BYTES, find_format
from trainer.errors import DataError

_BUFFER_BYTES = 2**16
# Four bytes may stand for a block of 128 KiB, so these stand for 128 MiB at most.
_ZSTANDARD_BYTES_AT_ONCE = 2**12
_MAX_WINDOW_BYTES = 2**31  # what `zstd --long=31` needs


class _DamagedFrame(Exception):
    """A Zstandard file isn't what was written; says why."""


@contextlib.contextmanager
def open_content(path: Path) -> Iterator[io.BufferedReader]:
    """Opens a file of text, which may be compressed.

    Raises:
        DataError: it can't be opened or read, is damaged, is no text by its first bytes, or needs a package that isn't
            installed.
    """
    try:
        OpenFile(path)  # Refuses what need not end.
        with path.open("rb") as file:
            content = _decompressed(path, file)
            _refuse_other_formats(path, content.peek(HEAD_BYTES)[:HEAD_BYTES])
            yield content
    except (gzip.BadGzipFile, zlib.error, EOFError, _DamagedFrame) as error:
        raise DataError(f"{path} can't be decompressed: {error}; write or download it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the file, or leave it out") from error


def _decompressed(path: Path, file: io.BufferedReader) -> io.BufferedReader:
    kind = find_format(file.peek(HEAD_BYTES))
    match kind and kind.compression:
        case "gzip":
            return io.BufferedReader(gzip.GzipFile(fileobj=file), _BUFFER_BYTES)
        case "zstandard":
            return io.BufferedReader(_ZstandardFile(file, _import_zstandard(path)), _BUFFER_BYTES)
    return file


def _refuse_other_formats(path: Path, head: bytes) -> None:
    if (kind := find_format(head)) is not None:
        raise DataError(f"{path} is {kind.name}, not text; {kind.remedy}, or leave it out")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head[:4]:
        raise DataError(
            f"{path} begins as text in UTF-16 or UTF-32 does, expected UTF-8; convert the file "
            "(`iconv -f utf-16 -t utf-8`), or leave it out"
        )


class _ZstandardFile(io.RawIOBase):
    """The content of a file of Zstandard frames.

    `zstandard`'s own reader takes a file that was cut short for a whole one.
    """

    def __init__(self, file: BinaryIO, zstandard: Any):
        self._file, self._zstandard = file, zstandard
        self._frame: Any = None  # what decompresses the frame that has begun
        self._compressed, self._content = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content and (self._compressed or self._read_more()):
            self._decompress()
        given = self._content[: len(buffer)]
        buffer[: len(given)] = given
        self._content = self._content[len(given) :]
        return len(given)

    def _read_more(self) -> bool:
        self._compressed = self._file.read(_ZSTANDARD_BYTES_AT_ONCE)
        if not self._compressed and self._frame is not None:
            raise _DamagedFrame("it ends within a frame")
        return bool(self._compressed)

    def _decompress(self) -> None:
        self._frame = self._frame or self._zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
        try:
            self._content = memoryview(self._frame.decompress(self._compressed))
        except self._zstandard.ZstdError as error:
            raise _DamagedFrame(str(error)) from error
        self._compressed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None


def _import_zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise DataError(
            f"{path} is Zstandard-compressed, which needs zstandard, which is not installed; "
            'run `pip install -e ".[data]"` in the clone, or decompress it (`unzstd`)'
        ) from error
    return zstandard
