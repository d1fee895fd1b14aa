"""The tiles that each row of tiles visits: the form of every plan, made on the host or on the device.

A row is a query tile, and its tiles are key/value tiles; in a transposed plan it is a key/value tile, and its tiles
are query tiles. A row's tiles are either an interval, which four numbers give, or a part of a list. Either way its
PARTIAL tiles come first, then the FULL ones, so that a kernel has one loop that evaluates the mask and one that
doesn't.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kernels.masks.intervals import Integers, TileKind, array_namespace, kleene_and
from kernels.plan.intervals import Intervals, kind_of


class Rows(NamedTuple):
    """The tiles of all rows: NumPy arrays made on the host, or JAX arrays. W is 1 if the batch shares them, else B.

    Attributes:
      bounds: of an interval (start, full_start, full_stop, stop): the row visits `start:stop`, and of these
        `full_start:full_stop` are FULL. Without FULL tiles both are `stop`, and all four are 0 in an empty row.
        Of a list (first entry, number of PARTIAL tiles, 0, number of tiles).
      tiles: int32, the lists; None for intervals.
      columns: beside intervals, of each column the rows that may visit it, as `bounds` of an interval; None: all may.
        Then a tile's kind is the lower one of those by its row's interval and by its column's.
      counts: of rows that a kernel walks, beside `columns`: number of PARTIAL tiles, the first one, number of FULL
        tiles, the first one (`kernels.plan.bounds.counted`).
    """

    bounds: Int[Integers, "W R 4"]
    tiles: Int[Integers, "W n"] | None
    columns: Int[Array, "B C 4"] | None = None
    counts: Int[Array, "B R 4"] | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.bounds.shape[1]

    @staticmethod
    def from_intervals(start: Integers, full_start: Integers, full_stop: Integers, stop: Integers) -> Rows:
        """Rows from the intervals' bounds `[W, R]`, in any order where a row has no FULL or no visited tiles."""
        xp = array_namespace(start, full_start, full_stop, stop)
        is_empty = stop <= start
        start, stop = xp.where(is_empty, 0, start), xp.where(is_empty, 0, stop)
        full_start, full_stop = xp.maximum(full_start, start), xp.minimum(full_stop, stop)
        has_full = full_start < full_stop
        full_start, full_stop = xp.where(has_full, full_start, stop), xp.where(has_full, full_stop, stop)
        return Rows(xp.stack([start, full_start, full_stop, stop], axis=-1).astype(xp.int32), None)

    def narrowed(self, within: Intervals) -> Rows:
        """Rows of intervals, less the tiles outside other intervals `[B, R]`."""
        start, full_start, full_stop, stop = (self.bounds[..., i] for i in range(4))
        return Rows.from_intervals(
            jnp.maximum(start, within.start),
            jnp.maximum(full_start, within.full_start),
            jnp.minimum(full_stop, within.full_stop),
            jnp.minimum(stop, within.stop),
        )

    def read(self, batch, row, shift=None) -> Row:
        """One row, of the arrays or of references to them within a kernel; `shift` rotates an interval's FULL tiles."""
        own = batch if self.bounds.shape[0] > 1 else 0
        a, b, c, d = (self.bounds[own, row, i] for i in range(4))
        if self.tiles is not None:
            return Row(num_tiles=d, num_partial=b, first=(own, a), tiles=self.tiles)
        if self.columns is None:
            return Row(num_tiles=d - a, num_partial=(b - a) + (d - c), first=(a, b, c), shift=shift)
        kind = functools.partial(self._kind, batch, row, (a, b, c, d))
        if self.counts is None:
            return Row(num_tiles=d - a, num_partial=(b - a) + (d - c), first=(a, b, c), kind=kind)
        num_partial, first_partial, num_full, first_full = (self.counts[batch, row, i] for i in range(4))
        return Row(num_partial + num_full, num_partial, first=(first_partial, first_full), kind=kind)

    def _kind(self, batch, row, bounds, tile):
        assert self.columns is not None
        by_column = kind_of(row, *(self.columns[batch, tile, i] for i in range(4)))
        return kleene_and(kind_of(tile, *bounds), by_column)


@dataclass(frozen=True)
class Row:
    """The tiles of one row.

    Attributes:
      num_tiles, num_partial: its number of tiles, and how many of them are PARTIAL.
      first: of an interval its first three bounds, of a list (element of the batch, first entry), of a row that is
        walked its first PARTIAL and its first FULL tile.
      tiles: the lists, or None.
      shift: by how many an interval's FULL tiles are rotated, or None.
      kind: the tile kind of a tile of an interval with EMPTY ones; None: PARTIAL tiles come first, the others are FULL.
    """

    num_tiles: Any
    num_partial: Any
    first: tuple[Any, ...]
    tiles: Any = None
    shift: Any = None
    kind: Callable[[Any], Any] | None = None

    def tile(self, rank):
        """The rank-th tile, PARTIAL ones first."""
        if self.tiles is not None:
            batch, entry = self.first
            return self.tiles[batch, entry + rank]
        assert len(self.first) == 3, "a walked row has no tile of a rank"
        start, full_start, full_stop = self.first
        num_before = full_start - start
        if self.shift is not None:
            num_full = self.num_tiles - self.num_partial
            rotated = jax.lax.rem(rank - self.num_partial + self.shift, jnp.maximum(num_full, 1)) + self.num_partial
            rank = jnp.where(rank < self.num_partial, rank, rotated)
        after = jnp.where(rank < self.num_partial, full_stop - num_before, full_start - self.num_partial)
        return rank + jnp.where(rank < num_before, start, after)

    def walk(self, num_steps, visit: Callable[[Any, Any, Any], None]) -> None:
        """Walks over the tiles of a row with counts, PARTIAL ones first, over and over, within a kernel.

        Args:
          num_steps: how many tiles to visit.
          visit: called with the step, the tile's rank in the row, and the tile.
        """
        assert self.kind is not None
        kind, (first_partial, first_full) = self.kind, self.first

        def step_to_next(step, tile):
            rank = jax.lax.rem(step, self.num_tiles)
            wanted = jnp.where(rank < self.num_partial, jnp.int32(TileKind.PARTIAL), jnp.int32(TileKind.FULL))
            tile = jnp.where(rank == 0, first_partial, tile)
            tile = jnp.where(rank == self.num_partial, first_full, tile)
            tile = jax.lax.while_loop(lambda tile: kind(tile) != wanted, lambda tile: tile + 1, tile)
            visit(step, rank, tile)
            return tile + 1

        jax.lax.fori_loop(0, num_steps, step_to_next, jnp.int32(0))


def list_rows(tile_kinds: Int[Integers, "W R C"]) -> Rows:
    """Lists of the tiles that aren't EMPTY, from the `TileKind` of every tile."""
    xp = array_namespace(tile_kinds)
    batch, num_rows, num_cols = tile_kinds.shape
    order = xp.argsort(xp.where(tile_kinds == TileKind.EMPTY, 3, tile_kinds), axis=-1, stable=True).astype(xp.int32)
    num_partial = (tile_kinds == TileKind.PARTIAL).sum(-1, dtype=xp.int32)
    num_tiles = (tile_kinds != TileKind.EMPTY).sum(-1, dtype=xp.int32)
    first = xp.broadcast_to(xp.arange(num_rows, dtype=xp.int32) * num_cols, num_tiles.shape)
    bounds = xp.stack([first, num_partial, xp.zeros_like(first), num_tiles], axis=-1)
    return Rows(bounds, order.reshape(batch, -1))
