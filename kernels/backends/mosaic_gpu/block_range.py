"""The key/value tiles that a query block loads, and the sub-range of them that one warpgroup attends to."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.backends.mosaic_gpu.registers import WGMMA_ROWS
from kernels.backends.mosaic_gpu.tuning import MosaicForwardTuning
from kernels.call import AttentionCall, AttentionInputs
from kernels.plan import Rows, make_rows


class BlockRange(NamedTuple):
    """The key/value tiles of a query block, within a kernel, and the sub-range of one warpgroup.

    A warpgroup's tiles follow each other: PARTIAL ones, FULL ones, and PARTIAL ones again.
    """

    num_tiles: jax.Array  # number of tiles that the block loads
    begin: Any  # rank of the warpgroup's first tile
    ends: tuple[Any, Any, Any]  # ranks at which its first PARTIAL, its FULL, and its last PARTIAL tiles end
    first: Any  # of an interval its first tile; of a list (batch element, first entry)
    tiles_ref: Any = None  # the lists; None for intervals

    def tile(self, rank):
        """The rank-th tile."""
        if self.tiles_ref is None:
            return self.first + rank
        batch, entry = self.first
        return self.tiles_ref[batch, entry + rank]


def rows_of_warpgroups(inputs: AttentionInputs, call: AttentionCall, tuning: MosaicForwardTuning) -> Rows:
    """Intervals for each warpgroup, or where they aren't all intervals, lists for each block."""
    blocks = make_rows(inputs, call, tuning.block_q, tuning.block_kv)
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
    assert rows.tiles is None
    bounds = jnp.pad(rows.bounds, ((0, 0), (0, -rows.bounds.shape[1] % num_warpgroups), (0, 0)))
    by_block = bounds.reshape(bounds.shape[0], -1, num_warpgroups, 4)
    start, stop = by_block[..., 0], by_block[..., 3]
    has_tiles = start < stop
    last = jnp.where(has_tiles, stop, 0).max(-1, keepdims=True)
    first = jnp.where(has_tiles, start, last).min(-1, keepdims=True)
    union = jnp.broadcast_to(jnp.stack([first, last], axis=-1), (*start.shape, 2))
    return Rows(jnp.concatenate([by_block, union], axis=-1).reshape(*bounds.shape[:2], 6), None)


def read_block_range(rows: Rows, batch, block, warpgroup, num_warpgroups: int) -> BlockRange:
    """Reads the range of a block and one of its warpgroups, within a kernel, from references to `rows`.

    These are intervals from `union_of_ranges`, or lists of whole blocks, whose warpgroups all attend to all tiles.
    """
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
