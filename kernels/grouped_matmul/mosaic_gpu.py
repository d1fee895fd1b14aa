"""The Hopper kernels of grouped matmuls, in Pallas Mosaic GPU: rows by their group's matrix, and rows by rows.

Persistent programs compute one tile of the result after another. A producer warpgroup copies the operands' tiles to a
ring of stages in shared memory, ahead of two consumers, which compute 64 rows of the result each. A tile's operands are
of one group, since groups begin at multiples of a tile's rows.

Source: the persistent warp-specialized matmuls of CUTLASS.

Dimensions: R rows, G groups, K and N features.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.machine import fix_dump_name
from kernels.backends.mosaic_gpu.memory import Pipeline, matrix
from kernels.backends.mosaic_gpu.registers import WGMMA_ROWS, accumulator
from kernels.grouped_matmul.row_groups import RowGroups
from kernels.target import Target

if TYPE_CHECKING:
    from kernels.grouped_matmul.multiply import GroupedMatmulChoice

BLOCK_ROWS = 128
"""Rows of a tile: groups begin at multiples of it."""
_NUM_CONSUMERS = 2
_BLOCK_DEPTH = 64
_NUM_STAGES = 4
_COLUMNS = (256, 192, 128, 64)  # of a tile: the most that divide the result's
_PANEL = 8  # tiles
_STORED_COLUMNS, _STORE_BUFFERS = 64, 2
_COMPUTE_REGISTERS, _LOAD_REGISTERS = 240, 24
_HOPPER, _OLDEST_JAX = 9.0, (0, 11)
_INTERPRETED_PROGRAMS = 2

_Smem = namedtuple("_Smem", "left right stored")


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
        if size % _BLOCK_DEPTH:
            return f"takes features in multiples of {_BLOCK_DEPTH}, not {size}"
    return None


class _Operands(NamedTuple):
    """References to a tile's operands in global memory, by the step along the sum.

    A sum over several products has as many references on each side, and `num_steps` is that of each product. Rows of
    the tile from `num_rows` on need no product.
    """

    num_rows: Any
    num_steps: Any
    left: Sequence[Callable[[Any], Any]]
    right: Sequence[Callable[[Any], Any]]

    @property
    def total_steps(self) -> Any:
        """Steps of all products."""
        return self.num_steps * len(self.left)


class _Kernel(NamedTuple):
    """What differs between the two kernels.

    Attributes:
      num_tiles: of the result.
      operands: a tile's.
      multiply: (accumulator, left stage, right stage, warpgroup) → issues the product of a step.
      store: (tile, warpgroup, columns, shared memory) → starts to copy some columns of a tile to the result.
    """

    num_tiles: int
    operands: Callable[[Any], _Operands]
    multiply: Callable[..., None]
    store: Callable[..., None]


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
    columns = _tile_columns(num_columns)
    num_across = num_columns // columns
    ends = jnp.cumsum(groups.sizes)
    firsts = jnp.arange(num_rows // BLOCK_ROWS, dtype=jnp.int32) * BLOCK_ROWS
    # The group of each block of rows; as many as there are groups: none.
    block_groups = jnp.searchsorted(ends, firsts, side="right", method="compare_all").astype(jnp.int32)
    # Where the rows of each block's group end that don't pad it, from the block's first row.
    block_ends = (ends - groups.sizes + groups.counts)[jnp.minimum(block_groups, ends.size - 1)] - firsts

    def make_kernel(gmem) -> _Kernel:
        *factors, block_groups, block_ends, result = gmem

        def place(tile):
            block, across = _place(tile, num_rows // BLOCK_ROWS, num_across)
            return block, across * columns

        def operands(tile) -> _Operands:
            block, first_column = place(tile)
            group = block_groups[block]
            here, across = pl.ds(block * BLOCK_ROWS, BLOCK_ROWS), pl.ds(first_column, columns)

            def left(rows, step):
                return rows.at[here, pl.ds(step * _BLOCK_DEPTH, _BLOCK_DEPTH)]

            def right(matrices, step):
                along = pl.ds(step * _BLOCK_DEPTH, _BLOCK_DEPTH)
                return matrices.at[group, across, along] if transpose else matrices.at[group, along, across]

            return _Operands(
                block_ends[block],
                jnp.where(group < ends.size, depth // _BLOCK_DEPTH, 0),
                [functools.partial(left, rows) for rows in factors[:num_products]],
                [functools.partial(right, matrices) for matrices in factors[num_products:]],
            )

        def multiply(accumulator, left, right, warpgroup):
            left = left.at[pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)]
            plgpu.wgmma(accumulator, left, right.transpose((1, 0)) if transpose else right)

        def store(tile, warpgroup, column, stored):
            block, first_column = place(tile)
            here = pl.ds(block * BLOCK_ROWS + warpgroup * WGMMA_ROWS, WGMMA_ROWS)
            plgpu.copy_smem_to_gmem(stored, result.at[here, pl.ds(first_column + column, _STORED_COLUMNS)])

        return _Kernel(num_rows // BLOCK_ROWS * num_across, operands, multiply, store)

    stages = (
        (BLOCK_ROWS, _BLOCK_DEPTH),
        (columns, _BLOCK_DEPTH) if transpose else (_BLOCK_DEPTH, columns),
    )
    result = jax.ShapeDtypeStruct((num_rows, num_columns), rows[0].dtype)
    return _launch(make_kernel, (*rows, *matrices, block_groups, block_ends), result, stages, columns, choice)


def multiply_groups(
    left: Float[Array, "R K"], right: Float[Array, "R N"], groups: RowGroups, choice: GroupedMatmulChoice
) -> Float[Array, "G K N"]:
    """Of each group, the transpose of its rows on the left times its rows on the right."""
    num_groups, num_rows, num_columns = groups.sizes.size, left.shape[1], right.shape[1]
    columns = _tile_columns(num_columns)
    num_across, num_down = num_columns // columns, pl.cdiv(num_rows, BLOCK_ROWS)
    starts = jnp.cumsum(groups.sizes) - groups.sizes
    num_steps = pl.cdiv(groups.counts, _BLOCK_DEPTH)

    def make_kernel(gmem) -> _Kernel:
        left, right, starts, num_steps, result = gmem

        def place(tile):
            group, tile = _div_rem(tile, num_down * num_across)
            down, across = _place(tile, num_down, num_across)
            return group, down * BLOCK_ROWS, across * columns

        def operands(tile) -> _Operands:
            group, first_row, first_column = place(tile)
            start = starts[group]

            def along(step):
                return pl.ds(pl.multiple_of(start + step * _BLOCK_DEPTH, _BLOCK_DEPTH), _BLOCK_DEPTH)

            return _Operands(
                BLOCK_ROWS,
                num_steps[group],
                [lambda step: left.at[along(step), pl.ds(first_row, BLOCK_ROWS)]],
                [lambda step: right.at[along(step), pl.ds(first_column, columns)]],
            )

        def multiply(accumulator, left, right, warpgroup):
            left = left.at[:, pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)]
            plgpu.wgmma(accumulator, left.transpose((1, 0)), right)

        def store(tile, warpgroup, column, stored):
            group, first_row, first_column = place(tile)
            first_row += warpgroup * WGMMA_ROWS
            here, across = pl.ds(first_row, WGMMA_ROWS), pl.ds(first_column + column, _STORED_COLUMNS)
            # The last tile may have rows for the first consumer alone.
            pl.when(first_row < num_rows)(lambda: plgpu.copy_smem_to_gmem(stored, result.at[group, here, across]))

        return _Kernel(num_groups * num_down * num_across, operands, multiply, store)

    stages = (_BLOCK_DEPTH, BLOCK_ROWS), (_BLOCK_DEPTH, columns)
    result = jax.ShapeDtypeStruct((num_groups, num_rows, num_columns), left.dtype)
    return _launch(make_kernel, (left, right, starts, num_steps), result, stages, columns, choice)


def _place(index, num_down: int, num_across: int) -> tuple[Any, Any]:
    """The place of a tile, by its number. Tiles go down a panel that is a few tiles wide, and then down the next.

    So tiles that are computed at the same time share both operands in the L2 cache.
    """
    panel, index = _div_rem(index, num_down * _PANEL)
    first = panel * _PANEL
    width = min(_PANEL, num_across) if num_across % _PANEL == 0 else jnp.minimum(_PANEL, num_across - first)
    down, across = _div_rem(index, width)
    return down, first + across


def _div_rem(a, b) -> tuple[Any, Any]:
    b = jnp.int32(b)
    return jax.lax.div(a, b), jax.lax.rem(a, b)


def _tile_columns(num_columns: int) -> int:
    return next(columns for columns in _COLUMNS if num_columns % columns == 0)


def _launch(
    make_kernel: Callable[[Any], _Kernel],
    operands: tuple[Array, ...],
    result: jax.ShapeDtypeStruct,
    stages: tuple[tuple[int, int], tuple[int, int]],
    columns: int,
    choice: GroupedMatmulChoice,
) -> Array:
    """Runs a kernel, whose stages of the left and the right operand have these shapes."""
    dtype = result.dtype
    smem = _Smem(
        left=matrix(_NUM_STAGES, *stages[0], dtype=dtype),
        right=matrix(_NUM_STAGES, *stages[1], dtype=dtype),
        stored=matrix(_NUM_CONSUMERS, _STORE_BUFFERS, WGMMA_ROWS, _STORED_COLUMNS, dtype=dtype),
    )
    ring = Pipeline.memory(_NUM_STAGES, num_consumers=_NUM_CONSUMERS, num_copies=2)
    num_programs = _INTERPRETED_PROGRAMS if choice.interpret else choice.target.num_multiprocessors
    assert num_programs is not None, f"{choice.target} is a GPU"

    def body(*refs):
        *gmem, smem, ring = refs
        if not choice.interpret:
            fix_dump_name("_".join(("grouped_matmul", *map(str, result.shape))))
        kernel = make_kernel(gmem)
        warpgroup = jax.lax.axis_index("warpgroup")
        visit_tiles = functools.partial(_visit_tiles, kernel, num_programs)

        @pl.when(warpgroup == _NUM_CONSUMERS)
        def produce():
            plgpu.set_max_registers(_LOAD_REGISTERS, action="decrease")
            num_steps = visit_tiles(functools.partial(_load_tile, kernel, smem, ring))
            ring.producer_tail(num_steps)

        @pl.when(warpgroup < _NUM_CONSUMERS)
        def consume():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            visit_tiles(functools.partial(_multiply_tile, kernel, smem, ring, warpgroup, columns))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        out_type=[result],
        scratch_types=(smem, ring),
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=_NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        # New in JAX 0.11.
        interpret=plgpu.InterpretGPUParams() if choice.interpret else None,  # type: ignore[attr-defined]
    )(*operands)[0]


def _visit_tiles(kernel: _Kernel, num_programs: int, visit: Callable[[Any, _Operands, Any], None]) -> jax.Array:
    """Calls `visit(tile, operands, steps before it)` for each tile of this program; returns the number of steps."""
    program = jax.lax.axis_index("program")

    def next_tile(i, num_before):
        tile = program + i * num_programs
        operands = kernel.operands(tile)
        visit(tile, operands, num_before)
        return num_before + operands.total_steps

    num_tiles = jax.lax.div(kernel.num_tiles - program + (num_programs - 1), jnp.int32(num_programs))
    return jax.lax.fori_loop(0, num_tiles, next_tile, jnp.int32(0))


def _load_tile(kernel: _Kernel, smem: _Smem, ring: Pipeline, tile, operands: _Operands, num_before) -> None:
    """Producer: copies the operands of a tile into the ring."""
    for i, (left, right) in enumerate(zip(operands.left, operands.right, strict=True)):

        @pl.loop(0, operands.num_steps)
        def copy(step, before=i * operands.num_steps, left=left, right=right):
            step_of_all = num_before + before + step
            slot = ring.slot(step_of_all)
            ring.producer_acquire(step_of_all, slot)
            ring.copy(left(step), smem.left, slot)
            ring.copy(right(step), smem.right, slot)


def _multiply_tile(
    kernel: _Kernel, smem: _Smem, ring: Pipeline, warpgroup, columns: int, tile, operands: _Operands, num_before
) -> None:
    """Consumer: its 64 rows of a tile."""
    has_rows = warpgroup * WGMMA_ROWS < operands.num_rows
    num_steps = jnp.where(has_rows, operands.total_steps, 0)

    # The tensor cores are the other consumer's then.
    @pl.loop(0, operands.total_steps - num_steps)
    def skip(step):
        slot = ring.slot(num_before + step)
        ring.consumer_wait(slot)
        ring.consumer_release(slot)

    def multiply(acc):
        def next_step(step, _):
            slot = ring.slot(num_before + step)
            ring.consumer_wait(slot)
            kernel.multiply(acc, smem.left.at[slot], smem.right.at[slot], warpgroup)
            # One product may be on its way. The one before it has read its stage.
            plgpu.wgmma_wait(1)
            pl.when(step > 0)(lambda: ring.consumer_release(ring.slot(num_before + step - 1)))
            return ()

        jax.lax.fori_loop(0, num_steps, next_step, ())
        product = plgpu.wgmma_accumulator_load(acc, wait_n=0)
        pl.when(num_steps > 0)(lambda: ring.consumer_release(ring.slot(num_before + num_steps - 1)))
        _store(kernel, smem.stored.at[warpgroup], product.astype(smem.stored.dtype), tile, warpgroup, columns)

    pl.run_scoped(multiply, accumulator(columns))


def _store(kernel: _Kernel, stored, product, tile, warpgroup, columns: int) -> None:
    """Copies a consumer's rows to the result, some columns at a time."""
    for i in range(columns // _STORED_COLUMNS):
        buffer, column = stored.at[i % _STORE_BUFFERS], i * _STORED_COLUMNS
        # The copy engine has read what the buffer held. At the first columns, that is the last tile's.
        plgpu.wait_smem_to_gmem(_STORE_BUFFERS - 1 if i else 0, wait_read_only=True)
        buffer[...] = product[:, column : column + _STORED_COLUMNS]
        plgpu.commit_smem()
        kernel.store(tile, warpgroup, column, buffer)
