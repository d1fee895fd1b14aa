"""Kinds of tiles: those that a kernel finds in a plan, and those of a mask's pairs."""

import numpy as np

from kernels.masks import TileKind
from kernels.plan import Rows


def visited(rows: Rows, batch: int, num_cols: int) -> np.ndarray:
    """The kind of every tile, as a kernel would find it."""
    tile_kinds = np.full((rows.num_rows, num_cols), TileKind.EMPTY)
    rows = Rows(*(x if x is None else np.asarray(x) for x in rows))
    for i in range(rows.num_rows):
        row = rows.read(batch, i)
        for rank in range(int(row.num_tiles)):
            j = int(row.tile(rank))
            assert tile_kinds[i, j] == TileKind.EMPTY, "no tile is visited twice"
            tile_kinds[i, j] = TileKind.PARTIAL if rank < row.num_partial else TileKind.FULL
    return tile_kinds


def dense_tile_kinds(allowed: np.ndarray, block_q: int, block_kv: int) -> np.ndarray:
    """The kind of every tile of a dense mask; a tile that sticks out past the last key isn't FULL."""
    q_len, kv_len = allowed.shape
    tile_kinds = np.empty((-(-q_len // block_q), -(-kv_len // block_kv)), int)
    for i, j in np.ndindex(*tile_kinds.shape):
        tile = allowed[i * block_q : (i + 1) * block_q, j * block_kv : (j + 1) * block_kv]
        is_full = tile.all() and (j + 1) * block_kv <= kv_len
        tile_kinds[i, j] = TileKind.FULL if is_full else TileKind.PARTIAL if tile.any() else TileKind.EMPTY
    return tile_kinds
