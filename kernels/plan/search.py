"""For each row of tiles, the first and the last column in a range whose numbers are all large enough.

A row looks into the group of √C columns where its range begins, and at the largest numbers of all groups after it; then
into the group that these lead to. So it compares with some √C columns at a time, and no array has an element for every
row and column. A binary search would compare less, in a loop whose every step a GPU's host starts while the GPU waits
("Training on four H200s" in docs/benchmarks.md).

Dimensions: B batch, R rows, C columns, V numbers of a column, G groups of W columns.
"""

from __future__ import annotations

import functools
import math

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
    num_rounds: int = 2,
) -> tuple[Int[Array, "B R"], Int[Array, "B R"]]:
    """Narrows ranges of columns to those between the first and the last that a row is looking for.

    Args:
      values: each column's numbers, int32.
      thresholds: a row is looking for columns whose numbers are all at least these.
      start, stop: each row's range, with `0 ≤ start` and `stop ≤ C`; it is empty where `stop ≤ start`.
      above: the numbers must be above the thresholds.
      num_rounds: two find the first and the last column if V is 1. Otherwise they may end before it, at a group of
        which some columns have the one number and some the other, and each further round passes over one of these.

    Returns:
      The narrowed ranges. They hold every column that the row is looking for; those without any are empty if V is 1.
    """
    num_columns = values.shape[-1]
    # The last column is the first one from the other end: both are looked for at once, as rows of twice the batch.
    from_both_ends = jnp.concatenate([values, values[..., ::-1]], axis=1)
    first, from_the_end = jnp.split(
        _first(
            from_both_ends,
            jnp.concatenate([thresholds, thresholds], axis=1),
            jnp.concatenate([start, num_columns - stop]),
            jnp.concatenate([stop, num_columns - start]),
            above,
            num_rounds,
        ),
        2,
    )
    return first, num_columns - from_the_end


def _first(values, thresholds, start, stop, above: bool, num_rounds: int) -> Int[Array, "B R"]:
    """The first column of a range that isn't ruled out, or the range's end."""
    num_columns = values.shape[-1]
    width = math.isqrt(num_columns - 1) + 1
    num_groups = -(-num_columns // width)
    padded = jnp.pad(values, [(0, 0), (0, 0), (0, num_groups * width - num_columns)], mode="edge")
    groups = padded.reshape(*values.shape[:-1], num_groups, width)
    largest = groups.max(-1)[:, :, None]  # [V, B, 1, G]
    thresholds, end = thresholds[..., None], jnp.maximum(start, stop)

    def may_be_met(numbers: Int[Array, "V B R N"]) -> Bool[Array, "B R N"]:
        return (numbers > thresholds if above else numbers >= thresholds).all(0)

    def least(columns: Int[Array, "B R N"], chosen: Bool[Array, "B R N"]) -> Int[Array, "B R"]:
        return jnp.where(chosen, columns, end[..., None]).min(-1)

    first = start
    for _ in range(num_rounds):
        group = jnp.minimum(first // width, num_groups - 1)
        columns = (group * width)[..., None] + jnp.arange(width, dtype=jnp.int32)
        within = jnp.take_along_axis(groups, group[None, ..., None], axis=2)  # [V, B, R, W]
        later = jnp.arange(num_groups, dtype=jnp.int32)
        first = jnp.minimum(
            least(columns, may_be_met(within) & (columns >= first[..., None])),
            least(later * width, may_be_met(largest) & (later > group[..., None])),
        )
    return first
