"""The Hopper kernels of grouped matmuls, in Pallas Mosaic GPU: rows by their group's matrix, and rows by rows.

A tile's operands are of one group, since groups begin at multiples of a tile's rows.

Dimensions: R rows, G groups, K and N features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.registers import WGMMA_ROWS
from kernels.grouped_matmul.row_groups import RowGroups
from kernels.persistent_matmul import (
    BLOCK_DEPTH,
    BLOCK_ROWS,
    STORED_COLUMNS,
    Phase,
    TileOperands,
    div_rem,
    launch_matmul,
    multiply_rows_by,
    place_tile,
    stages_of_rows,
    store_columns,
    tile_columns,
)
from kernels.slice_fusion import without_slice_fusion
from kernels.target import Target

if TYPE_CHECKING:
    from kernels.grouped_matmul.multiply import GroupedMatmulChoice

ALIGNMENT = BLOCK_ROWS
"""Of the groups' first rows."""
_HOPPER, _OLDEST_JAX = 9.0, (0, 11)
_INTERPRETED_PROGRAMS = 2


def unsupported_reason(
    dtype: jnp.dtype, features: tuple[int, ...], target: Target, *, interpret: bool = False
) -> str | None:
    """Why the kernels can't serve grouped matmuls between these features, or None if they can."""
    if target.compute_capability != _HOPPER and not interpret:
        return f"is for Hopper GPUs (compute capability {_HOPPER}), not for {target.device_kind}"
    if jax.__version_info__ < _OLDEST_JAX:
        return f"needs JAX {'.'.join(map(str, _OLDEST_JAX))} or later, not {jax.__version__}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, not {dtype}"
    for size in features:
        if size % BLOCK_DEPTH:
            return f"takes features in multiples of {BLOCK_DEPTH}, not {size}"
    return None


