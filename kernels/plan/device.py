"""The tiles that each row of tiles visits, for a call: `make_rows` is what backends call.

Without segment ids and positions the plan is the host's (`host.py`). With them it is made on the device, because they
are known there only. If each query of the mask allows one interval of keys, time and memory grow with the rows of tiles
and not with the tiles: a tile's documents give the interval of tokens that it may attend to, and its lowest and highest
position give the interval of positions. For other masks every tile is classified, and the plan is lists.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kernels.call import AttentionCall, AttentionInputs
from kernels.masks.intervals import LAST_POSITION, TileKind, kleene_and, tile_kind
from kernels.plan.bounds import tile_kinds_under_bounds, within_bounds
from kernels.plan.documents import document_intervals
from kernels.plan.host import BlockPlan, make_block_plan
from kernels.plan.intervals import Extents, Intervals, extents, kind_of
from kernels.plan.rows import Rows, list_rows
from kernels.plan.search import search
from kernels.tracing.mesh_axes import vary


def make_rows(
    inputs: AttentionInputs,
    call: AttentionCall,
    block_q: int,
    block_kv: int,
    *,
    transposed: bool = False,
    only_intervals: bool = False,
) -> Rows:
    """The rows of a call cut into tiles, on the host where no segment ids and positions are given.

    Args:
      inputs, call: the call; segment ids and positions are those of the whole sequences.
      block_q, block_kv: sides of a tile, in tokens.
      transposed: rows of query tiles for each key/value tile, in place of key/value tiles for each query tile.
      only_intervals: no lists; tiles of an interval that are EMPTY are then visited as PARTIAL ones.
    """
    if not (call.has_positions or call.has_segment_ids or call.bounds or only_intervals):
        return jax.tree.map(jnp.asarray, _host_plan(call, block_q, block_kv, transposed).rows)
    plan = _rows_or_tile_kinds(inputs, call, block_q, block_kv, transposed)
    if isinstance(plan, Rows):
        return within_bounds(plan, inputs, call, block_q, block_kv, transposed) if call.bounds else plan
    if call.bounds:
        tiles = jnp.broadcast_to(jnp.arange(plan.shape[2], dtype=jnp.int32), plan.shape[1:])
        plan = kleene_and(plan, tile_kinds_under_bounds(inputs, call, block_q, block_kv, tiles, transposed))
    return _hull(plan) if only_intervals else list_rows(plan)


def tile_kinds_at(
    inputs: AttentionInputs,
    call: AttentionCall,
    block_q: int,
    block_kv: int,
    tiles: Int[np.ndarray, "R J"],
    *,
    transposed: bool = False,
) -> Int[Array, "B R J"]:
    """`TileKind` of given tiles of each row: the plan for a kernel whose grid is fixed ahead of time.

    Args:
      inputs, call, block_q, block_kv, transposed: as for `make_rows`.
      tiles: their columns in each row of tiles.
    """
    plan = _rows_or_tile_kinds(inputs, call, block_q, block_kv, transposed)
    if isinstance(plan, Rows):
        kinds = kind_of(tiles, *(plan.bounds[..., i, None] for i in range(4)))
    else:
        kinds = jnp.take_along_axis(plan, jnp.asarray(tiles)[None], axis=2)
    if call.bounds:
        under_bounds = tile_kinds_under_bounds(inputs, call, block_q, block_kv, jnp.asarray(tiles), transposed)
        kinds = kleene_and(kinds, under_bounds)
    return kinds


def _host_plan(call: AttentionCall, block_q: int, block_kv: int, transposed: bool) -> BlockPlan:
    plan = make_block_plan(call.mask, call.q_len, call.kv_len, block_q, block_kv)
    return plan.transpose() if transposed else plan


def _rows_or_tile_kinds(
    inputs: AttentionInputs, call: AttentionCall, block_q: int, block_kv: int, transposed: bool
) -> Rows | Int[Array, "B R C"]:
    """Rows where they are intervals, else the tile kind of every tile."""
    if call.has_positions:
        if call.mask.has_row_intervals:
            return _rows_by_position(inputs, call, block_q, block_kv, transposed)
        tile_kinds = _tile_kinds_by_position(inputs, call, block_q, block_kv)
        tile_kinds = tile_kinds.swapaxes(1, 2) if transposed else tile_kinds
    else:
        plan = _host_plan(call, block_q, block_kv, transposed)
        if plan.rows.tiles is None:
            return _narrowed(plan.rows, inputs, call, block_q, block_kv, transposed)
        tile_kinds = jnp.asarray(plan.tile_kinds())[None]
    if call.has_segment_ids:
        documents = _tile_kinds_by_document(inputs, block_q, block_kv)
        tile_kinds = kleene_and(tile_kinds, documents.swapaxes(1, 2) if transposed else documents)
    return tile_kinds


def _tiles_of_documents(
    inputs: AttentionInputs, call: AttentionCall, block_q: int, block_kv: int, transposed: bool
) -> Intervals:
    """The tiles of each row that the documents leave."""
    query, key_value = inputs.query_segment_ids, inputs.key_value_segment_ids
    assert query is not None
    assert key_value is not None
    if transposed:
        return document_intervals(key_value, block_kv, query, call.varying_axes).in_tiles(block_q)
    return document_intervals(query, block_q, key_value, call.varying_axes).in_tiles(block_kv)


def _narrowed(
    planned: Rows, inputs: AttentionInputs, call: AttentionCall, block_q: int, block_kv: int, transposed: bool
) -> Rows:
    """A plan's intervals, less what the documents rule out."""
    if not call.has_segment_ids:
        return Rows(jnp.asarray(planned.bounds), None)
    return planned.narrowed(_tiles_of_documents(inputs, call, block_q, block_kv, transposed))


