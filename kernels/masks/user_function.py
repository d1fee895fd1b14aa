"""Masks computed by a user's function."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.masks.algebra import Mask
from kernels.masks.position_functions import booleans, identity, tile_kinds, trace


@dataclass(frozen=True, eq=False)
class MaskFn(Mask):
    """A mask computed by a function of the two positions.

    Two are equal if their functions are the same objects, so define these once, at module level.

    The function may capture arrays (`lambda q, kv: document[q] == document[kv]`), if these are JAX's and aren't being
    traced. Kernels can't look arrays up: `mosaic_gpu` passes such masks over, and `splash` takes their PARTIAL tiles
    as arrays, like a `NumpyMask`'s. What the function captures may change from call to call: a plan is used again only
    while the function's trace stays the same. It mustn't change between a call and its gradient, nor
    between calls of a jitted function, which keeps what was captured when it compiled.

    Args:
      fn: `fn(q_pos, kv_pos) -> bool`, elementwise, written with operators or `jax.numpy`. It may ignore either.
      classify_fn: the closed form, with the arguments and result of `Mask.classify`; tiles that it calls PARTIAL
        are visited even if they hold nothing. Without it a block plan evaluates `fn` on every pair, once per plan:
        time in proportion to T².

    Raises:
      ValueError: not functions; or when evaluated, results that aren't booleans (of `classify_fn`: tile kinds), or that
        don't broadcast to the arguments' shape.
    """

    fn: Callable[[Any, Any], Any]
    classify_fn: Callable[[Any, Any, Any, Any], Any] | None = None

    def __post_init__(self):
        if not callable(self.fn):
            raise ValueError(f"MaskFn.fn must be a function of (q_pos, kv_pos), got {self.fn!r}")
        if self.classify_fn is not None and not callable(self.classify_fn):
            raise ValueError(
                f"MaskFn.classify_fn must be a function of (q_lo, q_hi, kv_lo, kv_hi) or None, got {self.classify_fn!r}"
            )

    def __eq__(self, other):
        return isinstance(other, MaskFn) and self._functions == other._functions

    def __hash__(self):
        return hash(self._functions)

    @property
    def _functions(self) -> tuple[Hashable, ...]:
        return identity(self.fn), identity(self.classify_fn)

    def __call__(self, q_pos, kv_pos):
        return booleans(self.fn(q_pos, kv_pos), q_pos, kv_pos, repr(self))

    @property
    def needs_lookup(self) -> bool:
        return trace(self.fn, repr(self)).captures

    def check_functions(self) -> None:
        trace(self.fn, repr(self))

    def state(self) -> Hashable | None:
        try:
            return trace(self.fn, repr(self)).digest
        except ValueError:
            return None

    def __repr__(self):
        name = getattr(self.fn, "__qualname__", type(self.fn).__qualname__)
        return f"MaskFn(<{getattr(self.fn, '__module__', '?')}.{name}>)"

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        if self.classify_fn is not None:
            corners = (q_lo, q_hi, kv_lo, kv_hi)
            shape = np.broadcast_shapes(*map(np.shape, corners))
            return tile_kinds(self.classify_fn(*corners), shape, f"classify_fn of {self!r}")
        return super().classify(q_lo, q_hi, kv_lo, kv_hi)

    @property
    def exact(self) -> bool:
        return self.classify_fn is not None
