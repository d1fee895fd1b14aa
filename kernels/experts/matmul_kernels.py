"""The Hopper kernels of grouped matmuls, in Pallas Mosaic GPU: rows by their group's matrix, and rows by rows.

A tile's operands are of one group, since groups begin at multiples of a tile's rows.

Dimensions: R rows, G groups, K and N features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.experts.choice import GroupedMatmulChoice
from kernels.experts.row_groups import RowGroups
from kernels.hopper import persistent_matmul
from kernels.hopper.persistent_matmul import (
    BLOCK_DEPTH,
    BLOCK_ROWS,
    STORED_COLUMNS,
    MatmulPhase,
    TileOperands,
    div_rem,
    launch_on,
    multiply_rows_by,
    place_tile,
    stages_of_rows,
    store_columns,
    tile_columns,
)
from kernels.hopper.registers import WGMMA_ROWS
from kernels.tracing.target import Target

ALIGNMENT = BLOCK_ROWS
"""Of the groups' first rows."""
_PAIR_SIZE = 2  # programs that share a group's matrix, each of which loads a part of it for both


def unsupported_reason(
    dtype: jnp.dtype, features: tuple[int, ...], target: Target, *, interpret: bool = False
) -> str | None:
    """Why the kernels can't serve grouped matmuls between these features, or None if they can."""
    dtypes = jnp.bfloat16, jnp.float16
    return persistent_matmul.unsupported_reason(dtype, dtypes, features, target, interpret=interpret)


