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

from kernels.masks import Mask, TileKind
from kernels.plan import BlockPlan, make_block_plan


@dataclass(frozen=True, eq=False)
class TileGrid:
    """The steps of one pass.

    Attributes:
      tiles: the other side's tile at each step, int32 `[rows, steps]`; 0 in steps that do nothing.
      kinds: `TileKind` of each step, int8 `[rows, steps]`: EMPTY in steps that do nothing.
      num_tiles: tiles of the other side.
    """

    tiles: np.ndarray
    kinds: np.ndarray
    num_tiles: int

    @property
    def all_full(self) -> bool:
        """Whether every tile is visited and holds allowed pairs only."""
        return self.tiles.shape[1] == self.num_tiles and bool((self.kinds == TileKind.FULL).all())

    @property
    def index_dtype(self) -> np.dtype:
        """The smallest signed type for a tile's index: scalar memory is scarce."""
        return np.min_scalar_type(-self.num_tiles)

    @property
    def num_bytes(self) -> int:
        """Scalar memory that the kernel needs for it."""
        return self.tiles.size * (self.index_dtype.itemsize + np.dtype(np.int8).itemsize)


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


def whole_grid(num_rows: int, num_tiles: int) -> TileGrid:
    """Every tile, none known to be FULL: for masks on positions that are known on the device only."""
    tiles = np.broadcast_to(np.arange(num_tiles, dtype=np.int32), (num_rows, num_tiles))
    return TileGrid(tiles, np.full(tiles.shape, TileKind.PARTIAL, np.int8), num_tiles)


def next_visited(values: Any, visited: Any) -> Any:
    """For each step, row by row, the value at the next one that is visited, itself included; after the last, the first.

    Args:
      values: integers `[rows, steps]`.
      visited: booleans `[rows, steps]`.

    Returns:
      Integers `[rows, steps]`, NumPy or JAX as `visited` is.
    """
    on_device = isinstance(visited, jax.Array)
    xp = jnp if on_device else np
    flat, size = visited.reshape(-1), visited.size
    own = xp.where(flat, xp.arange(size), size)
    following = jax.lax.cummin(own, reverse=True) if on_device else np.minimum.accumulate(own[::-1])[::-1]
    following = xp.where(following == size, xp.where(flat.any(), xp.argmax(flat), 0), following)
    return xp.asarray(values).reshape(-1)[following].reshape(visited.shape)


def partial_blocks(
    mask: Mask, grid: TileGrid, lengths: tuple[int, int], blocks: tuple[int, int], *, transposed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of all PARTIAL tiles, for a mask that can't be computed in the kernel: one that looks arrays up.

    Args:
      mask: a mask of one head.
      grid: its grid.
      lengths: (q_len, kv_len), true.
      blocks: (block_q, block_kv).
      transposed: as in `plan_grid`; the blocks are then transposed, too.

    Returns:
      Distinct blocks, bool `[n, *tile]`, and for each step the index of its block, int32 `[rows, steps]`.
    """
    (q_len, kv_len), (block_q, block_kv) = lengths, blocks
    found: dict[bytes, int] = {}
    distinct: list[np.ndarray] = []
    index = np.zeros(grid.tiles.shape, np.int32)
    is_partial = grid.kinds == TileKind.PARTIAL
    for row, step in np.argwhere(is_partial):
        tile = int(grid.tiles[row, step])
        i, j = (tile, row) if transposed else (row, tile)
        q_pos, kv_pos = i * block_q + np.arange(block_q), j * block_kv + np.arange(block_kv)
        inside = (q_pos < q_len)[:, None] & (kv_pos < kv_len)
        pairs = inside & mask.evaluate(np.minimum(q_pos, q_len - 1)[:, None], np.minimum(kv_pos, kv_len - 1)[None])
        pairs = pairs.T if transposed else pairs
        index[row, step] = found.setdefault(pairs.tobytes(), len(distinct))
        if index[row, step] == len(distinct):
            distinct.append(pairs)
    if not distinct:
        shape = (block_kv, block_q) if transposed else (block_q, block_kv)
        return np.ones((1, *shape), bool), index
    return np.stack(distinct), next_visited(index, is_partial)
