"""A mask as an array of booleans."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field

import numpy as np

from kernels.masks.algebra import Mask
from kernels.masks.intervals import array_namespace


@dataclass(frozen=True, eq=False)
class NumpyMask(Mask):
    """A dense boolean array `[q_len, kv_len]`, indexed by positions: the baseline that the others avoid.

    A block plan reads every element of it. Positions outside the array are not allowed to attend. Two are equal if
    their arrays are.
    """

    array: np.ndarray = field(repr=False)

    def __post_init__(self):
        array = np.array(self.array, copy=True)
        if array.ndim != 2 or array.dtype != np.bool_ or 0 in array.shape:
            raise ValueError(
                "NumpyMask needs a 2-D boolean array [q_len, kv_len] with an element at least, got "
                f"{array.dtype} of shape {array.shape}"
            )
        array.setflags(write=False)
        object.__setattr__(self, "array", array)

    @functools.cached_property
    def _digest(self) -> bytes:
        return hashlib.sha256(repr(self.array.shape).encode() + np.packbits(self.array).tobytes()).digest()

    def __eq__(self, other):
        return isinstance(other, NumpyMask) and self._digest == other._digest

    def __hash__(self):
        return hash(self._digest)

    def __repr__(self):
        return f"NumpyMask(<{self.array.shape[0]}×{self.array.shape[1]}, sha256 {self._digest.hex()[:12]}>)"

    def __call__(self, q_pos, kv_pos):
        xp = array_namespace(q_pos, kv_pos)
        q_len, kv_len = self.array.shape
        inside = (q_pos >= 0) & (q_pos < q_len) & (kv_pos >= 0) & (kv_pos < kv_len)
        return inside & xp.asarray(self.array)[xp.clip(q_pos, 0, q_len - 1), xp.clip(kv_pos, 0, kv_len - 1)]

    @property
    def needs_lookup(self) -> bool:
        return True

    @property
    def largest_parameter(self) -> int:
        return max(1, *self.array.shape)

    def check_lengths(self, q_len: int, kv_len: int) -> None:
        if self.array.shape != (q_len, kv_len):
            raise ValueError(f"NumpyMask of shape {self.array.shape} doesn't cover q_len={q_len}, kv_len={kv_len}")
