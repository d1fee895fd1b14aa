"""The first and the last column in a range whose numbers are all large enough, for many rows at once.

A table of the largest number of every 2^k neighbours answers a row's search in log₂ C steps, whatever order the columns
are in.

Dimensions: B batch, R rows, C columns, V numbers of a column, K = ⌊log₂ C⌋ + 1 levels.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


# Inlined: where JAX takes a plan out of a caller's loop, a call within it may keep arguments that it doesn't use. In a
# `jax.shard_map` they end XLA's partitioner with a segmentation fault (seen in JAX 0.11.2).
@functools.partial(jax.jit, static_argnames=("above", "num_rounds"), inline=True)
def search(
    values: Int[Array, "V B C"],
    thresholds: Int[Array, "V B R"],
    start: Int[Array, "B R"],
    stop: Int[Array, "B R"],
    *,
    above: bool = False,
    num_rounds: int = 1,
) -> tuple[Int[Array, "B R"], Int[Array, "B R"]]:
    """Narrows ranges of columns to those between the first and the last that a row is looking for.

    Args:
      values: each column's numbers, int32.
      thresholds: a row is looking for columns whose numbers are all at least these.
      start, stop: each row's range, with `0 ≤ start` and `stop ≤ C`; it is empty where `stop ≤ start`.
      above: the numbers must be above the thresholds.
      num_rounds: one round finds the first and the last column if V is 1. Otherwise a round may end before it, at a
        column among whose neighbours some have the one number and some the other, and the next goes on from there.

    Returns:
      The narrowed ranges. They hold every column that the row is looking for; those without any are empty if V is 1.
    """
    table = _largest_of_neighbours(values)
    num_levels, num_columns = table.shape[0], table.shape[-1]

    def may_hold(level: Int[Array, "V B C"], place: Int[Array, "B R"]) -> Bool[Array, "B R"]:
        largest = jnp.take_along_axis(level, jnp.clip(place, 0, num_columns - 1)[None], axis=-1)
        return (largest > thresholds if above else largest >= thresholds).all(0)

    def narrow(step, ends):
        first, after_last = ends
        k = num_levels - 1 - step % num_levels
        level, width = table[k], jnp.left_shift(jnp.int32(1), k)
        first = jnp.where((first + width <= stop) & ~may_hold(level, first), first + width, first)
        before = after_last - width
        after_last = jnp.where((before >= start) & ~may_hold(level, before), before, after_last)
        return first, after_last

    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(num_rounds * num_levels), narrow, (start, stop))


def _largest_of_neighbours(values: Int[Array, "V B C"]) -> Int[Array, "K V B C"]:
    """At level k the largest of each column's number and of the 2^k − 1 after it."""
    num_columns = values.shape[-1]
    beyond = jnp.full_like(values, jnp.iinfo(jnp.int32).min)

    def double(level, width):
        shifted = jax.lax.dynamic_slice_in_dim(jnp.concatenate([level, beyond], axis=-1), width, num_columns, axis=-1)
        doubled = jnp.maximum(level, shifted)
        return doubled, doubled

    widths = 1 << jnp.arange(num_columns.bit_length() - 1, dtype=jnp.int32)
    return jnp.concatenate([values[None], jax.lax.scan(double, values, widths)[1]])