def multiply_rows(
    rows: Sequence[Float[Array, "R K"]],
    matrices: Sequence[Float[Array, "G K N"]],
    groups: RowGroups,
    choice: GroupedMatmulChoice,
    *,
    transpose: bool,
) -> Float[Array, "R N"]:
    """Rows times their group's matrix, or its transpose (then matrices are `[G, N, K]`); the sum over all products."""
    num_rows, depth = rows[0].shape
    num_columns, num_products = matrices[0].shape[1 if transpose else 2], len(rows)
    columns = tile_columns(num_columns)
    num_across = num_columns // columns
    ends = jnp.cumsum(groups.sizes)
    firsts = jnp.arange(num_rows // BLOCK_ROWS, dtype=jnp.int32) * BLOCK_ROWS
    # The group of each block of rows; as many as there are groups: none.
    block_groups = jnp.searchsorted(ends, firsts, side="right", method="compare_all").astype(jnp.int32)
    # Where the rows of each block's group end that don't pad it, from the block's first row.
    block_ends = (ends - groups.sizes + groups.counts)[jnp.minimum(block_groups, ends.size - 1)] - firsts

    def make_phases(gmem) -> list[Phase]:
        *factors, block_groups, block_ends, result = gmem

        def place(tile):
            block, across = place_tile(tile, num_rows // BLOCK_ROWS, num_across)
            return block, across * columns

        def operands(tile) -> TileOperands:
            block, first_column = place(tile)
            group = block_groups[block]
            here, across = pl.ds(block * BLOCK_ROWS, BLOCK_ROWS), pl.ds(first_column, columns)

            def left(rows, step):
                return rows.at[here, pl.ds(step * BLOCK_DEPTH, BLOCK_DEPTH)]

            def right(matrices, step):
                along = pl.ds(step * BLOCK_DEPTH, BLOCK_DEPTH)
                return matrices.at[group, across, along] if transpose else matrices.at[group, along, across]

            return TileOperands(
                block_ends[block],
                [jnp.where(group < ends.size, depth // BLOCK_DEPTH, 0)] * num_products,
                [functools.partial(left, rows) for rows in factors[:num_products]],
                [functools.partial(right, matrices) for matrices in factors[num_products:]],
            )

        def store(product, tile, warpgroup, buffers):
            block, first_column = place(tile)
            here = pl.ds(block * BLOCK_ROWS + warpgroup * WGMMA_ROWS, WGMMA_ROWS)

            def start_copy(column, buffer):
                plgpu.copy_smem_to_gmem(buffer, result.at[here, pl.ds(first_column + column, STORED_COLUMNS)])

            store_columns(product, buffers, start_copy)

        return [Phase(num_rows // BLOCK_ROWS * num_across, operands, multiply_rows_by(transpose=transpose), store)]

    stages = stages_of_rows(columns, transpose=transpose)
    result = jax.ShapeDtypeStruct((num_rows, num_columns), rows[0].dtype)
    return _launch(make_phases, (*rows, *matrices, block_groups, block_ends), result, stages, columns, choice)


def multiply_groups(
    left: Float[Array, "R K"], right: Float[Array, "R N"], groups: RowGroups, choice: GroupedMatmulChoice
) -> Float[Array, "G K N"]:
    """Of each group, the transpose of its rows on the left times its rows on the right."""
    num_groups, num_rows, num_columns = groups.sizes.size, left.shape[1], right.shape[1]
    columns = tile_columns(num_columns)
    num_across, num_down = num_columns // columns, pl.cdiv(num_rows, BLOCK_ROWS)
    starts = jnp.cumsum(groups.sizes) - groups.sizes
    num_steps = pl.cdiv(groups.counts, BLOCK_DEPTH)

    def make_phases(gmem) -> list[Phase]:
        left, right, starts, num_steps, result = gmem

        def place(tile):
            group, tile = div_rem(tile, num_down * num_across)
            down, across = place_tile(tile, num_down, num_across)
            return group, down * BLOCK_ROWS, across * columns

        def operands(tile) -> TileOperands:
            group, first_row, first_column = place(tile)
            start = starts[group]

            def along(step):
                return pl.ds(pl.multiple_of(start + step * BLOCK_DEPTH, BLOCK_DEPTH), BLOCK_DEPTH)

            return TileOperands(
                BLOCK_ROWS,
                [num_steps[group]],
                [lambda step: left.at[along(step), pl.ds(first_row, BLOCK_ROWS)]],
                [lambda step: right.at[along(step), pl.ds(first_column, columns)]],
            )

        def multiply(accumulator, left, right, warpgroup):
            left = left.at[:, pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)]
            plgpu.wgmma(accumulator, left.transpose((1, 0)), right)

        def store(product, tile, warpgroup, buffers):
            group, first_row, first_column = place(tile)
            first_row += warpgroup * WGMMA_ROWS

            def start_copy(column, buffer):
                here, across = pl.ds(first_row, WGMMA_ROWS), pl.ds(first_column + column, STORED_COLUMNS)
                # The last tile may have rows for the first consumer alone.
                pl.when(first_row < num_rows)(lambda: plgpu.copy_smem_to_gmem(buffer, result.at[group, here, across]))

            store_columns(product, buffers, start_copy)

        return [Phase(num_groups * num_down * num_across, operands, multiply, store)]

    stages = (BLOCK_DEPTH, BLOCK_ROWS), (BLOCK_DEPTH, columns)
    result = jax.ShapeDtypeStruct((num_groups, num_rows, num_columns), left.dtype)
    return _launch(make_phases, (left, right, starts, num_steps), result, stages, columns, choice)


def _launch(
    make_phases: Callable[[Any], Sequence[Phase]],
    operands: tuple[Array, ...],
    result: jax.ShapeDtypeStruct,
    stages: tuple[tuple[int, int], tuple[int, int]],
    columns: int,
    choice: GroupedMatmulChoice,
) -> Array:
    """Runs a kernel, whose stages of the left and the right operand have these shapes."""
    num_programs = _INTERPRETED_PROGRAMS if choice.interpret else choice.target.num_multiprocessors
    assert num_programs is not None, f"{choice.target} is a GPU"
    # New in JAX 0.11.
    interpret = plgpu.InterpretGPUParams() if choice.interpret else None  # type: ignore[attr-defined]
    results = launch_matmul(
        make_phases, operands, [result], stages, columns, num_programs, name="grouped_matmul", interpret=interpret
    )
    return without_slice_fusion(*results)[0]
