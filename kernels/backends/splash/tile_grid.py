"""The grid of tiles that one pass of the splash kernel walks, from the block plan: no tile's pairs are looked at.

The kernel runs a rectangular grid. A row of it is one query tile (one key/value tile in the dK/dV pass), and its steps
are the tiles of the other side which that row visits, in ascending order; rows that visit fewer than the longest are
filled up with steps that do nothing. While a step runs, the next one's tile is already being fetched, so each step
that does nothing names the next tile to be visited.

Upstream makes the same grid by evaluating the mask on every tile (`splash_attention_mask_info.py`).

Dimensions: M distinct masks, R rows of the grid, J steps of a row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from kernels.backends.splash.launch import Pass
from kernels.call import AttentionCall
from kernels.masks import Mask, TileKind
from kernels.plan import BlockPlan, make_block_plan


@dataclass(frozen=True, eq=False)
class TileGrid:
    """The steps of one pass. The kernel takes them as tables of all steps: it runs a rectangular grid.

    Attributes:
      tiles: the other side's tile at each step under each mask, int32; 0 in steps that do nothing.
      tile_kinds: `TileKind` of each step, int8: EMPTY in steps that do nothing.
      num_tiles: tiles of the other side.
    """

    tiles: Int[np.ndarray, "M R J"]
    tile_kinds: Int[np.ndarray, "M R J"]
    num_tiles: int

    @property
    def index_dtype(self) -> np.dtype:
        """The smallest signed type for a tile's index: scalar memory is scarce."""
        return np.min_scalar_type(-self.num_tiles)

    @property
    def num_bytes(self) -> int:
        """Scalar memory that the kernel needs for it."""
        return self.tiles.size * (self.index_dtype.itemsize + np.dtype(np.int8).itemsize)


def plan_grid(call: AttentionCall, walk: Pass) -> TileGrid:
    """The tiles that a pass may visit under each distinct mask, as far as they are known ahead of time."""
    each = [_steps(mask, call, walk) for mask in call.mask.distinct_heads(call.num_heads)]
    num_steps = max(tiles.shape[1] for tiles, _ in each)

    def stack(tables):
        idle = [num_steps - x.shape[1] for x in tables]
        pads = [(n, 0) if walk.transposed else (0, n) for n in idle]
        return np.stack([np.pad(x, [(0, 0), pad]) for x, pad in zip(tables, pads, strict=True)])

    tiles, tile_kinds = map(stack, zip(*each, strict=True))
    return TileGrid(tiles, tile_kinds, walk.grid_shape(call)[1])


def _steps(mask: Mask, call: AttentionCall, walk: Pass) -> tuple[Int[np.ndarray, "R J"], Int[np.ndarray, "R J"]]:
    """Tile and kind of each step under one mask."""
    if call.has_positions:
        # Where each token stands is known on the device only: it may be any tile.
        tile_kinds = np.full(walk.grid_shape(call), TileKind.PARTIAL, np.int8)
        return _every_tile(tile_kinds), tile_kinds
    plan = make_block_plan(mask, call.q_len, call.kv_len, walk.block_q, walk.block_kv)
    return _visited_steps(plan, walk.transposed, walk.shrunk)


@functools.lru_cache(maxsize=64)
def _visited_steps(plan: BlockPlan, transposed: bool, shrunk: bool) -> tuple[np.ndarray, np.ndarray]:
    tile_kinds = (plan.transpose() if transposed else plan).tile_kinds()
    if not shrunk:
        return _every_tile(tile_kinds), tile_kinds
    visited = tile_kinds != TileKind.EMPTY
    num_steps = max(1, int(visited.sum(axis=1).max()))
    # Idle steps come after the others, but before them in the dK/dV pass, as upstream has it.
    if transposed:
        order = np.argsort(visited, axis=1, kind="stable")[:, -num_steps:]
    else:
        order = np.argsort(~visited, axis=1, kind="stable")[:, :num_steps]
    tile_kinds = np.take_along_axis(tile_kinds, order, axis=1)
    return np.where(tile_kinds == TileKind.EMPTY, 0, order).astype(np.int32), tile_kinds


def _every_tile(tile_kinds: Int[np.ndarray, "R J"]) -> Int[np.ndarray, "R J"]:
    """Steps that visit every tile in order."""
    return np.broadcast_to(np.arange(tile_kinds.shape[1], dtype=np.int32), tile_kinds.shape)


def next_visited(values: Any, visited: Any) -> Any:
    """For each step, row by row, the value at the next one that is visited, itself included; after the last, the first.

    Args:
      values: integers `[M, R, J]`.
      visited: booleans `[M, R, J]`.

    Returns:
      Integers `[M, R, J]`, NumPy or JAX as `visited` is.
    """
    on_device = isinstance(visited, jax.Array)
    xp = jnp if on_device else np
    flat, size = visited.reshape(len(visited), -1), visited[0].size
    own = xp.where(flat, xp.arange(size), size)
    backwards = own[:, ::-1]
    following = jax.lax.cummin(backwards, axis=1) if on_device else np.minimum.accumulate(backwards, axis=1)
    following = following[:, ::-1]
    following = xp.where(following == size, xp.argmax(flat, axis=1)[:, None], following)
    return xp.take_along_axis(xp.asarray(values).reshape(flat.shape), following, axis=1).reshape(visited.shape)


def partial_blocks(
    masks: list[Mask], grid: TileGrid, call: AttentionCall, walk: Pass
) -> tuple[Bool[np.ndarray, "n tile_rows tile_columns"], Int[np.ndarray, "M R J"]]:
    """The pairs of all PARTIAL tiles, for masks that can't be computed in the kernel: those that look arrays up.

    Args:
      masks: one for each of the grid's.
      grid: their grid.
      call, walk: the pass; the blocks of a transposed one are transposed, too.

    Returns:
      Distinct blocks, and for each step the index of its block.
    """
    found: dict[bytes, int] = {}
    distinct: list[np.ndarray] = []
    index = np.zeros(grid.tiles.shape, np.int32)
    is_partial = grid.tile_kinds == TileKind.PARTIAL
    for number, row, step in np.argwhere(is_partial):
        tile = int(grid.tiles[number, row, step])
        i, j = (tile, row) if walk.transposed else (row, tile)
        q_pos, kv_pos = i * walk.block_q + np.arange(walk.block_q), j * walk.block_kv + np.arange(walk.block_kv)
        inside = (q_pos < call.q_len)[:, None] & (kv_pos < call.kv_len)
        q_pos, kv_pos = np.minimum(q_pos, call.q_len - 1)[:, None], np.minimum(kv_pos, call.kv_len - 1)[None]
        pairs = inside & masks[number].evaluate(q_pos, kv_pos)
        pairs = pairs.T if walk.transposed else pairs
        index[number, row, step] = found.setdefault(pairs.tobytes(), len(distinct))
        if index[number, row, step] == len(distinct):
            distinct.append(pairs)
    if not distinct:
        shape = (walk.block_kv, walk.block_q) if walk.transposed else (walk.block_q, walk.block_kv)
        return np.ones((1, *shape), bool), index
    return np.stack(distinct), next_visited(index, is_partial)


def whole(length: int, block: int) -> int:
    """The length, rounded up to whole blocks."""
    return -(-length // block) * block
