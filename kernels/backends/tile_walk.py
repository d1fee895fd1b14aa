"""Which tiles a block of a GPU kernel visits: block plans brought to the device, as operands of the kernel.

A row of tiles (of key/value tiles for a query tile, of query tiles in the transposed walk) is either an interval,
given by four numbers, or a part of a list. Either way its PARTIAL tiles come first, then the FULL ones, so that a
kernel has one loop that evaluates the mask and one that doesn't.

Segment ids narrow the intervals on the device, from the lowest and highest id of each tile. Positions that are given
leave nothing known ahead of time: then each tile is classified on the device, and rows are lists. For kernels that
walk intervals alone, a row that is a list becomes the interval that holds all of it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kernels.block_plan import IntervalRows, ListedRows, make_block_plan
from kernels.call import AttentionCall, AttentionInputs
from kernels.masks.intervals import TileKind, kleene_and, tile_kind


class Rows(NamedTuple):
    """The tiles of each row, as operands of a kernel. W is 1 if all of the batch share them, else B.

    Attributes:
      bounds: of an interval (start, full_start, full_stop, stop), or of a list (first entry, number of PARTIAL
        tiles, 0, number of tiles).
      tiles: the lists; None for intervals.
    """

    bounds: Int[Array, "W R 4"]
    tiles: Int[Array, "W n"] | None


def make_rows(
    inputs: AttentionInputs,
    call: AttentionCall,
    block_q: int,
    block_kv: int,
    *,
    transposed: bool = False,
    only_intervals: bool = False,
) -> Rows:
    """The rows of a call cut into tiles.

    Args:
      inputs, call: the call; segment ids and positions are those of the whole sequences.
      block_q, block_kv: sides of a tile, in tokens.
      transposed: rows of query tiles for each key/value tile, in place of key/value tiles for each query tile.
      only_intervals: no lists; tiles of an interval that are EMPTY are then visited as PARTIAL ones.
    """
    collect = _hull if only_intervals else _listed

    def by_row(kinds):
        return kinds.swapaxes(1, 2) if transposed else kinds

    if call.has_positions:
        return collect(by_row(_kinds_on_device(inputs, call, block_q, block_kv)))
    plan = make_block_plan(call.mask, call.q_len, call.kv_len, block_q, block_kv)
    plan = plan.transpose() if transposed else plan
    rows = plan.rows
    if call.has_segment_ids:
        documents = by_row(_segment_kinds(inputs, block_q, block_kv))
        if isinstance(rows, ListedRows):
            return collect(kleene_and(jnp.asarray(plan.kinds())[None], documents))
        return _hull(kleene_and(_interval_kinds(rows, plan.num_cols), documents))
    if isinstance(rows, ListedRows):
        return _hull(jnp.asarray(plan.kinds())[None]) if only_intervals else _planned_list(rows)
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


def _listed(kinds: Int[Array, "B R C"]) -> Rows:
    """Lists of tiles whose kinds are known on the device only."""
    batch, num_rows, num_cols = kinds.shape
    order = jnp.argsort(jnp.where(kinds == TileKind.EMPTY, 3, kinds), axis=-1, stable=True).astype(jnp.int32)
    num_partial = (kinds == TileKind.PARTIAL).sum(-1, dtype=jnp.int32)
    num_tiles = (kinds != TileKind.EMPTY).sum(-1, dtype=jnp.int32)
    first = jnp.broadcast_to(jnp.arange(num_rows, dtype=jnp.int32) * num_cols, num_tiles.shape)
    bounds = jnp.stack([first, num_partial, jnp.zeros_like(first), num_tiles], axis=-1)
    return Rows(bounds, order.reshape(batch, -1))


def _interval_kinds(rows: IntervalRows, num_cols: int) -> Int[Array, "1 R C"]:
    """The kind of every tile of a plan's intervals."""
    start, full_start, full_stop, stop = (vector[None, :, None] for vector in rows)
    col = jnp.arange(num_cols, dtype=jnp.int32)
    return tile_kind((start <= col) & (col < stop), (full_start <= col) & (col < full_stop))


def _hull(kinds: Int[Array, "B R C"]) -> Rows:
    """The intervals from each row's first tile that isn't EMPTY to its last."""
    num_cols = kinds.shape[-1]
    col = jnp.arange(num_cols, dtype=jnp.int32)
    visited, full = kinds != TileKind.EMPTY, kinds == TileKind.FULL
    # In one reduction, since XLA makes one kernel of it, and three of five apart: here starting one takes the time.
    start, stop, full_start, full_stop, num_full = jax.lax.reduce(
        (
            jnp.where(visited, col, num_cols),
            jnp.where(visited, col + 1, 0),
            jnp.where(full, col, num_cols),
            jnp.where(full, col + 1, 0),
            full.astype(jnp.int32),
        ),
        tuple(map(jnp.int32, (num_cols, 0, num_cols, 0, 0))),
        lambda some, others: tuple(
            combine(x, y)
            for combine, x, y in zip(
                (jnp.minimum, jnp.maximum, jnp.minimum, jnp.maximum, jnp.add), some, others, strict=True
            )
        ),
        (kinds.ndim - 1,),
    )
    # Where other tiles are among the FULL ones, all are visited as PARTIAL ones; where there is none of a kind, both of
    # its bounds are `stop`: 0 in an empty row.
    is_interval = full_stop - full_start == num_full
    full_start, full_stop = (jnp.where(is_interval, bound, stop) for bound in (full_start, full_stop))
    return Rows(jnp.stack([jnp.minimum(start, stop), full_start, full_stop, stop], axis=-1), None)


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