class RowTiles(NamedTuple):
    """The tiles of a result that has the rows of all groups.

    Programs are paired. A pair's two tiles lie in two blocks of rows, one below the other, mostly of the same group.

    Attributes:
      num_rows, num_columns: of the result.
      columns: of a tile.
      groups: of each block of rows, `[blocks]`; as many as there are groups: none.
      ends: where the rows of each block's group end that don't pad it, from the block's first row, `[blocks]`.
      num_groups: G.
      stores_all: whether the rows after the last group's are stored, too. Else they keep what the memory holds.
    """

    num_rows: int
    num_columns: int
    columns: int
    groups: Any
    ends: Any
    num_groups: int
    stores_all: bool

    @staticmethod
    def of(groups: RowGroups, num_columns: int, columns: int, *, stores_all: bool) -> RowTiles:
        num_rows, ends = groups.sources.size, jnp.cumsum(groups.sizes)
        # The last pair may have one block of rows, and then the other is of no group.
        firsts = jnp.arange(_PAIR_SIZE * pl.cdiv(num_rows, _PAIR_SIZE * BLOCK_ROWS), dtype=jnp.int32) * BLOCK_ROWS
        block_groups = jnp.searchsorted(ends, firsts, side="right", method="compare_all").astype(jnp.int32)
        block_ends = (ends - groups.sizes + groups.counts)[jnp.minimum(block_groups, ends.size - 1)] - firsts
        return RowTiles(num_rows, num_columns, columns, block_groups, block_ends, ends.size, stores_all)

    def on(self, groups: Any, ends: Any) -> RowTiles:
        """The same, within a kernel: with references in the place of arrays."""
        return self._replace(groups=groups, ends=ends)

    @property
    def num_tiles(self) -> int:
        """Of whole pairs."""
        return self.groups.shape[0] * pl.cdiv(self.num_columns, self.columns)

    def _place(self, tile) -> tuple[Any, Any, Any]:
        """The first block of the tile's pair, which of the pair it is, and how far across the result."""
        pair, of_pair = div_rem(tile, _PAIR_SIZE)
        num_down = self.groups.shape[0] // _PAIR_SIZE
        down, across = place_tile(pair, num_down, pl.cdiv(self.num_columns, self.columns))
        return _PAIR_SIZE * down, of_pair, across

    def place(self, tile, warpgroup=0) -> tuple[Any, Any]:
        """The first row of a tile, or of a consumer's part of it, and the first column."""
        first, of_pair, across = self._place(tile)
        return (first + of_pair) * BLOCK_ROWS + warpgroup * WGMMA_ROWS, across * self.columns

    def group(self, tile) -> Any:
        """Of a tile's rows; of rows of no group, some group."""
        first, of_pair, _ = self._place(tile)
        return jnp.minimum(self.groups[first + of_pair], self.num_groups - 1)

    def is_stored(self, tile) -> Any:
        """True if a tile's rows are stored."""
        first, of_pair, _ = self._place(tile)
        return self.stores_all or self.groups[first + of_pair] < self.num_groups

    def operands(
        self, tile, rows: Sequence[Any], matrices: Sequence[Sequence[Any]], *, transpose: bool
    ) -> TileOperands:
        """A tile's, of a sum over products of rows and their group's matrices; a row may have several at a time."""
        first, of_pair, _ = self._place(tile)
        first_row, first_column = self.place(tile)
        here, across = pl.ds(first_row, BLOCK_ROWS), pl.ds(first_column, self.columns)
        group = self.group(tile)

        def left(rows, step):
            return rows.at[here, pl.ds(step * BLOCK_DEPTH, BLOCK_DEPTH)]

        def right(matrices, step):
            along = pl.ds(step * BLOCK_DEPTH, BLOCK_DEPTH)
            return [each.at[group, across, along] if transpose else each.at[group, along, across] for each in matrices]

        has_rows = self.groups[first] < self.num_groups
        return TileOperands(
            self.ends[first + of_pair],
            [jnp.where(has_rows, each.shape[1] // BLOCK_DEPTH, 0) for each in rows],
            [functools.partial(left, each) for each in rows],
            [functools.partial(right, each) for each in matrices],
            self.groups[first] == self.groups[first + _PAIR_SIZE - 1],
        )

    def store(self, result, tile, warpgroup, column, buffer) -> None:
        """Starts to copy a buffer to a consumer's rows and to the columns from the tile's `column` on, if there are."""
        first_row, first_column = self.place(tile, warpgroup)
        first_column += column
        here, across = pl.ds(first_row, WGMMA_ROWS), pl.ds(first_column, STORED_COLUMNS)
        is_inside = (first_row < self.num_rows) & (first_column < self.num_columns)
        pl.when(is_inside)(lambda: plgpu.copy_smem_to_gmem(buffer, result.at[here, across], commit_group=False))
        # Also a group of no copy: who waits for a buffer counts groups.
        plgpu.commit_smem_to_gmem_group()


def multiply_rows(
    rows: Sequence[Float[Array, "R K"]],
    matrices: Sequence[Float[Array, "G K N"]],
    groups: RowGroups,
    choice: GroupedMatmulChoice,
    *,
    transpose: bool,
    stores_all: bool = True,
) -> Float[Array, "R N"]:
    """Rows times their group's matrix, or its transpose (then matrices are `[G, N, K]`); the sum over all products.

    Rows after the last group's come out as 0, or as anything if not `stores_all`.
    """
    num_columns, num_products = matrices[0].shape[1 if transpose else 2], len(rows)
    columns = tile_columns(num_columns)
    tiles = RowTiles.of(groups, num_columns, columns, stores_all=stores_all)

    def make_phases(gmem) -> list[MatmulPhase]:
        *factors, block_groups, block_ends, result = gmem
        rows, matrices = factors[:num_products], [[each] for each in factors[num_products:]]
        here = tiles.on(block_groups, block_ends)

        def store(products, tile, warpgroup, buffers):
            start_copy = functools.partial(here.store, result, tile, warpgroup)
            pl.when(here.is_stored(tile))(lambda: store_columns(products[0], buffers, start_copy))

        operands = functools.partial(here.operands, rows=rows, matrices=matrices, transpose=transpose)
        return [MatmulPhase(tiles.num_tiles, operands, multiply_rows_by(transpose=transpose), store)]

    (product,) = launch(
        make_phases,
        (*rows, *matrices, tiles.groups, tiles.ends),
        [jax.ShapeDtypeStruct((tiles.num_rows, num_columns), rows[0].dtype)],
        stages_of_rows(columns, transpose=transpose),
        columns,
        choice,
        name="multiply_rows",
    )
    return product


def multiply_groups(
    left: Float[Array, "R K"], right: Float[Array, "R N"], groups: RowGroups, choice: GroupedMatmulChoice
) -> Float[Array, "G K N"]:
    """Of each group, the transpose of its rows on the left times its rows on the right."""
    num_groups, num_rows, num_columns = groups.sizes.size, left.shape[1], right.shape[1]
    columns = tile_columns(num_columns)
    num_across, num_down = num_columns // columns, pl.cdiv(num_rows, BLOCK_ROWS)
    pair_size = _PAIR_SIZE if num_down % _PAIR_SIZE == 0 else 1
    starts = jnp.cumsum(groups.sizes) - groups.sizes
    num_steps = -(-groups.counts // BLOCK_DEPTH)

    def make_phases(gmem) -> list[MatmulPhase]:
        left, right, starts, num_steps, result = gmem

        def place(tile):
            group, tile = div_rem(tile, num_down * num_across)
            tile, of_pair = div_rem(tile, pair_size)
            down, across = place_tile(tile, num_down // pair_size, num_across)
            return group, (pair_size * down + of_pair) * BLOCK_ROWS, across * columns

        def operands(tile) -> TileOperands:
            group, first_row, first_column = place(tile)
            start = starts[group]

            def along(step):
                return pl.ds(pl.multiple_of(start + step * BLOCK_DEPTH, BLOCK_DEPTH), BLOCK_DEPTH)

            return TileOperands(
                BLOCK_ROWS,
                [num_steps[group]],
                [lambda step: left.at[along(step), pl.ds(first_row, BLOCK_ROWS)]],
                [lambda step: [right.at[along(step), pl.ds(first_column, columns)]]],
                shares_right=True,
            )

        def multiply(accumulator, left, right, warpgroup):
            left = left.at[:, pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)]
            plgpu.wgmma(accumulator, left.transpose((1, 0)), right)

        def store(products, tile, warpgroup, buffers):
            group, first_row, first_column = place(tile)
            first_row += warpgroup * WGMMA_ROWS

            def start_copy(column, buffer):
                here, across = pl.ds(first_row, WGMMA_ROWS), pl.ds(first_column + column, STORED_COLUMNS)
                # The last tile may have rows for the first consumer alone.
                pl.when(first_row < num_rows)(lambda: plgpu.copy_smem_to_gmem(buffer, result.at[group, here, across]))

            store_columns(products[0], buffers, start_copy)

        return [MatmulPhase(num_groups * num_down * num_across, operands, multiply, store)]

    (product,) = launch(
        make_phases,
        (left, right, starts, num_steps),
        [jax.ShapeDtypeStruct((num_groups, num_rows, num_columns), left.dtype)],
        ((BLOCK_DEPTH, BLOCK_ROWS), (BLOCK_DEPTH, columns)),
        columns,
        choice,
        name="multiply_groups",
        pair_size=pair_size,
    )
    return product


def launch(
    make_phases: Callable[..., Sequence[MatmulPhase]],
    operands: tuple[Array, ...],
    results: Sequence[jax.ShapeDtypeStruct],
    stages: tuple[tuple[int, int], tuple[int, int]],
    columns: int,
    choice: GroupedMatmulChoice,
    *,
    pair_size: int = _PAIR_SIZE,
    **options: Any,
) -> tuple[Array, ...]:
    """Runs a kernel; arguments as of `launch_matmul`."""
    return launch_on(
        choice.target,
        make_phases,
        operands,
        results,
        stages,
        columns,
        interpret=choice.interpret,
        pair_size=pair_size,
        **options,
    )
