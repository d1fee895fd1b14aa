"""The kind of a file, by its first bytes: the one place that knows formats."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

HEAD_BYTES = 4096
"""Bytes at a file's beginning that tell its format."""


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
_MEGATRON_INDEX = Format("the index of a Megatron .bin", "write the documents of its .bin as JSON-lines or .npy")

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
    )
)


def find_format(head: bytes) -> Format | None:
    """The format of a file that begins with these bytes; None: it is text, or bytes of any other kind.

    Args:
        head: its first `HEAD_BYTES`, or all that it has.

    >>> find_format(b"PAR1\\x15\\x04").source, find_format(b"PAR1 is where a golfer wants to be")
    ('parquet', None)
    """
    return next((kind for beginning, kind in _FORMATS if beginning.match(head)), None)
