"""Bounds as intervals of tiles: what each row of tiles may meet, and what each column of tiles may be met by.

A row's own bounds narrow its interval. The bounds of the columns' tokens make holes in the interval, as between the
siblings of a tree. A hole is found from four numbers of its column, while a kernel walks a row's interval. Nothing of
rows × columns numbers is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kernels.call import AttentionCall, AttentionInputs
from kernels.masks.bounds import OF_KEYS, OF_QUERIES
from kernels.masks.intervals import TileKind, kleene_and
from kernels.plan.intervals import Intervals, extents, kind_of
from kernels.plan.rows import Rows


def tiles_within_bounds(
    inputs: AttentionInputs, call: AttentionCall, block_q: int, block_kv: int, transposed: bool
) -> Intervals | None:
    """The tiles of each row that the row's own bounds leave; None if its tokens have none.

    Args:
      transposed: rows are key/value tiles, and the tiles are query tiles.
    """
    if transposed:
        names, block, other_block, other_length = OF_KEYS, block_kv, block_q, call.q_len
    else:
        names, block, other_block, other_length = OF_QUERIES, block_q, block_kv, call.kv_len
    if not set(names) & set(call.bounds):
        return None
    # The barrier is that of `document_intervals`: XLA may make one wrong kernel of the reductions of several plans.
    starts, ends = jax.lax.optimization_barrier(tuple(getattr(inputs.bounds, name) for name in names))
    zero = jnp.zeros((), jnp.int32)
    lowest, highest = (zero, zero) if starts is None else extents(starts, block)
    least, greatest = (zero + other_length,) * 2 if ends is None else extents(ends, block)
    within = Intervals(*jnp.broadcast_arrays(lowest, greatest, highest, least)).in_tiles(other_block)
    # The last tile may be filled up. What fills it has no say.
    num_tiles = -(-other_length // other_block)
    return within._replace(full_stop=jnp.where(least >= other_length, num_tiles, within.full_stop))


def column_bounds(
    inputs: AttentionInputs, call: AttentionCall, block_q: int, block_kv: int, transposed: bool
) -> Int[Array, "B C 4"] | None:
    """The rows that may meet each column, in the order of `Rows.bounds`; None if the columns' tokens have no bounds."""
    met_by = tiles_within_bounds(inputs, call, block_q, block_kv, not transposed)
    if met_by is None:
        return None
    return jnp.stack([met_by.start, met_by.full_start, met_by.full_stop, met_by.stop], axis=-1)


def within_bounds(
    rows: Rows, inputs: AttentionInputs, call: AttentionCall, block_q: int, block_kv: int, transposed: bool
) -> Rows:
    """Rows of intervals, narrowed by the bounds of their own tokens, beside the bounds of the columns' tokens."""
    own = tiles_within_bounds(inputs, call, block_q, block_kv, transposed)
    if own is not None:
        rows = rows.narrowed(own)
    return rows._replace(columns=column_bounds(inputs, call, block_q, block_kv, transposed))


def tile_kinds_under_bounds(
    inputs: AttentionInputs,
    call: AttentionCall,
    block_q: int,
    block_kv: int,
    tiles: Int[Array, "R J"],
    transposed: bool,
) -> Int[Array, "B R J"]:
    """The tile kind of given tiles of each row under the bounds alone."""
    own = tiles_within_bounds(inputs, call, block_q, block_kv, transposed)
    columns = column_bounds(inputs, call, block_q, block_kv, transposed)
    kinds = jnp.full((1, 1, 1), TileKind.FULL, jnp.int32)
    if own is not None:
        start, stop, full_start, full_stop = (bound[..., None] for bound in own)
        kinds = kind_of(tiles, start, full_start, full_stop, stop)
    if columns is not None:
        row = jnp.arange(tiles.shape[0], dtype=jnp.int32)[:, None]
        kinds = kleene_and(kinds, kind_of(row, *(columns[:, tiles, i] for i in range(4))))
    return kinds


def counted(rows: Rows) -> Rows:
    """Rows with their counts, for a kernel that walks them. XLA evaluates the kind of every tile, and keeps none."""
    assert rows.columns is not None
    num_columns = rows.columns.shape[1]
    row, column = (jnp.arange(n, dtype=jnp.int32) for n in (rows.num_rows, num_columns))
    own = kind_of(column, *(rows.bounds[:, :, None, i] for i in range(4)))
    kinds = kleene_and(own, kind_of(row[:, None], *(rows.columns[:, None, :, i] for i in range(4))))
    # The kinds are 0, 1 and 2. Comparisons in place of these bits, or a reduction for each count: XLA's GPU compiler
    # would keep an array of all tiles.
    is_partial, is_full = kinds & TileKind.PARTIAL, kinds >> 1
    operands = [is_partial, column + (1 - is_partial) * num_columns, is_full, column + (1 - is_full) * num_columns]
    counts = jax.lax.reduce(operands, [np.int32(0), np.int32(num_columns)] * 2, _combine, dimensions=[2])
    return rows._replace(counts=jnp.stack(counts, axis=-1))


def _combine(one: Sequence[Array], other: Sequence[Array]) -> list[Array]:
    """Counts of two parts of a row."""
    combine = (jnp.add, jnp.minimum) * 2
    return [each(a, b) for each, a, b in zip(combine, one, other, strict=True)]
