"""The kind of a file, by its first bytes: the one place that knows formats."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from typing import Literal

HEAD_BYTES = 4096
"""Bytes at a file's beginning that tell its format."""

# In UTF-16 most NULs are the upper bytes of ASCII characters, so that they lie at even offsets or at odd ones. Chinese
# text has few of them, in blanks and ends of lines. In UTF-32 the two upper bytes of nearly all characters are NULs.
_LEAST_SHARE_OF_NULS = 0.005
_LEAST_RATIO_OF_NULS = 4
_LEAST_SHARE_OF_UTF_32 = 0.9
_AS_TEXT = "write its text as UTF-8 or as JSON-lines"


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Args:
        name: says what such a file is, for messages.
        remedy: what to do with it.
        source: the `data.source` that reads it; None: none does.
        compression: how its content is compressed, if the sources of text read through that.
    """

    name: str
    remedy: str
    source: str | None = None
    compression: Literal["gzip", "zstandard"] | None = None


NUMPY = Format("a .npy file of NumPy's", "set data.source=bin if it holds token ids", source="bin")
_MEGATRON_INDEX = Format("the index of a Megatron .bin", "set data.source=bin and name the .bin beside it")

# No beginning could be text, and each has four bytes or more, so that raw uint16 ids seldom look like one: once in
# billions of files.
_FORMATS = tuple(
    (re.compile(beginning, re.DOTALL), kind)
    for beginning, kind in (
        (rb"\x1f\x8b\x08[\x00-\x1f]", Format("gzip-compressed", "decompress it (`gunzip`)", compression="gzip")),
        (
            rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",  # or a frame that a reader skips, as pzstd writes first
            Format("Zstandard-compressed", "decompress it (`unzstd`)", compression="zstandard"),
        ),
        (rb"\xfd7zXZ\x00", Format("xz-compressed", "decompress it (`unxz`)")),
        (rb"BZh[1-9]1AY&SY", Format("bzip2-compressed", "decompress it (`bunzip2`)")),
        (rb"\x04\x22\x4d\x18", Format("LZ4-compressed", "decompress it (`unlz4`)")),
        (rb"PAR1\x15", Format("a Parquet file", "set data.source=parquet", source="parquet")),
        (rb"\x93NUMPY", NUMPY),
        (rb"(MMIDIDX|TNTIDX)\x00\x00", _MEGATRON_INDEX),
        (rb"PK\x03\x04", Format("a ZIP archive (as .npz, .docx and .pt are)", "unpack it")),
        (rb".{257}ustar", Format("a tar archive", "unpack it")),
        (rb"ARROW1\x00\x00", Format("an Arrow file", "write it as Parquet")),
        (rb"\xff{4}.{2}\x00{2}[\x04-\x20]\x00{3}", Format("an Arrow stream", "write it as Parquet")),
        (rb"Obj\x01", Format("an Avro file", "write it as Parquet")),
        (rb"SQLite format 3\x00", Format("an SQLite database", _AS_TEXT)),
        (rb"\x89HDF\r\n\x1a\n", Format("an HDF5 file", _AS_TEXT)),
        (rb"%PDF-\d", Format("a PDF", _AS_TEXT)),
        (rb"\{\\rtf1", Format("an RTF document", _AS_TEXT)),
        (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", Format("a document of Microsoft Office", _AS_TEXT)),
        (rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a", Format("an image", "leave it out")),
        (rb"\x7fELF", Format("a program (ELF)", "leave it out")),
    )
)
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins with UTF-16's
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def find_format(head: bytes) -> Format | None:
    """The format of a file that begins with these bytes; None: it is text, or bytes of any other kind.

    Args:
        head: its first `HEAD_BYTES`, or all that it has.

    >>> find_format(b"PAR1\\x15\\x04").source, find_format(b"PAR1 is where a golfer wants to be")
    ('parquet', None)
    """
    return next((kind for beginning, kind in _FORMATS if beginning.match(head)), None)


def find_wide_encoding(data: bytes) -> str | None:
    """The encoding of text in units of two or four bytes, by its byte order mark or its NULs; None: it is none.

    Args:
        data: the text, or its beginning.

    >>> find_wide_encoding("text".encode("utf-16")), find_wide_encoding("text".encode("utf-16-be"))
    ('utf-16', 'utf-16be')
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return encoding
    nuls = [data[place::4].count(0) for place in range(4)]
    if sum(nuls) <= _LEAST_SHARE_OF_NULS * len(data):
        return None
    if min(nuls[2:]) > _LEAST_SHARE_OF_UTF_32 * len(data) / 4:
        return "utf-32le"
    if min(nuls[:2]) > _LEAST_SHARE_OF_UTF_32 * len(data) / 4:
        return "utf-32be"
    even, odd = nuls[0] + nuls[2], nuls[1] + nuls[3]
    if max(even, odd) < _LEAST_RATIO_OF_NULS * min(even, odd):  # 一 is U+4E00; the first character is often ASCII
        even, odd = data[:2].count(0, 0, 1), data[:2].count(0, 1)
    return None if even == odd else "utf-16be" if even > odd else "utf-16le"
