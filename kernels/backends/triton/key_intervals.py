"""Masks and bounds as the Triton kernels evaluate them: each query allows one interval of keys.

Two integers a query say which, in closed form; so no kernel knows one mask from another. Bounds of queries narrow the
interval where keys' positions are their indices. The kernels evaluate other bounds beside it.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kernels.call import AttentionCall, AttentionInputs
from kernels.masks.bounds import OF_KEYS, BoundName
from kernels.masks.intervals import array_namespace

# Intervals that are known ahead are constants of the program: to work them out on the device takes two kernels, which a
# short call feels. A long one doesn't, but would feel megabytes of constants.
_MOST_CONSTANT = 8192


def make_key_intervals(
    inputs: AttentionInputs, call: AttentionCall
) -> tuple[Int[Array, "W T"], Int[Array, "W T"], Int[Array, "B S"] | None]:
    """(first, last, key positions): query q may attend to the keys whose position is in `first[q] ≤ … ≤ last[q]`.

    Both ends are inclusive, since int32 has no number after the last position; an empty interval has `last < first`.
    W is 1, or B for given positions or bounds. Without key positions keys count from 0.
    """
    positions = inputs.query_positions
    if positions is None:
        xp = np if call.q_len <= _MOST_CONSTANT else jnp
        positions = xp.arange(call.q_len, dtype=xp.int32)[None]
    interval = call.mask.row_interval(positions)
    assert interval is not None, "refused by unsupported_reason"
    first, last = interval
    if inputs.key_value_positions is None:
        last = array_namespace(last).minimum(last, call.kv_len - 1)
    if not call.has_key_value_positions and inputs.bounds is not None:
        start, end = inputs.bounds.k_start, inputs.bounds.k_end
        first = first if start is None else jnp.maximum(first, start)
        # Clipped first, for the lowest int32 has none before it.
        last = last if end is None else jnp.minimum(last, jnp.clip(end, 0, call.kv_len) - 1)
    return first, last, inputs.key_value_positions


def remaining_bounds(call: AttentionCall) -> tuple[BoundName, ...]:
    """The bounds that `make_key_intervals` doesn't take in."""
    return tuple(name for name in call.bounds if name in OF_KEYS or call.has_key_value_positions)
