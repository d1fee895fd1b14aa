"""The key/value tiles that a query block loads, and the sub-range of them that one warpgroup attends to."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kernels.backends.mosaic_gpu.tuning import MosaicForwardTuning
from kernels.call import AttentionCall, AttentionInputs
from kernels.hopper.registers import WGMMA_ROWS
from kernels.plan import Row, Rows, counted, make_rows


class BlockRange(NamedTuple):
    """The key/value tiles of a query block, within a kernel, and the sub-range of one warpgroup.

    A warpgroup's tiles follow each other: PARTIAL ones, FULL ones, and PARTIAL ones again.
    """

    num_tiles: jax.Array  # number of tiles that the block loads
    begin: Any  # rank of the warpgroup's first tile
    ends: tuple[Any, Any, Any]  # ranks at which its first PARTIAL, its FULL, and its last PARTIAL tiles end
    first: Any  # of an interval its first tile; of a list (batch element, first entry)
    tiles_ref: Any = None  # the lists; None for intervals
    walked: Row | None = None  # of a row with holes, whose tiles the producer finds: PARTIAL ones, then FULL ones

    def tile(self, rank):
        """The rank-th tile."""
        if self.tiles_ref is None:
            return self.first + rank
        batch, entry = self.first
        return self.tiles_ref[batch, entry + rank]


def rows_of_warpgroups(inputs: AttentionInputs, call: AttentionCall, tuning: MosaicForwardTuning) -> Rows:
    """Intervals for each warpgroup; for each block lists where they aren't all intervals, or intervals with holes."""
    blocks = make_rows(inputs, call, tuning.block_q, tuning.block_kv)
    if blocks.columns is not None:
        return counted(blocks)
    if blocks.tiles is not None:
        return blocks
    own = make_rows(inputs, call, WGMMA_ROWS, tuning.block_kv)
    if own.tiles is not None:
        own = Rows(jnp.repeat(blocks.bounds, tuning.num_warpgroups, axis=1), None)
    return union_of_ranges(own, tuning.num_warpgroups)


def union_of_ranges(rows: Rows, num_warpgroups: int) -> Rows:
    """Adds two bounds to the interval of each warpgroup's 64 queries: start and stop of the union of its block's.

    The last block is filled with empty intervals.
    """
    by_block = in_blocks(rows, num_warpgroups)
    union = union_of_intervals(by_block).bounds[..., None, ::3]
    bounds = jnp.concatenate([by_block, jnp.broadcast_to(union, (*by_block.shape[:3], 2))], axis=-1)
    return Rows(bounds.reshape(bounds.shape[0], -1, 6), None)


def in_blocks(rows: Rows, num_warpgroups: int) -> Int[Array, "W blocks warpgroups 4"]:
    """The bounds of each warpgroup's interval, by block; the last block is filled with empty intervals."""
    assert rows.tiles is None
    bounds = jnp.pad(rows.bounds, ((0, 0), (0, -rows.num_rows % num_warpgroups), (0, 0)))
    return bounds.reshape(bounds.shape[0], -1, num_warpgroups, 4)


def union_of_intervals(by_block: Int[Array, "W blocks warpgroups 4"]) -> Rows:
    """The tiles that some warpgroup of each block visits; FULL are those that are FULL to all."""
    start, full_start, full_stop, stop = (by_block[..., i] for i in range(4))
    first = jnp.where(start < stop, start, jnp.iinfo(jnp.int32).max).min(-1)
    return Rows.from_intervals(first, full_start.max(-1), full_stop.min(-1), stop.max(-1))


def read_block_range(rows: Rows, batch, block, warpgroup, num_warpgroups: int) -> BlockRange:
    """Reads the range of a block and one of its warpgroups, within a kernel, from references to `rows`.

    These are intervals from `union_of_ranges`, or lists or intervals with holes of whole blocks, whose warpgroups all
    attend to all tiles.
    """
    if rows.counts is not None:
        row = rows.read(batch, block)
        return BlockRange(row.num_tiles, 0, (row.num_partial, row.num_tiles, row.num_tiles), None, walked=row)
    batch = batch if rows.bounds.shape[0] > 1 else 0
    if rows.tiles is not None:
        entry, num_partial, num_tiles = (rows.bounds[batch, block, i] for i in (0, 1, 3))
        return BlockRange(num_tiles, 0, (num_partial, num_tiles, num_tiles), (batch, entry), rows.tiles)
    bounds = (rows.bounds[batch, block * num_warpgroups + warpgroup, i] for i in range(6))
    start, full_start, full_stop, stop, first, last = bounds
    num_tiles = last - first
    # The bounds of an empty interval may lie anywhere, but they are equal.
    begin, first_end, full_end, end = (jnp.clip(x - first, 0, num_tiles) for x in (start, full_start, full_stop, stop))
    return BlockRange(num_tiles, begin, (first_end, full_end, end), first)
