"""Rows of tiles as the Mosaic GPU kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kernels.plan import Rows


@dataclass(frozen=True)
class SharedWalk:
    """The tiles that stream past some rows, within a kernel, and which of them one of these rows visits.

    A row's own follow each other: PARTIAL ones, FULL ones, and PARTIAL ones again.

    Attributes:
      num_tiles: that stream past.
      begin: the rank of the row's first tile.
      ends: the ranks at which its first PARTIAL, its FULL, and its other PARTIAL tiles end.
      first: of an interval its first tile, of a list (element of the batch, first entry).
      tiles_ref: the lists, or None.
    """

    num_tiles: jax.Array
    begin: Any
    ends: tuple[Any, Any, Any]
    first: Any
    tiles_ref: Any = None

    def tile(self, rank):
        """The rank-th tile."""
        if self.tiles_ref is None:
            return self.first + rank
        batch, entry = self.first
        return self.tiles_ref[batch, entry + rank]


def share_walks(rows: Rows, num_together: int) -> Rows:
    """Rows of which so many follow each other as a block, whose tiles stream past all of them.

    Returns:
      Intervals with two more bounds, start and stop of the block; as many of them as fill the last block, those that
      were not there without tiles.
    """
    assert rows.tiles is None
    bounds = jnp.pad(rows.bounds, ((0, 0), (0, -rows.bounds.shape[1] % num_together), (0, 0)))
    by_block = bounds.reshape(bounds.shape[0], -1, num_together, 4)
    start, stop = by_block[..., 0], by_block[..., 3]
    has_tiles = start < stop
    last = jnp.where(has_tiles, stop, 0).max(-1, keepdims=True)
    first = jnp.where(has_tiles, start, last).min(-1, keepdims=True)
    shared = jnp.broadcast_to(jnp.stack([first, last], axis=-1), (*start.shape, 2))
    return Rows(jnp.concatenate([by_block, shared], axis=-1).reshape(*bounds.shape[:2], 6), None)


def read_shared_row(bounds_ref, tiles_ref, batch, block, member, num_together: int) -> SharedWalk:
    """Reads one row of a block, within a kernel.

    Args:
      bounds_ref, tiles_ref: intervals from `share_walks`; or lists of whole blocks, all of whose rows visit all tiles.
      member: which of the block's rows.
    """
    batch = batch if bounds_ref.shape[0] > 1 else 0
    if tiles_ref is not None:
        entry, num_partial, num_tiles = (bounds_ref[batch, block, i] for i in (0, 1, 3))
        return SharedWalk(num_tiles, 0, (num_partial, num_tiles, num_tiles), (batch, entry), tiles_ref)
    bounds = (bounds_ref[batch, block * num_together + member, i] for i in range(6))
    start, full_start, full_stop, stop, first, last = bounds
    num_tiles = last - first
    # Of a row without tiles the bounds may be anything, if only they are the same.
    begin, first_end, full_end, end = (jnp.clip(x - first, 0, num_tiles) for x in (start, full_start, full_stop, stop))
    return SharedWalk(num_tiles, begin, (first_end, full_end, end), first)