def _rows_by_position(
    inputs: AttentionInputs, call: AttentionCall, block_q: int, block_kv: int, transposed: bool
) -> Rows:
    """Intervals for a mask whose rows are intervals of key positions.

    A query tile reaches some keys from the first one of its lowest position's row to the last one of its highest
    position's. All of its queries allow the keys from the first one of the highest position's row to the last one of
    the lowest position's. A tile is visited where the keys' extent meets the reach, and FULL where it lies within the
    latter. Rows and columns are in whatever order: a row's interval runs from its first such tile to its last.
    """
    queries = extents(inputs.query_positions, block_q)
    reach, within = _reach(call, queries)
    if not transposed and not call.has_key_value_positions:
        return _rows_of_counted_keys(inputs, call, block_q, block_kv, reach, within)
    keys = extents(inputs.key_value_positions, block_kv)
    columns = queries if transposed else keys
    shape = (keys if transposed else queries).lowest.shape
    num_columns = columns.lowest.shape[1]
    ends = vary((jnp.zeros(shape, jnp.int32), jnp.full(shape, num_columns, jnp.int32)), call.varying_axes)
    if call.has_segment_ids:
        tiles = _tiles_of_documents(inputs, call, block_q, block_kv, transposed)
    else:
        tiles = Intervals(*ends, *ends)
    if transposed:
        own, other, too_low, too_high = keys, reach, (within.highest, keys.highest), (within.lowest, keys.lowest)
    else:
        own, other, too_low, too_high = reach, keys, (keys.lowest, within.lowest), (keys.highest, within.highest)
    # A column is met if it is high enough and low enough. A zigzag shard has two spans of positions, and a group at
    # most of columns of both.
    start, stop = search(
        jnp.stack([other.highest, ~other.lowest]),
        jnp.stack([own.lowest, ~own.highest]),
        tiles.start,
        tiles.stop,
        num_rounds=3,
    )
    # FULL ones come after the last column that is too low, and before the first that is too high.
    full_start = jnp.maximum(tiles.full_start, start)
    full_stop = jnp.maximum(jnp.minimum(tiles.full_stop, stop), full_start)
    ends = full_start, full_stop
    _, full_start = search(~too_low[0][None], ~too_low[1][None], *ends, above=True)
    full_stop, _ = search(too_high[0][None], too_high[1][None], *ends, above=True)
    if call.kv_len % block_kv:
        last_tile = -(-call.kv_len // block_kv) - 1
        sticks_out = jnp.arange(shape[1], dtype=jnp.int32) == last_tile
        full_stop = jnp.where(sticks_out, 0, full_stop) if transposed else jnp.minimum(full_stop, last_tile)
    return Rows.from_intervals(start, full_start, full_stop, stop)


def _rows_of_counted_keys(
    inputs: AttentionInputs, call: AttentionCall, block_q: int, block_kv: int, reach: Extents, within: Extents
) -> Rows:
    """Query tiles' intervals where keys count from 0: a key's position is its index."""
    last_key = call.kv_len - 1
    start, stop = jnp.maximum(reach.lowest, 0) // block_kv, jnp.minimum(reach.highest, last_key) // block_kv + 1
    full_start = -(-jnp.clip(within.lowest, 0, call.kv_len) // block_kv)
    full_stop = (jnp.minimum(within.highest, last_key) + 1) // block_kv
    rows = Rows.from_intervals(start, full_start, full_stop, stop)
    return _narrowed(rows, inputs, call, block_q, block_kv, False)


def _reach(call: AttentionCall, queries: Extents) -> tuple[Extents, Extents]:
    """The keys that some of a tile's queries may see, and those that all may see."""
    lowest, highest = (call.mask.row_interval(position) for position in queries)
    assert lowest is not None
    assert highest is not None
    # `last` rises with the position, but where rows without keys begin.
    has_reached_the_end = highest[1] < lowest[1]
    first, last = lowest[0], jnp.where(has_reached_the_end, LAST_POSITION, highest[1])
    # An empty reach meets no key at all.
    is_empty = last < first
    reach = Extents(jnp.where(is_empty, LAST_POSITION, first), jnp.where(is_empty, -LAST_POSITION, last))
    return reach, Extents(highest[0], jnp.minimum(lowest[1], highest[1]))


def _tile_kinds_by_position(inputs: AttentionInputs, call: AttentionCall, block_q: int, block_kv: int):
    """The tile kind of each tile `[B, R, C]` under the mask, from the tile's lowest and highest positions."""
    q_lo, q_hi = (corner[:, :, None] for corner in extents(inputs.query_positions, block_q))
    kv_lo, kv_hi = (corner[:, None, :] for corner in extents(inputs.key_value_positions, block_kv))
    shape = (call.batch, q_lo.shape[1], kv_lo.shape[2])
    tile_kinds = jnp.broadcast_to(call.mask.classify(q_lo, q_hi, kv_lo, kv_hi), shape)
    return tile_kinds.at[:, :, -1].min(TileKind.PARTIAL) if call.kv_len % block_kv else tile_kinds


def _tile_kinds_by_document(inputs: AttentionInputs, block_q: int, block_kv: int) -> Int[Array, "B R C"]:
    """The tile kind of each tile under the documents, from the tile's lowest and highest segment ids."""
    q_lo, q_hi = (corner[:, :, None] for corner in extents(inputs.query_segment_ids, block_q))
    kv_lo, kv_hi = (corner[:, None, :] for corner in extents(inputs.key_value_segment_ids, block_kv))
    one_document = (q_lo == q_hi) & (kv_lo == kv_hi) & (q_lo == kv_lo)
    return tile_kind((q_lo <= kv_hi) & (kv_lo <= q_hi), one_document)


def _hull(tile_kinds: Int[Array, "B R C"]) -> Rows:
    """The intervals from each row's first tile that isn't EMPTY to its last."""
    num_cols = tile_kinds.shape[-1]
    col = jnp.arange(num_cols, dtype=jnp.int32)
    visited, full = tile_kinds != TileKind.EMPTY, tile_kinds == TileKind.FULL
    start, full_start = (jnp.where(some, col, num_cols).min(-1) for some in (visited, full))
    stop, full_stop = (jnp.where(some, col + 1, 0).max(-1) for some in (visited, full))
    # Where other tiles are among the FULL ones, all are visited as PARTIAL ones.
    full_stop = jnp.where(full_stop - full_start == full.sum(-1, dtype=jnp.int32), full_stop, full_start)
    return Rows.from_intervals(start, full_start, full_stop, stop)
