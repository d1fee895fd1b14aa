"""Small inputs of these tests: arrays read like tensors, slices, and the bytes of files."""

import json
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ArrayTensor:
    array: np.ndarray

    @property
    def dtype(self):
        return self.array.dtype

    @property
    def shape(self):
        return self.array.shape

    def read(self, index):
        return self.array[index].copy()


def random_index(rng, shape):
    bounds = (sorted(rng.integers(0, size + 1, 2)) for size in shape)
    return tuple(slice(int(start), int(stop)) for start, stop in bounds)


def file_bytes(header, data=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(start, stop, *, dtype="F32", shape=None):
    shape = [(stop - start) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
