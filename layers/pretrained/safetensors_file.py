"""Safetensors files: a header that is checked before it is believed, and slices read straight from the file.

The format: 8 bytes, little-endian, the header's length; the header, a JSON object of each tensor's dtype, shape and
byte range; then the tensors' bytes, one after another.

Source: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import jax.numpy as jnp
import numpy as np

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": jnp.dtype(jnp.bfloat16),
    "U8": np.dtype(np.uint8),
}
"""The element types of weights; U8 holds packed blocks of narrower ones."""

_HEADER_LIMIT = 100_000_000  # bytes, as in the reference implementation
_MAX_DIMS = 8
_CHUNK_BYTES = 1 << 22  # of a file that are read to be cut in memory
_RUN_BYTES = 1 << 16  # contiguous bytes of a row that are worth a read of their own

Index = tuple[slice, ...]
"""A slice of each dim, with a start and a stop and no step."""


@runtime_checkable
class Tensor(Protocol):
    """An array that is read by slices."""

    @property
    def dtype(self) -> np.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def read(self, index: Index) -> np.ndarray: ...


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a safetensors file.

    Args:
      file: the file, open.
      dtype, shape: as the header has them, checked against the number of bytes.
      offset: of its first byte in the file.
    """

    file: SafetensorsFile
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def read(self, index: Index) -> np.ndarray:
        """Reads a slice: no byte outside the tensor, and little more than the slice into memory.

        Raises:
          ValueError: the file has become shorter since it was opened.
        """
        out = np.empty([part.stop - part.start for part in index], self.dtype)
        if out.size:
            self._fill(out, self.offset, self.shape, index)
        return out

    def _fill(self, out: np.ndarray, offset: int, shape: tuple[int, ...], index: Index) -> None:
        if index[1:] == whole(shape[1:]):
            start = index[0].start if index else 0
            self.file.read_into(out, offset + start * self._num_bytes(shape[1:]))
            return
        row_bytes = self._num_bytes(shape[1:])
        is_run = index[2:] == whole(shape[2:])
        run_bytes = (index[1].stop - index[1].start) * self._num_bytes(shape[2:]) if is_run else 0
        if row_bytes > _CHUNK_BYTES or run_bytes >= _RUN_BYTES:
            for row in range(index[0].start, index[0].stop):
                self._fill(out[row - index[0].start], offset + row * row_bytes, shape[1:], index[1:])
            return
        # Narrow slices: whole rows are read, a few at a time, and cut in memory.
        rows_at_once = max(1, _CHUNK_BYTES // row_bytes)
        for first in range(index[0].start, index[0].stop, rows_at_once):
            num_rows = min(rows_at_once, index[0].stop - first)
            rows = np.empty((num_rows, *shape[1:]), self.dtype)
            self.file.read_into(rows, offset + first * row_bytes)
            position = first - index[0].start
            out[position : position + num_rows] = rows[(slice(None), *index[1:])]

    def _num_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * self.dtype.itemsize


class SafetensorsFile:
    """A safetensors file, open for reading; a context manager.

    Args:
      path: the file.

    Raises:
      ValueError: this is no regular file, or its header doesn't describe exactly the bytes that follow.

    Example:
      >>> from pathlib import Path
      >>> header = b'{"norm": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}'
      >>> data = np.arange(3, dtype=np.float32).tobytes()
      >>> num_bytes = Path("norm.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
      >>> with SafetensorsFile("norm.safetensors") as file:
      ...     file.tensors["norm"].read((slice(1, 3),))
      array([1., 2.], dtype=float32)
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        try:
            # Without O_NONBLOCK a named pipe would wait for its writer.
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(f"{self.path} can't be read: {error.strerror}") from error
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; its tensors can't be read any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read_into(self, out: np.ndarray, offset: int) -> None:
        """Fills a contiguous array with the bytes from `offset` on.

        Raises:
          ValueError: the file ends before that.
        """
        view = out.reshape(-1).view(np.uint8).data
        while view:
            num_read = os.preadv(self._descriptor, [view], offset)
            if num_read == 0:
                raise ValueError(f"{self.path} ends at byte {offset}, while it is being read; copy it again")
            view, offset = view[num_read:], offset + num_read

    def _read_header(self) -> dict[str, FileTensor]:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise self._broken("is not a regular file")
        if status.st_size < 8:
            raise self._broken(f"has {status.st_size} bytes, fewer than the 8 that hold the header's length")
        prefix = np.empty(1, "<u8")
        self.read_into(prefix, 0)
        length = int(prefix[0])
        if length > min(_HEADER_LIMIT, status.st_size - 8):
            raise self._broken(
                f"states a header of {length:,} bytes; the file has {status.st_size - 8:,} after that number, and a "
                f"header at most {_HEADER_LIMIT:,}"
            )
        text = np.empty(length, np.uint8)
        self.read_into(text, 8)
        try:
            header = json.loads(text.tobytes().decode("utf-8"), object_pairs_hook=_without_duplicates)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"has a header that isn't JSON: {error}") from None
        if not isinstance(header, dict):
            raise self._broken("has a header that isn't a JSON object")
        header.pop("__metadata__", None)
        tensors, ends = {}, []
        for name, entry in header.items():
            dtype, shape, start, stop = self._checked_entry(name, entry)
            tensors[name] = FileTensor(self, dtype, shape, 8 + length + start)
            ends.append((start, stop, name))
        self._check_layout(sorted(ends), status.st_size - 8 - length)
        return tensors

    def _checked_entry(self, name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
        if not isinstance(entry, dict) or sorted(entry) != ["data_offsets", "dtype", "shape"]:
            raise self._broken(f"describes {name!r:.200} as {entry!r:.200}; expected dtype, shape and data_offsets")
        dtype_name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
            raise self._broken(
                f"gives {name!r:.200} the dtype {dtype_name!r:.200}; expected one of {', '.join(DTYPES)}"
            )
        if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
            raise self._broken(f"gives {name!r:.200} the shape {shape!r:.200}; expected at most {_MAX_DIMS} sizes")
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise self._broken(f"gives {name!r:.200} the data_offsets {offsets!r:.200}; expected a start and an end")
        dtype, (start, stop) = DTYPES[dtype_name], offsets
        if stop - start != (num_bytes := math.prod(shape) * dtype.itemsize):
            raise self._broken(
                f"gives {name!r:.200} the bytes {start:,} to {stop:,}, but {dtype_name} of shape {shape} takes "
                f"{num_bytes:,}"
            )
        return dtype, tuple(shape), start, stop

    def _check_layout(self, ends: list[tuple[int, int, str]], num_bytes: int) -> None:
        position = 0
        for start, stop, name in ends:
            if start != position:
                what = "overlaps the tensor before it" if start < position else "leaves a gap before it"
                raise self._broken(
                    f"has {name!r:.200} at byte {start:,} of its data, which {what}; expected {position:,}"
                )
            position = stop
        if position != num_bytes:
            raise self._broken(f"has {num_bytes:,} bytes of data, but its header describes {position:,}")

    def _broken(self, what: str) -> ValueError:
        return ValueError(f"{self.path} {what}; the file is damaged or not safetensors: download it again")


def whole(shape: tuple[int, ...]) -> Index:
    """The index of a whole array.

    >>> whole((2, 3))
    (slice(0, 2, None), slice(0, 3, None))
    """
    return tuple(slice(0, size) for size in shape)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name appears twice")
    return found
