"""How one GPU's part of the tokens is cut into the tiles of a matmul.

Shapes: R GPUs, B batch, T tokens, t tokens of one GPU (T/R).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.experimental import pallas as pl

from kernels.hopper.persistent_matmul import BLOCK_DEPTH, BLOCK_ROWS, TileOperands, div_rem, place_tile


class TokenTiles(NamedTuple):
    """The tiles of one GPU's tokens.

    Attributes:
      batch: B.
      length: t.
      columns: of a tile.
      num_across: tiles side by side.
    """

    batch: int
    length: int
    columns: int
    num_across: int

    @property
    def blocks_of_length(self) -> int:
        """Blocks of rows in a sequence."""
        return self.length // BLOCK_ROWS

    @property
    def num_blocks(self) -> int:
        """Blocks of rows in all sequences."""
        return self.batch * self.blocks_of_length

    @property
    def num_tiles(self) -> int:
        return self.num_blocks * self.num_across

    def block(self, tile) -> tuple[Any, Any]:
        """The block of rows of a tile, and which of the tiles side by side it is."""
        return place_tile(tile, self.num_blocks, self.num_across)

    def place(self, tile) -> tuple[Any, Any, Any]:
        """Sequence, first of a GPU's tokens and first column of a tile."""
        block, across = self.block(tile)
        sequence, block = div_rem(block, self.blocks_of_length)
        return sequence, block * BLOCK_ROWS, across * self.columns

    def operands(
        self, tile, first_token, rows: Sequence[Any], matrices: Sequence[Any], *, transpose: bool
    ) -> TileOperands:
        """Of a tile of the sum of products of rows and matrices.

        Args:
          tile: its number.
          first_token: of the GPU whose tokens they are, in the arrays of rows.
          rows: references to arrays `[B, tokens, F]`.
          matrices: references to arrays `[F, features]`; `[features, F]` with `transpose`.
          transpose: whether to multiply by the matrices' transposes.
        """
        sequence, token, first_column = self.place(tile)
        here, across = pl.ds(first_token + token, BLOCK_ROWS), pl.ds(first_column, self.columns)

        def left(rows, step):
            return rows.at[sequence, here, pl.ds(step * BLOCK_DEPTH, BLOCK_DEPTH)]

        def right(matrix, step):
            along = pl.ds(step * BLOCK_DEPTH, BLOCK_DEPTH)
            return [matrix.at[across, along] if transpose else matrix.at[along, across]]

        return TileOperands(
            BLOCK_ROWS,
            [each.shape[2] // BLOCK_DEPTH for each in rows],
            [functools.partial(left, each) for each in rows],
            [functools.partial(right, each) for each in matrices],
        )
