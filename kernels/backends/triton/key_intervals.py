"""Masks and bounds as the Triton kernels evaluate them: each query allows one interval of keys.

Two integers a query say which, in closed form; so no kernel knows one mask from another. The bounds of queries narrow
that interval where the indices of keys are their positions. Otherwise they are an interval of their own. The bounds of
keys give each key one interval of queries.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kernels.call import AttentionCall, AttentionInputs
from kernels.masks.bounds import OF_KEYS, OF_QUERIES, BoundName
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
    if not call.has_key_value_positions and (bounded := _keys_of_queries(inputs, call)) is not None:
        first, last = jnp.maximum(first, bounded[0]), jnp.minimum(last, bounded[1])
    return first, last, inputs.key_value_positions


def make_index_intervals(
    inputs: AttentionInputs, call: AttentionCall
) -> tuple[tuple[Int[Array, "B T"], Int[Array, "B T"]] | None, tuple[Int[Array, "B S"], Int[Array, "B S"]] | None]:
    """The (first, last) key of each query and query of each key, as indices; None where the bounds say no more.

    Queries have none, too, where `make_key_intervals` has taken their bounds in.
    """
    of_queries = _keys_of_queries(inputs, call) if call.has_key_value_positions else None
    return of_queries, _within(inputs, call, OF_KEYS, call.q_len)


def _keys_of_queries(inputs: AttentionInputs, call: AttentionCall) -> tuple[Array, Array] | None:
    return _within(inputs, call, OF_QUERIES, call.kv_len)


def _within(
    inputs: AttentionInputs, call: AttentionCall, names: tuple[BoundName, BoundName], other_length: int
) -> tuple[Array, Array] | None:
    """The first and the last index that some tokens' bounds allow, inclusive; None if the tokens have no bounds."""
    if not set(names) & set(call.bounds):
        return None
    start, end = (getattr(inputs.bounds, name) for name in names)
    first = jnp.zeros_like(end) if start is None else start
    # Clipped first, for the lowest int32 has none before it.
    last = jnp.full_like(start, other_length - 1) if end is None else jnp.clip(end, 0, other_length) - 1
    return first, last
