"""The grid of tiles that one pass of the splash kernel walks, from the block plan: no tile's pairs are looked at.

The kernel runs a rectangular grid. A row of it is one query tile (one key/value tile in the dK/dV pass), and its steps
are the tiles of the other side which that row visits, in ascending order; rows that visit fewer than the longest are
filled up with steps that do nothing. While a step runs, the next one's tile is already being fetched, so each step
that does nothing names the next tile to be visited.

Upstream makes the same grid by evaluating the mask on every tile (`splash_attention_mask_info.py`).
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
    """The steps of one pass, under one mask `[R, J]` or under M masks `[M, R, J]`.

    The kernel's grid is rectangular and its own input format: tables of all steps can't be had for less.

    Attributes:
      tiles: the other side's tile at each step, int32; 0 in steps that do nothing.
      kinds: `TileKind` of each step, int8: EMPTY in steps that do nothing.
      num_tiles: tiles of the other side.
    """

    tiles: np.ndarray
    kinds: np.ndarray
    num_tiles: int

    @property
    def index_dtype(self) -> np.dtype:
        """The smallest signed type for a tile's index: scalar memory is scarce."""
        return np.min_scalar_type(-self.num_tiles)

    @property
    def num_bytes(self) -> int:
        """Scalar memory that the kernel needs for it."""
        return self.tiles.size * (self.index_dtype.itemsize + np.dtype(np.int8).itemsize)

    @staticmethod
    def whole(num_rows: int, num_tiles: int) -> TileGrid:
        """Every tile, none known to be FULL: for masks on positions that are known on the device only."""
        tiles = np.broadcast_to(np.arange(num_tiles, dtype=np.int32), (num_rows, num_tiles))
        return TileGrid(tiles, np.full(tiles.shape, TileKind.PARTIAL, np.int8), num_tiles)

    @staticmethod
    def of_masks(grids: list[TileGrid], *, idle_first: bool) -> TileGrid:
        """The grids of several masks as one, whose rows are as long as the longest of any."""
        num_steps = max(grid.tiles.shape[1] for grid in grids)

        def stacked(arrays):
            idle = [num_steps - x.shape[1] for x in arrays]
            return np.stack(
                [np.pad(x, [(0, 0), (n, 0) if idle_first else (0, n)]) for x, n in zip(arrays, idle, strict=True)]
            )

        tiles, kinds = stacked([grid.tiles for grid in grids]), stacked([grid.kinds for grid in grids])
        return TileGrid(tiles, kinds, grids[0].num_tiles)


def plan_grid(
    mask: Mask, q_len: int, kv_len: int, block_q: int, block_kv: int, *, transposed: bool, shrunk: bool
) -> TileGrid:
    """The grid of a mask whose positions count from 0.

    Args:
      mask: a mask of one head.
      q_len, kv_len: true lengths; the last tiles may stick out.
      block_q, block_kv: the pass's tile.
      transposed: rows are key/value tiles, as the dK/dV pass walks them.
      shrunk: rows are as long as the longest needs. Otherwise step s is always tile s, as the fused backward needs.
    """
    return _grid(make_block_plan(mask, q_len, kv_len, block_q, block_kv), transposed, shrunk)


@functools.lru_cache(maxsize=64)
def _grid(plan: BlockPlan, transposed: bool, shrunk: bool) -> TileGrid:
    kinds = (plan.transpose() if transposed else plan).kinds()
    num_tiles = kinds.shape[1]
    if not shrunk:
        return TileGrid(np.broadcast_to(np.arange(num_tiles, dtype=np.int32), kinds.shape), kinds, num_tiles)
    visited = kinds != TileKind.EMPTY
    num_steps = max(1, int(visited.sum(axis=1).max()))
    # Idle steps come after the others, but before them in the dK/dV pass, as upstream has it.
    if transposed:
        order = np.argsort(visited, axis=1, kind="stable")[:, -num_steps:]
    else:
        order = np.argsort(~visited, axis=1, kind="stable")[:, :num_steps]
    kinds = np.take_along_axis(kinds, order, axis=1)
    return TileGrid(np.where(kinds == TileKind.EMPTY, 0, order).astype(np.int32), kinds, num_tiles)


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
    is_partial = grid.kinds == TileKind.PARTIAL
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
