"""A row of tiles as a Mosaic GPU kernel reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class RowWalk:
    """One row within a kernel.

    Attributes:
      num_tiles, num_partial: its number of tiles, and how many of them are PARTIAL.
      first: of an interval its first three bounds, of a list (element of the batch, first entry).
      tiles_ref: the lists, or None.
      shift: by how many an interval's FULL tiles are rotated, or None.
    """

    num_tiles: jax.Array
    num_partial: jax.Array
    first: tuple[Any, ...]
    tiles_ref: Any = None
    shift: Any = None

    def tile(self, rank):
        """The rank-th tile of the row, PARTIAL ones first."""
        if self.tiles_ref is not None:
            batch, entry = self.first
            return self.tiles_ref[batch, entry + rank]
        start, full_start, full_stop = self.first
        num_before = full_start - start
        if self.shift is not None:
            num_full = self.num_tiles - self.num_partial
            shifted = jax.lax.rem(rank - self.num_partial + self.shift, jnp.maximum(num_full, 1)) + self.num_partial
            rank = jnp.where(rank < self.num_partial, rank, shifted)
        after = jnp.where(rank < self.num_partial, full_stop - num_before, full_start - self.num_partial)
        return rank + jnp.where(rank < num_before, start, after)


def read_row(bounds_ref, tiles_ref, batch, row, shift=None) -> RowWalk:
    """Reads one row of `Rows`, within a kernel; `shift` rotates an interval's FULL tiles."""
    batch = batch if bounds_ref.shape[0] > 1 else 0
    a, b, c, d = (bounds_ref[batch, row, i] for i in range(4))
    if tiles_ref is not None:
        return RowWalk(num_tiles=d, num_partial=b, first=(batch, a), tiles_ref=tiles_ref)
    return RowWalk(num_tiles=d - a, num_partial=(b - a) + (d - c), first=(a, b, c), shift=shift)
