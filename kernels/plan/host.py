"""Block plans: which tiles of the attention matrix a kernel visits, from the mask in closed form.

A plan cuts the `q_len × kv_len` matrix into `block_q × block_kv` tiles and lists, for each row of tiles,
those that aren't EMPTY, the FULL ones apart from the PARTIAL ones. It is found by recursive bisection: a
rectangle that is EMPTY or FULL is never cut further, so time and memory go with the length of the mask's
boundary and not with the number of tiles. (A mask without an exact closed form is evaluated on the pairs of
the tiles left open: for a `MaskFn` or a `NumpyMask` all of them.)

Rows of tiles mostly are intervals; then four vectors hold the whole plan. Other plans hold a list of tiles (`Rows`).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Int

from kernels.masks import Mask, TileKind, require_mask
from kernels.masks.intervals import LAST_POSITION
from kernels.plan.rows import Rows

Rectangles = Int[np.ndarray, "n 2 2"]
"""Rectangles of tiles, int64: `[i, 0]` are the rows of rectangle i (start, stop), `[i, 1]` its columns."""


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """The tiles that a kernel visits for one mask.

    Attributes:
      q_len, kv_len: lengths of the sequences, in tokens.
      block_q, block_kv: sides of a tile, in tokens; the last tiles may stick out past the end.
      full, partial: the FULL and the PARTIAL tiles, as disjoint rectangles.
    """

    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    full: Rectangles
    partial: Rectangles

    @functools.cached_property
    def rows(self) -> Rows:
        """The tiles that each query tile visits: intervals if every row is one, else lists."""
        return _rows_of(self.full, self.partial, self.num_rows)

    @property
    def num_rows(self) -> int:
        """Number of query tiles."""
        return -(-self.q_len // self.block_q)

    @property
    def num_cols(self) -> int:
        """Number of key/value tiles."""
        return -(-self.kv_len // self.block_kv)

    @property
    def num_tiles(self) -> int:
        """Number of all tiles, visited or not."""
        return self.num_rows * self.num_cols

    @property
    def num_visited(self) -> int:
        """Number of tiles that are FULL or PARTIAL."""
        return _num_tiles(self.full) + _num_tiles(self.partial)

    @property
    def num_full(self) -> int:
        """Number of tiles in which every pair is allowed: no mask needs to be evaluated there."""
        return _num_tiles(self.full)

    def tile_kinds(self) -> np.ndarray:
        """`TileKind` of every tile, int8 `[num_rows, num_cols]`: for drawings and small plans, not for kernels."""
        tile_kinds = np.full((self.num_rows, self.num_cols), TileKind.EMPTY, np.int8)
        for rectangles, kind in ((self.full, TileKind.FULL), (self.partial, TileKind.PARTIAL)):
            tile_kinds[_tiles_of(*_spans_of(rectangles))] = kind
        return tile_kinds

    def transpose(self) -> BlockPlan:
        """The plan of the transposed mask: for each key/value tile the query tiles that see it.

        The dK/dV pass walks it. Its `q_len`, `block_q` are this plan's `kv_len`, `block_kv`.
        """
        return BlockPlan(
            self.kv_len, self.q_len, self.block_kv, self.block_q, self.full[:, ::-1], self.partial[:, ::-1]
        )

    def __repr__(self):
        return (
            f"BlockPlan({self.q_len}×{self.kv_len} in {self.block_q}×{self.block_kv} tiles: "
            f"{self.num_visited:,} of {self.num_tiles:,} visited, {self.num_full:,} full)"
        )


def make_block_plan(
    mask: Mask,
    q_len: int,
    kv_len: int,
    block_q: int,
    block_kv: int,
    *,
    q_offset: int = 0,
    kv_offset: int = 0,
) -> BlockPlan:
    """Plans which tiles to visit for a mask.

    Args:
      mask: a mask of one head; for a `MultiHeadMask` make one plan per distinct mask.
      q_len, kv_len: lengths of the two sequences, in tokens.
      block_q, block_kv: sides of a tile, in tokens.
      q_offset, kv_offset: position of the first query and of the first key.

    Returns:
      The plan. Each allowed pair lies in a visited tile, and FULL tiles hold no other pairs (tiles that
      stick out past `kv_len` are never FULL). Tiles that hold no allowed pair aren't visited, unless a
      `MaskFn.classify_fn` calls them PARTIAL.

    Raises:
      ValueError: for lengths or blocks below 1, positions past 2³¹ − 1, or a `MultiHeadMask`.

    >>> from kernels import LocalMask
    >>> make_block_plan(LocalMask(1023, 0), 1 << 20, 1 << 20, 128, 128)
    BlockPlan(1048576×1048576 in 128×128 tiles: 73,692 of 67,108,864 visited, 57,316 full)
    """
    require_mask(mask)
    if mask.num_heads is not None:
        raise ValueError("a block plan is for the mask of one head; call it for each of MultiHeadMask.masks")
    for name, size in (("q_len", q_len), ("kv_len", kv_len), ("block_q", block_q), ("block_kv", block_kv)):
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    for side, length, offset in (("q", q_len, q_offset), ("kv", kv_len, kv_offset)):
        if offset + length > LAST_POSITION + 1:
            raise ValueError(
                f"{side}_len={length} from position {side}_offset={offset} on goes past the last position, "
                f"{LAST_POSITION}: positions are int32; plan a shorter part"
            )
    state = mask.state()
    make = _make_block_plan if state is not None else _make_block_plan.__wrapped__
    return make(mask, state, (q_len, kv_len), (block_q, block_kv), (q_offset, kv_offset))


@functools.lru_cache(maxsize=256)
def _make_block_plan(
    mask: Mask, state: Hashable | None, length: tuple[int, int], block: tuple[int, int], offset: tuple[int, int]
) -> BlockPlan:
    """The plan; `state` is there for the cache alone."""
    full: list[Rectangles] = []
    partial: list[Rectangles] = []
    pending = np.array([[(0, -(-tokens // side)) for tokens, side in zip(length, block, strict=True)]])
    while len(pending):
        with jax.ensure_compile_time_eval():
            tile_kinds = np.asarray(mask.classify(*_positions(pending, length, block, offset)))
        sticks_out = pending[:, 1, 1] * block[1] > length[1]
        tile_kinds = np.where(sticks_out, np.minimum(tile_kinds, TileKind.PARTIAL), tile_kinds)
        single = (pending[..., 1] - pending[..., 0] == 1).all(-1)
        full.append(pending[tile_kinds == TileKind.FULL])
        partial.append(pending[(tile_kinds == TileKind.PARTIAL) & single])
        pending = _quarter(pending[(tile_kinds == TileKind.PARTIAL) & ~single])
    if not mask.exact:
        # The mask is evaluated on the pairs of tiles that are still open.
        tiles = np.concatenate(partial)
        counts, areas = mask.count_allowed(*_positions(tiles, length, block, offset))
        is_full = (counts == areas) & (tiles[:, 1, 1] * block[1] <= length[1])
        full.append(tiles[is_full])
        partial = [tiles[(counts > 0) & ~is_full]]
    return BlockPlan(*length, *block, np.concatenate(full), np.concatenate(partial))


def _quarter(rectangles: Rectangles) -> Rectangles:
    """Cuts each rectangle in the middle of both sides, and leaves out the empty quarters."""
    for side in range(2):
        lower, upper = rectangles.copy(), rectangles.copy()
        lower[:, side, 1] = upper[:, side, 0] = (rectangles[:, side].sum(-1) + 1) // 2
        rectangles = np.concatenate([lower, upper])
    return rectangles[(rectangles[..., 0] < rectangles[..., 1]).all(-1)]


def _positions(
    rectangles: Rectangles, length: tuple[int, int], block: tuple[int, int], offset: tuple[int, int]
) -> Int[np.ndarray, "4 n"]:
    """Lowest and highest query position, lowest and highest key position; cut off at the sequences' ends."""
    indices = rectangles * np.array(block)[:, None]
    indices[..., 1] = np.minimum(indices[..., 1], length) - 1
    return (indices + np.array(offset)[:, None]).reshape(-1, 4).T


