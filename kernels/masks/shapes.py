"""Masks with a closed form: full, causal, local, with a schedule or without, chunked, prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.masks.algebra import Mask
from kernels.masks.intervals import Band, Integers, array_namespace, at_most, chunk_start


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

_WIDEST_SCHEDULED = 1 << 23  # float32 holds the halves of all numbers up to it


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
class ScheduledWindow(Mask):
    """A causal window whose width grows over the steps of a training run.

    As a mask it is the widest window, `LocalMask(stop - 1, 0)`: plans, memory and compile time are of that. A training
    step narrows it by bounds, so that all steps are one program. It combines with other masks by `&` alone.

    Args:
      start: tokens in the window at step 1, the query's own among them.
      stop: tokens from step `num_steps` on.
      num_steps: steps over which the width grows linearly, in whole tokens.

    >>> window = ScheduledWindow(start=256, stop=8192, num_steps=1000)
    >>> [int(window.width(step)) for step in (0, 1, 2, 500, 1000, 5000)]
    [256, 256, 264, 4220, 8192, 8192]
    """

    start: int
    stop: int
    num_steps: int

    def __post_init__(self):
        _require_int(self, "start", minimum=1)
        _require_int(self, "stop", minimum=1)
        _require_int(self, "num_steps", minimum=2)
        if self.start > self.stop:
            raise ValueError(
                f"ScheduledWindow.start={self.start} is more than stop={self.stop}; windows grow: use at most that"
            )
        if self.stop > _WIDEST_SCHEDULED:
            raise ValueError(f"ScheduledWindow.stop={self.stop} must be at most {_WIDEST_SCHEDULED}")

    def __call__(self, q_pos, kv_pos):
        return LocalMask(self.stop - 1, 0)(q_pos, kv_pos)

    @property
    def band(self) -> Band:
        return Band(left=self.stop - 1, right=0)

    @property
    def largest_parameter(self) -> int:
        return self.stop

    @property
    def scheduled_window(self) -> ScheduledWindow:
        return self

    def width(self, step: Integers) -> Any:
        """Tokens in the window.

        Args:
          step: of the run, from 1; may be traced.

        Returns:
          int32.
        """
        xp, last = array_namespace(step), self.num_steps - 1
        fraction = xp.asarray(xp.clip(step - 1, 0, last), np.float32) / np.float32(last)
        return self.start + xp.asarray(xp.rint(np.float32(self.stop - self.start) * fraction), np.int32)


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
