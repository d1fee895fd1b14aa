"""An array of a checkpoint, read a few rows at a time, so that it needn't fit in memory.

Orbax reads whole arrays alone. TensorStore, which it writes them with, reads slices.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
import tensorstore

from layers.pretrained.safetensors_file import Index


class UnreadableArray(Exception):
    """The checkpoint lacks an array, or a part of it can't be read."""


class StoredArray:
    """An array of a checkpoint; a `Tensor` of `layers.pretrained`.

    Chunks are compressed and can only be read whole. So a slice reads all rows of the chunks that it touches, and
    they are kept until the last one has been read: slices in ascending order read each chunk once.

    Args:
      state: the folder that Orbax wrote.
      name: of the array, the keys of its path with dots between them.

    Raises:
      UnreadableArray: there is none of this name.
    """

    def __init__(self, state: Path, name: str):
        self._name = name
        base = {"driver": "file", "path": f"{state.resolve()}/"}  # the driver takes no ..
        spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
        try:
            self._store = tensorstore.open(spec, open=True, read=True).result()
        except ValueError as error:
            raise UnreadableArray(f"it has no array {name}: {_brief(error)}") from error
        self.shape: tuple[int, ...] = self._store.shape
        self.dtype: np.dtype = self._store.dtype.numpy_dtype
        chunk: Any = self._store.chunk_layout.read_chunk.shape
        self._rows_of_chunk = chunk[0] if chunk else 0
        self._held: np.ndarray | None = None
        self._rows_held = slice(0, 0)

    def read(self, index: Index) -> np.ndarray:
        """Reads a slice.

        Args:
          index: for each dim a slice with a start and a stop.

        Raises:
          UnreadableArray: the file system, or what lies there, doesn't give it.
        """
        if not self.shape:
            return self._read_rows(...)
        rows, inner = index[0], index[1:]
        if self._held is None or not self._rows_held.start <= rows.start <= rows.stop <= self._rows_held.stop:
            self._held = None  # before the next rows come: both would be one block too many
            size = self._rows_of_chunk
            self._rows_held = slice(rows.start // size * size, min(math.ceil(rows.stop / size) * size, self.shape[0]))
            self._held = self._read_rows(self._rows_held)
        first = self._rows_held.start
        part = self._held[(slice(rows.start - first, rows.stop - first), *inner)]
        if rows.stop == self._rows_held.stop and tuple(part.stop for part in inner) == self.shape[1:]:
            self._held = None
        return part

    def _read_rows(self, rows: slice | EllipsisType) -> np.ndarray:
        try:
            return self._store[rows].read().result()
        except ValueError as error:
            raise UnreadableArray(f"its array {self._name} can't be read: {_brief(error)}") from error


def _brief(error: ValueError) -> str:
    # TensorStore's messages end with the whole specification.
    return str(error).partition(" [")[0]
