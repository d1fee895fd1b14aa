"""Masks as the Triton kernels evaluate them: each query allows one interval of keys.

Two integers a query say which, in closed form; so no kernel knows one mask from another.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kernels.call import AttentionCall, AttentionInputs
from kernels.masks.intervals import array_namespace

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
    interval = call.mask.row_interval(positions)
    assert interval is not None, "refused by unsupported_reason"
    first, last = interval
    if inputs.key_value_positions is None:
        last = array_namespace(last).minimum(last, call.kv_len - 1)
    return KeyIntervals(first, last, inputs.key_value_positions)
