"""Masks as the Triton kernels evaluate them: each query allows one interval of keys.

Two integers a query say which, in closed form; so no kernel knows one mask from another.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kernels.call import AttentionCall, AttentionInputs
from kernels.intervals import LAST_POSITION, Band, array_namespace, at_most, chunk_start, shifted
from kernels.masks import AndMask, Mask, OrMask

# The lowest int32 but one. The lowest stands for keys that aren't there: no interval holds it.
_FIRST = -LAST_POSITION
# Intervals that are known ahead are constants of the program: to work them out on the device takes two kernels, which a
# short call feels. A long one doesn't, but would feel megabytes of constants.
_MOST_CONSTANT = 8192


class KeyIntervals(NamedTuple):
    """Query q may attend to the keys whose position is in `first[q] ≤ … ≤ last[q]`. W is 1, or B for given positions.

    Both ends are inclusive, since int32 has no number after the last position.

    Attributes:
      first, last: the intervals; an empty one has `last < first`.
      key_positions: where the keys stand; None if they count from 0.
    """

    first: Int[Array, "W T"]
    last: Int[Array, "W T"]
    key_positions: Int[Array, "B S"] | None


def make_key_intervals(inputs: AttentionInputs, call: AttentionCall) -> KeyIntervals:
    """The intervals of a call whose mask has them."""
    positions = inputs.query_positions
    if positions is None:
        xp = np if call.q_len <= _MOST_CONSTANT else jnp
        positions = xp.arange(call.q_len, dtype=xp.int32)[None]
    interval = interval_of_rows(call.mask, positions)
    assert interval is not None, "refused by unsupported_reason"
    first, last = interval
    if inputs.key_value_positions is None:
        last = array_namespace(last).minimum(last, call.kv_len - 1)
    return KeyIntervals(first, last, inputs.key_value_positions)


def has_key_intervals(mask: Mask) -> bool:
    """Whether each query of a mask of one head allows one interval of keys, as far as the mask's structure tells."""
    return interval_of_rows(mask, np.zeros(1, np.int32)) is not None


def interval_of_rows(mask: Mask, q_pos):
    """(first, last) of the rows at some positions, int32 in NumPy or JAX as these are, or None."""
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
    first, last = xp.full_like(q_pos, _FIRST), xp.full_like(q_pos, LAST_POSITION)
    if band.right is not None:
        last = xp.minimum(last, shifted(q_pos, band.right))
    if band.kv_stop is not None:
        last = xp.minimum(last, band.kv_stop - 1)
    if band.left is not None:
        first = xp.maximum(first, shifted(q_pos, -band.left))
        if band.left < 0:
            # Rows whose first key would stand past the last position are empty.
            last = xp.where(at_most(q_pos, LAST_POSITION, band.left), last, _FIRST - 1)
    for size in band.chunk_sizes:
        first = xp.maximum(first, chunk_start(q_pos, size))
    return first, last
