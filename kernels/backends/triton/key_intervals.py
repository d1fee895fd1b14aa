"""Masks as the Triton kernels evaluate them: each query allows one interval of keys.

Two integers a query say which, in closed form; so no kernel knows one mask from another.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kernels.call import AttentionCall, AttentionInputs
from kernels.intervals import Band, array_namespace
from kernels.masks import AndMask, Mask, OrMask

_LARGEST = np.iinfo(np.int32).max
# Intervals that are known ahead are constants of the program: to work them out on the device takes two kernels, which a
# short call feels. A long one doesn't, but would feel megabytes of constants.
_MOST_CONSTANT = 8192


class KeyIntervals(NamedTuple):
    """Query q may attend to the keys whose position is in `first[q] ≤ … < stop[q]`. W is 1, or B for given positions.

    Attributes:
      first, stop: the intervals; an empty one has `stop ≤ first`.
      key_positions: where the keys stand; None if they count from 0.
    """

    first: Int[Array, "W T"]
    stop: Int[Array, "W T"]
    key_positions: Int[Array, "B S"] | None


def make_key_intervals(inputs: AttentionInputs, call: AttentionCall) -> KeyIntervals:
    """The intervals of a call whose mask has them."""
    positions = inputs.query_positions
    if positions is None:
        xp = np if call.q_len <= _MOST_CONSTANT else jnp
        positions = xp.arange(call.q_len, dtype=xp.int32)[None]
    interval = interval_of_rows(call.mask, positions)
    assert interval is not None, "refused by unsupported_reason"
    first, stop = interval
    if inputs.key_value_positions is None:
        stop = array_namespace(stop).minimum(stop, call.kv_len)
    return KeyIntervals(first, stop, inputs.key_value_positions)


def has_key_intervals(mask: Mask) -> bool:
    """Whether each query of a mask of one head allows one interval of keys, as far as the mask's structure tells."""
    return interval_of_rows(mask, np.zeros(1, np.int32)) is not None


def interval_of_rows(mask: Mask, q_pos):
    """(first, stop) of the rows at some positions, in NumPy or JAX as these are, or None."""
    xp = array_namespace(q_pos)
    if mask.band is not None:
        return _interval_of_band(mask.band, q_pos)
    if isinstance(mask, AndMask | OrMask):
        a, b = interval_of_rows(mask.a, q_pos), interval_of_rows(mask.b, q_pos)
        if a is None or b is None:
            return None
        if isinstance(mask, AndMask):
            return xp.maximum(a[0], b[0]), xp.minimum(a[1], b[1])
        # Two intervals that both start at the first key make one; others may have a gap between them.
        if all(part.band is not None and part.band.unbounded_below for part in (mask.a, mask.b)):
            return a[0], xp.maximum(a[1], b[1])
    return None


def _interval_of_band(band: Band, q_pos):
    xp = array_namespace(q_pos)
    first, stop = xp.full_like(q_pos, -_LARGEST), xp.full_like(q_pos, _LARGEST)
    if band.left is not None:
        first = xp.maximum(first, q_pos - band.left)
    for size in band.chunk_sizes:
        first = xp.maximum(first, q_pos // size * size)
    if band.right is not None:
        stop = xp.minimum(stop, q_pos + band.right + 1)
    if band.kv_stop is not None:
        stop = xp.minimum(stop, band.kv_stop)
    return first, stop
