"""Masks with a closed form: full, causal, local, chunked, prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.masks.algebra import Mask
from kernels.masks.intervals import Band, at_most, chunk_start


def _require_int(owner: Mask, name: str, *, minimum: int | None = None, optional: bool = False) -> None:
    value = getattr(owner, name)
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        kind = "an integer or None" if optional else "an integer"
        raise ValueError(f"{type(owner).__name__}.{name} must be {kind}, got {value!r}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{type(owner).__name__}.{name}={value} must be at least {minimum}")
    object.__setattr__(owner, name, int(value))


_UNSAID: Any = ...


@dataclass(frozen=True)
class FullMask(Mask):
    """Every pair is allowed."""

    def __call__(self, q_pos, kv_pos):
        return (q_pos == q_pos) & (kv_pos == kv_pos)

    @property
    def band(self) -> Band:
        return Band()


@dataclass(frozen=True)
class CausalMask(Mask):
    """Allows kv ≤ q + offset."""

    offset: int = 0

    def __post_init__(self):
        _require_int(self, "offset")

    def __call__(self, q_pos, kv_pos):
        right = self.band.right
        return FullMask()(q_pos, kv_pos) if right is None else at_most(kv_pos, q_pos, right)

    @property
    def band(self) -> Band:
        return Band(right=self.offset)


@dataclass(frozen=True)
class LocalMask(Mask):
    """Allows −left ≤ kv − q ≤ right; None leaves that side unbounded.

    A causal window over the last W tokens, the token itself among them, is `LocalMask(W - 1, 0)`.
    """

    left: int | None = _UNSAID
    right: int | None = _UNSAID

    def __post_init__(self):
        for width in (self.left, self.right):
            if width is _UNSAID or isinstance(width, tuple | list):
                raise ValueError(
                    "LocalMask needs left and right, two numbers: a causal window over W tokens is "
                    "LocalMask(W - 1, 0), one of W tokens on both sides LocalMask(W, W)"
                )
        _require_int(self, "left", optional=True)
        _require_int(self, "right", optional=True)

    def __call__(self, q_pos, kv_pos):
        allowed, band = FullMask()(q_pos, kv_pos), self.band
        if band.left is not None:
            allowed = allowed & at_most(q_pos, kv_pos, band.left)
        if band.right is not None:
            allowed = allowed & at_most(kv_pos, q_pos, band.right)
        return allowed

    @property
    def band(self) -> Band:
        return Band(left=self.left, right=self.right)


@dataclass(frozen=True)
class ChunkedCausalMask(Mask):
    """Allows kv ≤ q within one chunk of `chunk_size` positions (Llama 4's local attention)."""

    chunk_size: int

    def __post_init__(self):
        _require_int(self, "chunk_size", minimum=1)

    def __call__(self, q_pos, kv_pos):
        allowed = kv_pos <= q_pos
        for size in self.band.chunk_sizes:
            allowed = allowed & (kv_pos >= chunk_start(q_pos, size))
        return allowed

    @property
    def band(self) -> Band:
        return Band(right=0, chunk_sizes=(self.chunk_size,))


@dataclass(frozen=True)
class PrefixMask(Mask):
    """Allows kv < length. A prefix language model is `CausalMask() | PrefixMask(length)`."""

    length: int

    def __post_init__(self):
        _require_int(self, "length", minimum=0)

    def __call__(self, q_pos, kv_pos):
        stop = self.band.kv_stop
        return FullMask()(q_pos, kv_pos) if stop is None else (q_pos == q_pos) & (kv_pos < stop)

    @property
    def band(self) -> Band:
        return Band(kv_stop=self.length)
