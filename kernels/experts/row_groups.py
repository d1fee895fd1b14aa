"""Where the rows of each group lie, so that a kernel's tiles have rows of one group only.

Rows are sorted by group, and each group begins at a multiple of `alignment`. So some rows pad a group. They stand for
no row of the caller's.

Dimensions: C rows of the caller's, R rows with those that pad, G groups.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


class RowGroups(NamedTuple):
    """The places of rows that are sorted by group.

    Attributes:
      places: where each of the caller's rows lies.
      sources: which of the caller's rows lies in each place; C where none does.
      counts: the caller's rows of each group.
      sizes: rows of each group, with those that pad it: a multiple of the alignment.
    """

    places: Int[Array, " C"]
    sources: Int[Array, " R"]
    counts: Int[Array, " G"]
    sizes: Int[Array, " G"]


def num_places(num_rows: int, num_groups: int, alignment: int) -> int:
    """R: as many places as rows can take, however they are distributed; a multiple of the alignment."""
    most = num_rows + min(num_rows, num_groups) * (alignment - 1)
    return most // alignment * alignment


def group_rows(groups: Int[Array, " C"], num_groups: int, alignment: int = 1) -> RowGroups:
    """Sorts rows by group.

    Args:
      groups: the group of each row, at least 0 and less than `num_groups`.
      num_groups: G.
      alignment: each group begins at a multiple of it.

    Returns:
      Where rows go. Rows of a group keep their order.

    >>> group_rows(jnp.array([1, 0, 1]), num_groups=2, alignment=2)[:2]
    (Array([2, 0, 3], dtype=int32), Array([1, 3, 0, 2], dtype=int32))
    """
    groups = groups.astype(jnp.int32)
    rows = jnp.arange(groups.size, dtype=jnp.int32)
    sorted_groups, order = lax.sort_key_val(groups, rows)
    # On a GPU faster than to count: all rows would add to the same few counters.
    numbers = jnp.arange(num_groups, dtype=jnp.int32)
    ends = jnp.searchsorted(sorted_groups, numbers, side="right", method="scan_unrolled")
    ends = ends.astype(jnp.int32)
    counts = jnp.diff(ends, prepend=0)
    sizes = -(-counts // alignment) * alignment
    if alignment == 1:
        places = jnp.zeros_like(order).at[order].set(rows, unique_indices=True)
        return RowGroups(places, order, counts, sizes)
    # How much farther on a group's rows lie than if none padded those before it.
    shifts = (jnp.cumsum(sizes) - sizes) - (ends - counts)
    sorted_places = rows + shifts[sorted_groups]
    places = jnp.zeros_like(order).at[order].set(sorted_places, unique_indices=True)
    size = num_places(groups.size, num_groups, alignment)
    sources = jnp.full(size, groups.size, jnp.int32).at[sorted_places].set(order, unique_indices=True)
    return RowGroups(places, sources, counts, sizes)


def own_groups(groups: RowGroups, dtype: jnp.dtype) -> Float[Array, "R G"]:
    """1 for the group of each row, which may pad it, and 0 for the others.

    By a matmul with it the gradient of what rows look up is a matmul, too. JAX would add it up row by row.
    """
    ends = jnp.cumsum(groups.sizes)
    own = jnp.searchsorted(ends, jnp.arange(groups.sources.size, dtype=ends.dtype), side="right", method="compare_all")
    return jax.nn.one_hot(own, groups.sizes.size, dtype=dtype)
