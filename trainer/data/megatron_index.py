"""The index beside a Megatron-LM `.bin`, which tells the type of its ids and where its documents begin.

The file (https://github.com/NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py) is little-endian: 9 bytes of
magic, version 1 as uint64, the type's code as uint8, the numbers of sequences and of document boundaries as uint64;
then int32 lengths of the sequences, their int64 offsets in the `.bin` in bytes, and the int64 boundaries, each the
number of sequences before a document.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from trainer.data.files import OpenFile
from trainer.errors import DataError

_MAGIC = b"MMIDIDX\0\0"
_OLD_MAGIC = b"TNTIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPE_OF_CODE = {code: np.dtype(name) for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8"), 1)}
_DTYPE_OF_CODE[8] = np.dtype("<u2")


def find_index(path: Path) -> Path | None:
    """The index of a `.bin`; None: there is none beside it.

    Raises:
        DataError: there is one of Megatron's old form.
    """
    index = path.with_suffix(".idx")
    try:
        magic = OpenFile(index).read(len(_MAGIC), offset=0)
    except OSError:
        return None
    if magic.startswith(_OLD_MAGIC):
        raise DataError(f"{index} is of Megatron's first form; expected MMIDIDX, so preprocess {path} again")
    return index if magic == _MAGIC else None


def read_dtype(index: Path) -> np.dtype:
    """The type of the ids.

    Raises:
        DataError: the index is damaged, or of another version.
    """
    return _read_header(index, _open(index))[0]


def read_boundaries(index: Path, num_tokens: int) -> Int64[np.ndarray, " D"]:
    """Where documents begin, in tokens; where the last ends, too.

    Args:
        index: the index.
        num_tokens: of its `.bin`.

    Raises:
        DataError: the index is damaged, or of other tokens.
    """
    file = _open(index)
    dtype, num_sequences, num_boundaries = _read_header(index, file)
    place = _HEADER.size
    lengths = _read_array(file, place, num_sequences, "<i4").astype(np.int64)
    place += 4 * num_sequences
    starts = np.concatenate([[0], np.cumsum(lengths)])
    if (lengths < 0).any() or (_read_array(file, place, num_sequences, "<i8") != starts[:-1] * dtype.itemsize).any():
        raise DataError(f"{index}: its sequences don't lie end to end; preprocess the text again")
    boundaries = _read_array(file, place + 8 * num_sequences, num_boundaries, "<i8")
    if (np.diff(boundaries, prepend=0, append=num_sequences) < 0).any():
        raise DataError(f"{index}: its documents aren't in order; preprocess the text again")
    if starts[-1] != num_tokens:
        raise DataError(
            f"{index} is of {starts[-1]:,} tokens, and the .bin beside it has {num_tokens:,}; "
            "one was cut short or is another's, so copy both again"
        )
    return starts[boundaries]


def _open(index: Path) -> OpenFile:
    try:
        return OpenFile(index)
    except OSError as error:
        raise DataError(f"{index} cannot be read: {error.strerror}; put it back, or leave its .bin out") from error


def _read_header(index: Path, file: OpenFile) -> tuple[np.dtype, int, int]:
    """The type of the ids, and the numbers of sequences and boundaries, to which the file's size is held."""
    size, head = file.stat().st_size, file.read(_HEADER.size, offset=0)
    if len(head) < _HEADER.size:
        raise DataError(f"{index}: {size} bytes end inside the header; copy it again")
    _, version, code, num_sequences, num_boundaries = _HEADER.unpack(head)
    if version != 1 or code not in _DTYPE_OF_CODE:
        raise DataError(
            f"{index}: version {version} and type {code}, expected version 1 and integers "
            f"({', '.join(map(str, _DTYPE_OF_CODE))}); preprocess the text again"
        )
    least = _HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if size not in (least, least + num_sequences):  # newer ones may end with a mode of each sequence
        raise DataError(
            f"{index}: {num_sequences:,} sequences and {num_boundaries:,} boundaries make {least:,} bytes, but it has "
            f"{size:,}; it was cut short or damaged, copy it again"
        )
    return _DTYPE_OF_CODE[code], num_sequences, num_boundaries


def _read_array(file: OpenFile, place: int, count: int, dtype: Any) -> np.ndarray:
    return np.frombuffer(file.read(count * np.dtype(dtype).itemsize, offset=place), dtype, count)
