"""Which tiles a block of the kernel visits: block plans brought to the GPU, and read there.

A row of tiles (of key/value tiles for a query tile, of query tiles in the transposed walk) is either an interval,
given by four numbers, or a part of a list. Either way its PARTIAL tiles come first, then the FULL ones, so that a
kernel has one loop that evaluates the mask and one that doesn't.

Segment ids narrow the intervals on the device, from the lowest and highest id of each tile. Positions that are given
leave nothing known ahead of time: then each tile is classified on the device, and rows are lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kernels.block_plan import IntervalRows, ListedRows, make_block_plan
from kernels.call import AttentionCall, AttentionInputs
from kernels.intervals import TileKind, kleene_and, tile_kind


class Rows(NamedTuple):
    """The tiles of each row, as operands of a kernel. W is 1 if all of the batch share them, else B.

    Attributes:
      bounds: of an interval (start, full_start, full_stop, stop), or of a list (first entry, number of PARTIAL
        tiles, 0, number of tiles).
      tiles: the lists; None for intervals.
    """

    bounds: Int[Array, "W R 4"]
    tiles: Int[Array, "W n"] | None


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


def make_rows(
    inputs: AttentionInputs, call: AttentionCall, block_q: int, block_kv: int, *, transposed: bool = False
) -> Rows:
    """The rows of a call cut into tiles.

    Args:
      inputs, call: the call; segment ids and positions are those of the whole sequences.
      block_q, block_kv: sides of a tile, in tokens.
      transposed: rows of query tiles for each key/value tile, in place of key/value tiles for each query tile.
    """
    if call.has_positions:
        return _listed(_kinds_on_device(inputs, call, block_q, block_kv), transposed=transposed)
    plan = make_block_plan(call.mask, call.q_len, call.kv_len, block_q, block_kv)
    if isinstance(plan.rows, ListedRows) and call.has_segment_ids:
        kinds = kleene_and(jnp.asarray(plan.kinds())[None], _segment_kinds(inputs, block_q, block_kv))
        return _listed(kinds, transposed=transposed)
    plan = plan.transpose() if transposed else plan
    rows = plan.rows
    if isinstance(rows, ListedRows):
        return _planned_list(rows)
    if call.has_segment_ids:
        return _narrowed(inputs, rows, block_q, block_kv, plan.num_cols, transposed=transposed)
    return Rows(jnp.asarray(np.stack(rows, axis=-1)[None]), None)


def _planned_list(rows: ListedRows) -> Rows:
    """A plan's lists, in which the FULL tiles come first, turned round."""
    num_tiles = np.diff(rows.offsets)
    row = np.repeat(np.arange(len(num_tiles)), num_tiles)
    rank = np.arange(len(rows.tiles)) - rows.offsets[row]
    num_partial = num_tiles - rows.num_full
    tiles = rows.tiles[rows.offsets[row] + (rank + rows.num_full[row]) % num_tiles[row]]
    bounds = np.stack([rows.offsets[:-1], num_partial, np.zeros_like(num_partial), num_tiles], axis=-1)
    return Rows(jnp.asarray(bounds.astype(np.int32)[None]), jnp.asarray(np.append(tiles, 0).astype(np.int32)[None]))


def _listed(kinds: Int[Array, "B R C"], *, transposed: bool) -> Rows:
    """Lists of tiles whose kinds are known on the device only."""
    kinds = kinds.swapaxes(1, 2) if transposed else kinds
    batch, num_rows, num_cols = kinds.shape
    order = jnp.argsort(jnp.where(kinds == TileKind.EMPTY, 3, kinds), axis=-1, stable=True).astype(jnp.int32)
    num_partial = (kinds == TileKind.PARTIAL).sum(-1, dtype=jnp.int32)
    num_tiles = (kinds != TileKind.EMPTY).sum(-1, dtype=jnp.int32)
    first = jnp.broadcast_to(jnp.arange(num_rows, dtype=jnp.int32) * num_cols, num_tiles.shape)
    bounds = jnp.stack([first, num_partial, jnp.zeros_like(first), num_tiles], axis=-1)
    return Rows(bounds, order.reshape(batch, -1))


def _narrowed(
    inputs: AttentionInputs, rows: IntervalRows, block_q: int, block_kv: int, num_cols: int, *, transposed: bool
) -> Rows:
    """A plan's intervals, cut down to the tiles that share a document with the row's."""
    start, full_start, full_stop, stop = (vector[None, :, None] for vector in rows)
    col = jnp.arange(num_cols, dtype=jnp.int32)
    planned = tile_kind((start <= col) & (col < stop), (full_start <= col) & (col < full_stop))
    documents = _segment_kinds(inputs, block_q, block_kv)
    kinds = kleene_and(planned, documents.swapaxes(1, 2) if transposed else documents)

    visited, full = kinds != TileKind.EMPTY, kinds == TileKind.FULL
    any_visited, any_full = visited.any(-1), full.any(-1)
    first = jnp.where(any_visited, jnp.where(visited, col, num_cols).min(-1), 0)
    last = jnp.where(visited, col + 1, 0).max(-1)
    first_full = jnp.where(any_full, jnp.where(full, col, num_cols).min(-1), last)
    # Ids in no order may interrupt the FULL tiles; the loop without a mask then ends at the first that isn't.
    ends = (col >= first_full[..., None]) & ~full
    last_full = jnp.where(any_full, jnp.where(ends, col, last[..., None]).min(-1), last)
    return Rows(jnp.stack([first, first_full, last_full, last], axis=-1).astype(jnp.int32), None)


def _kinds_on_device(inputs: AttentionInputs, call: AttentionCall, block_q: int, block_kv: int) -> Int[Array, "B R C"]:
    q_lo, q_hi = (corner[:, :, None] for corner in _corners(inputs.query_positions, block_q))
    kv_lo, kv_hi = (corner[:, None, :] for corner in _corners(inputs.key_value_positions, block_kv))
    shape = (call.batch, q_lo.shape[1], kv_lo.shape[2])
    kinds = jnp.broadcast_to(call.mask.classify(q_lo, q_hi, kv_lo, kv_hi), shape)
    if call.kv_len % block_kv:
        kinds = kinds.at[:, :, -1].min(TileKind.PARTIAL)
    if call.has_segment_ids:
        kinds = kleene_and(kinds, _segment_kinds(inputs, block_q, block_kv))
    return kinds


def _segment_kinds(inputs: AttentionInputs, block_q: int, block_kv: int) -> Int[Array, "B R C"]:
    """What the documents say of each tile, from its lowest and highest segment id."""
    q_lo, q_hi = (corner[:, :, None] for corner in _corners(inputs.query_segment_ids, block_q))
    kv_lo, kv_hi = (corner[:, None, :] for corner in _corners(inputs.key_value_segment_ids, block_kv))
    one_document = (q_lo == q_hi) & (kv_lo == kv_hi) & (q_lo == kv_lo)
    return tile_kind((q_lo <= kv_hi) & (kv_lo <= q_hi), one_document)


def _corners(tokens: Int[Array, "B L"] | None, block: int) -> tuple[Int[Array, "B tiles"], Int[Array, "B tiles"]]:
    """Lowest and highest of each tile."""
    assert tokens is not None
    # Repeating the last token adds nothing to what a tile's corners say.
    filled = jnp.pad(tokens, [(0, 0), (0, -tokens.shape[1] % block)], mode="edge")
    by_tile = filled.reshape(tokens.shape[0], -1, block)
    return by_tile.min(-1), by_tile.max(-1)