def _num_tiles(rectangles: Rectangles) -> int:
    return int((rectangles[..., 1] - rectangles[..., 0]).prod(-1).sum())


def count_allowed_pairs(mask: Mask, q_len: int, kv_len: int) -> int:
    """Number of (query, key) pairs that a mask allows. The FLOPs of attention are counted from it.

    Args:
      mask: any mask; for a `MultiHeadMask` the pairs of all heads are added.
      q_len, kv_len: lengths of the two sequences, in tokens.

    >>> from kernels import CausalMask
    >>> count_allowed_pairs(CausalMask(), 4, 4)
    10
    """
    require_mask(mask)
    if mask.num_heads is not None:
        return sum(count_allowed_pairs(head, q_len, kv_len) for head in mask.for_each_head(mask.num_heads))
    length, block = (q_len, kv_len), (128, 128)
    plan = make_block_plan(mask, *length, *block)
    q_lo, q_hi, kv_lo, kv_hi = _positions(plan.full, length, block, (0, 0))
    counts, _ = mask.count_allowed(*_positions(plan.partial, length, block, (0, 0)))
    return int(np.sum((q_hi - q_lo + 1) * (kv_hi - kv_lo + 1)) + counts.sum())


def _rows_of(full: Rectangles, partial: Rectangles, num_rows: int) -> Rows:
    """Collects disjoint rectangles into rows: as intervals if every row is one, else as lists."""
    unset = np.iinfo(np.int64).max
    start, full_start = np.full(num_rows, unset), np.full(num_rows, unset)
    stop, full_stop, num_full, num_partial = (np.zeros(num_rows, np.int64) for _ in range(4))
    full_spans, partial_spans = _spans_of(full), _spans_of(partial)
    for (row, span_start, span_stop), count in ((full_spans, num_full), (partial_spans, num_partial)):
        np.minimum.at(start, row, span_start)
        np.maximum.at(stop, row, span_stop)
        np.add.at(count, row, span_stop - span_start)
    np.minimum.at(full_start, full_spans[0], full_spans[1])
    np.maximum.at(full_stop, full_spans[0], full_spans[2])

    num_tiles = num_full + num_partial
    start, full_start = np.where(num_tiles > 0, start, 0), np.where(num_full > 0, full_start, 0)
    if np.array_equal(stop - start, num_tiles) and np.array_equal(full_stop - full_start, num_full):
        return Rows.from_intervals(*(vector[None] for vector in (start, full_start, full_stop, stop)))

    spans = np.concatenate([full_spans, partial_spans], axis=1)
    is_full = np.arange(spans.shape[1]) < full_spans.shape[1]
    _, tiles = _tiles_of(*spans[:, np.lexsort((spans[1], is_full, spans[0]))])
    first = np.cumsum(num_tiles) - num_tiles
    bounds = np.stack([first, num_partial, np.zeros_like(first), num_tiles], axis=-1)
    return Rows(bounds.astype(np.int32)[None], tiles.astype(np.int32)[None])


def _spans_of(rectangles: Rectangles) -> Int[np.ndarray, "3 m"]:
    """Rectangles cut into spans of one row each: row, first column, column after the last."""
    height = rectangles[:, 0, 1] - rectangles[:, 0, 0]
    first_span = np.cumsum(height) - height
    row = np.arange(height.sum()) + np.repeat(rectangles[:, 0, 0] - first_span, height)
    return np.stack([row, *np.repeat(rectangles[:, 1], height, axis=0).T])


def _tiles_of(row: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of each tile of some spans, int64."""
    length = stop - start
    first = np.cumsum(length) - length
    return np.repeat(row, length), np.repeat(start - first, length) + np.arange(length.sum())
