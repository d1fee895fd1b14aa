"""Persistent programs that compute one tile of a matmul's result after another, in Pallas Mosaic GPU for Hopper GPUs.

A producer warpgroup copies the operands' tiles to a ring of stages in shared memory, ahead of two consumers, which
compute 64 rows of a tile each. What the operands of a tile are, and where its rows go, is a kernel's own.

Source: the persistent warp-specialized matmuls of CUTLASS.
"""

from __future__ import annotations

import functools
import operator
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from kernels.hopper.begin_kernel import begin_kernel
from kernels.hopper.memory import Pipeline, matrix
from kernels.hopper.registers import WGMMA_ROWS, accumulator
from kernels.tracing.number_types import types_of_32_bits
from kernels.tracing.slice_fusion import without_slice_fusion
from kernels.tracing.target import Target

BLOCK_ROWS = 128
"""Rows of a tile."""
BLOCK_DEPTH = 64
"""Features that a step along the sum multiplies."""
NUM_CONSUMERS = 2
STORED_COLUMNS, STORE_BUFFERS = 64, 2
"""Columns that a consumer stores at a time, and the buffers that they leave through."""
_NUM_STAGES = 4
_COLUMNS = (256, 192, 128, 64)  # of a tile: the most that divide the result's
_PANEL = 8  # tiles
_COMPUTE_REGISTERS, _LOAD_REGISTERS = 240, 24
_HOPPER, _OLDEST_JAX = 9.0, (0, 11)
_INTERPRETED_PROGRAMS = 2

_Smem = namedtuple("_Smem", "left right stored")


class TileOperands(NamedTuple):
    """References to a tile's operands in global memory, by the step along the sum.

    A sum over several products has as many references on each side, and numbers of steps. On the right a step has a
    reference for each matrix that the kernel multiplies the left operand by. Rows of the tile from `num_rows` on need
    no product.

    Where programs are paired, a pair's two tiles have the same numbers of steps. `shares_right` says whether they have
    the same operands on the right, which are then loaded once for both.
    """

    num_rows: Any
    num_steps: Sequence[Any]
    left: Sequence[Callable[[Any], Any]]
    right: Sequence[Callable[[Any], Sequence[Any]]]
    shares_right: Any = False

    @property
    def total_steps(self) -> Any:
        """Steps of all products."""
        return functools.reduce(operator.add, self.num_steps)


class MatmulPhase(NamedTuple):
    """Tiles that a kernel computes in the same way. Programs go on to the next phase's tiles without a break.

    Attributes:
      num_tiles: of the phase, shared out among the programs.
      operands: a tile's.
      multiply: (accumulator, left stage, right stage, warpgroup) → issues the product of a step.
      store: (products, tile, warpgroup, buffers) → stores a consumer's rows of a tile, by way of its buffers in shared
        memory; there is a product by each matrix, `[64, columns]`, float32.
      before_loads: (tile) → what the producer does before it copies a tile's operands.
      before_steps: (tile, warpgroup, buffers) → what a consumer does before a tile's steps.
      in_step: (tile, step, left stage, warpgroup) → what a consumer does while a step's product is computed. If it
        starts to copy stages, it waits in each step until the copy of the stage before has been read: that stage is
        loaded anew after this step (`wait_smem_to_gmem(1, wait_read_only=True)`).
      after_steps: (tile, warpgroup) → what it does after a tile's steps, before the last stage is loaded anew.
      finish: (last of the program's tiles, or less than 0; warpgroup) → what a consumer does after the phase.
    """

    num_tiles: int
    operands: Callable[[Any], TileOperands]
    multiply: Callable[..., None]
    store: Callable[..., None]
    before_loads: Callable[..., None] = lambda *_: None
    before_steps: Callable[..., None] = lambda *_: None
    in_step: Callable[..., None] = lambda *_: None
    after_steps: Callable[..., None] = lambda *_: None
    finish: Callable[..., None] = lambda *_: None


def unsupported_reason(
    dtype: jnp.dtype,
    dtypes: Sequence[jax.typing.DTypeLike],
    features: Sequence[int],
    target: Target,
    *,
    interpret: bool = False,
) -> str | None:
    """Why a kernel can't multiply on a device, or None if it can.

    Args:
      dtype: of the operands.
      dtypes: those that the kernel takes.
      features: of the operands and of the result.
      target: the device.
      interpret: whether Pallas's interpreter runs the kernel, on any device.
    """
    if target.compute_capability != _HOPPER and not interpret:
        return f"is for Hopper GPUs (compute capability {_HOPPER}), not for {target.device_kind}"
    if jax.__version_info__ < _OLDEST_JAX:
        return f"needs JAX {'.'.join(map(str, _OLDEST_JAX))} or later, not {jax.__version__}"
    if dtype not in (taken := [jnp.dtype(each) for each in dtypes]):
        return f"takes {' and '.join(map(str, taken))}, not {dtype}"
    for size in features:
        if size % BLOCK_DEPTH:
            return f"takes features in multiples of {BLOCK_DEPTH}, not {size}"
    return None


def place_tile(index, num_down: int, num_across: int) -> tuple[Any, Any]:
    """The place of a tile, by its number. Tiles go down a panel that is a few tiles wide, and then down the next.

    So tiles that are computed at the same time share both operands in the L2 cache.
    """
    panel, index = div_rem(index, num_down * _PANEL)
    first = panel * _PANEL
    width = min(_PANEL, num_across) if num_across % _PANEL == 0 else jnp.minimum(_PANEL, num_across - first)
    down, across = div_rem(index, width)
    return down, first + across


def div_rem(a, b) -> tuple[Any, Any]:
    """Quotient and remainder of int32 that aren't negative."""
    b = jnp.int32(b)
    return jax.lax.div(a, b), jax.lax.rem(a, b)


def tile_columns(num_columns: int) -> int:
    """Columns of a tile, of a result that has a multiple of 64."""
    return next(columns for columns in _COLUMNS if num_columns % columns == 0)


def stages_of_rows(columns: int, *, transpose: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of a stage of rows and of a matrix, or of a matrix whose transpose they are multiplied by."""
    return (BLOCK_ROWS, BLOCK_DEPTH), (columns, BLOCK_DEPTH) if transpose else (BLOCK_DEPTH, columns)


def multiply_rows_by(*, transpose: bool) -> Callable[..., None]:
    """The `multiply` of a `MatmulPhase` whose left operands are rows and whose right ones are matrices."""

    def multiply(accumulator, left, right, warpgroup):
        left = left.at[pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)]
        plgpu.wgmma(accumulator, left, right.transpose((1, 0)) if transpose else right)

    return multiply


def store_columns(product, buffers, start_copy: Callable[[int, Any], None]) -> None:
    """Copies a consumer's rows to global memory, some columns at a time.

    Args:
      product: `[64, columns]`.
      buffers: of the consumer.
      start_copy: (first column, buffer) → starts to copy a buffer.
    """
    columns = range(0, product.shape[1], STORED_COLUMNS)
    parts = (
        (product[:, column : column + STORED_COLUMNS], functools.partial(start_copy, column)) for column in columns
    )
    store_parts(parts, buffers)


def store_parts(parts: Iterable[tuple[Any, Callable[[Any], None]]], buffers) -> None:
    """Copies parts of a consumer's rows to global memory.

    Args:
      parts: each `[64, STORED_COLUMNS]`, and what starts to copy the buffer that it is put in.
      buffers: of the consumer.
    """
    for i, (part, start_copy) in enumerate(parts):
        buffer = buffers.at[i % STORE_BUFFERS]
        # The copy engine has read what the buffer held. At the first part, that is the last tile's.
        plgpu.wait_smem_to_gmem(STORE_BUFFERS - 1 if i else 0, wait_read_only=True)
        buffer[...] = part.astype(buffers.dtype)
        plgpu.commit_smem()
        start_copy(buffer)


def launch_on(
    target: Target,
    make_phases: Callable[..., Sequence[MatmulPhase]],
    operands: tuple[Array, ...],
    outputs: Sequence[jax.ShapeDtypeStruct],
    stages: tuple[tuple[int, int], tuple[int, int]],
    columns: int,
    *,
    interpret: bool,
    **options: Any,
) -> tuple[Array, ...]:
    """Runs a kernel that is one device's own, with a program on each multiprocessor; or in Pallas's interpreter.

    The other arguments are those of `launch_matmul`.
    """
    num_programs = _INTERPRETED_PROGRAMS if interpret else target.num_multiprocessors
    assert num_programs is not None, f"{target} is a GPU"
    # New in JAX 0.11.
    parameters = plgpu.InterpretGPUParams() if interpret else None  # type: ignore[attr-defined]
    results = launch_matmul(
        make_phases, operands, outputs, stages, columns, num_programs, interpret=parameters, **options
    )
    return without_slice_fusion(*results)


@types_of_32_bits()
def launch_matmul(
    make_phases: Callable[..., Sequence[MatmulPhase]],
    operands: tuple[Array, ...],
    outputs: Sequence[jax.ShapeDtypeStruct],
    stages: tuple[tuple[int, int], tuple[int, int]],
    columns: int,
    num_programs: int,
    *,
    name: str,
    scratch: Sequence[Any] = (),
    num_matrices: int = 1,
    pair_size: int = 1,
    interpret: Any = None,
) -> Sequence[Array]:
    """Runs a kernel.

    Args:
      make_phases: (references to operands and outputs, references to `scratch`) → the kernel's phases.
      operands: arrays.
      outputs: the first one of the dtype that products are computed and stored in.
      stages: shapes of a stage of the left and of the right operand.
      columns: of a tile.
      num_programs: as many as run at the same time, one to a multiprocessor. They may wait for each other.
      name: of the kernel, in profilers and dumps.
      scratch: memory and barriers that the kernel needs besides.
      num_matrices: that each left operand is multiplied by.
      pair_size: programs that share operands, 1 or 2. Two compute tiles 2·i and 2·i + 1 at the same time, and each
        phase has an even number of tiles.
      interpret: parameters of Pallas's interpreter; None on a GPU.
    """
    dtype = outputs[0].dtype
    smem = _Smem(
        left=matrix(_NUM_STAGES, *stages[0], dtype=dtype),
        right=matrix(_NUM_STAGES, num_matrices, *stages[1], dtype=dtype),
        stored=matrix(NUM_CONSUMERS, STORE_BUFFERS, WGMMA_ROWS, STORED_COLUMNS, dtype=dtype),
    )
    pair_axis = "of_pair" if pair_size > 1 else None
    ring = Pipeline.memory(
        _NUM_STAGES, num_consumers=NUM_CONSUMERS, num_copies=1 + num_matrices, cluster_axis=pair_axis
    )
    num_programs = num_programs // pair_size * pair_size

    def body(*refs):
        gmem, (smem, ring, *own) = refs[: len(operands) + len(outputs)], refs[len(operands) + len(outputs) :]
        if interpret is None:
            begin_kernel(name, outputs[0])
        phases = make_phases(gmem, *own)
        warpgroup, program = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("program")
        if pair_axis is not None:
            program = program * pair_size + jax.lax.axis_index(pair_axis)

        @pl.when(warpgroup == NUM_CONSUMERS)
        def produce():
            plgpu.set_max_registers(_LOAD_REGISTERS, action="decrease")
            num_steps = _visit_tiles(
                phases, program, num_programs, functools.partial(_load_tile, smem, ring, pair_axis)
            )
            ring.producer_tail(num_steps)

        @pl.when(warpgroup < NUM_CONSUMERS)
        def consume():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            multiply_tile = functools.partial(_multiply_tile, smem, ring, pair_axis, warpgroup, columns)
            _visit_tiles(
                phases, program, num_programs, multiply_tile, lambda phase, tile: phase.finish(tile, warpgroup)
            )
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=list(outputs),
        scratch_types=(smem, ring, *scratch),
        grid=(num_programs // pair_size,),
        grid_names=("program",),
        cluster=(pair_size,) if pair_axis else (),
        cluster_names=(pair_axis,) if pair_axis else (),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        # exp and 1/√x, of which activations are made, as the hardware has them: results are rounded to 16 bits.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(*operands)


def _visit_tiles(
    phases: Sequence[MatmulPhase],
    program: Any,
    num_programs: int,
    visit: Callable[[MatmulPhase, Any, TileOperands, Any], None],
    finish: Callable[[MatmulPhase, Any], None] = lambda *_: None,
) -> jax.Array:
    """Visits the tiles of this program, every `num_programs`th of all phases'; returns the number of steps.

    Args:
      visit: of (phase, tile, its operands, steps before it).
      finish: of (phase, last of the program's tiles), after each phase.
    """
    num_before, num_steps = 0, jnp.int32(0)
    for phase in phases:

        def next_tile(i, num_steps, phase=phase, num_before=num_before):
            tile = program + i * num_programs - num_before
            operands = phase.operands(tile)
            visit(phase, tile, operands, num_steps)
            return num_steps + operands.total_steps

        first, end = (
            jax.lax.div(before - program + (num_programs - 1), jnp.int32(num_programs))
            for before in (num_before, num_before + phase.num_tiles)
        )
        num_steps = jax.lax.fori_loop(first, end, next_tile, num_steps)
        finish(phase, program + (end - 1) * num_programs - num_before)
        num_before += phase.num_tiles
    return num_steps


def _load_tile(
    smem: _Smem, ring: Pipeline, pair_axis: str | None, phase: MatmulPhase, tile, operands: TileOperands, num_before
) -> None:
    """Producer: copies the operands of a tile into the ring."""
    phase.before_loads(tile)
    for num_steps, left, right in zip(operands.num_steps, operands.left, operands.right, strict=True):

        @pl.loop(0, num_steps)
        def copy(step, before=num_before, left=left, right=right):
            step_of_all = before + step
            slot = ring.slot(step_of_all)
            ring.producer_acquire(step_of_all, slot)
            ring.copy(left(step), smem.left, slot)

            def copy_right(cluster_axis: str | None = None):
                for i, part in enumerate(right(step)):
                    ring.copy(part, smem.right.at[:, i], slot, cluster_axis)

            if pair_axis is None or operands.shares_right is False:
                copy_right()
            elif operands.shares_right is True:
                copy_right(pair_axis)
            else:
                pl.when(operands.shares_right)(lambda: copy_right(pair_axis))
                pl.when(jnp.logical_not(operands.shares_right))(copy_right)

        num_before += num_steps


def _multiply_tile(
    smem: _Smem,
    ring: Pipeline,
    pair_axis: str | None,
    warpgroup,
    columns: int,
    phase: MatmulPhase,
    tile,
    operands: TileOperands,
    num_before,
) -> None:
    """Consumer: its 64 rows of a tile."""
    phase.before_steps(tile, warpgroup, smem.stored.at[warpgroup])
    has_rows = warpgroup * WGMMA_ROWS < operands.num_rows
    num_steps = jnp.where(has_rows, operands.total_steps, 0)

    # The tensor cores are the other consumer's then.
    @pl.loop(0, operands.total_steps - num_steps)
    def skip(step):
        slot = ring.slot(num_before + step)
        ring.consumer_wait(slot)
        if pair_axis is not None:
            # At a cluster's barrier one warp arrives for all of a warpgroup, which must all have waited by then. The
            # fence is one for its threads, too.
            plgpu.commit_smem()
        ring.consumer_release(slot)

    def multiply(*accumulators):
        def next_step(step, _):
            slot = ring.slot(num_before + step)
            ring.consumer_wait(slot)
            for i, acc in enumerate(accumulators):
                phase.multiply(acc, smem.left.at[slot], smem.right.at[slot, i], warpgroup)
            phase.in_step(tile, step, smem.left.at[slot], warpgroup)
            # One step's products may be on their way. Those before them have read their stage.
            plgpu.wgmma_wait(len(accumulators))
            pl.when(step > 0)(lambda: ring.consumer_release(ring.slot(num_before + step - 1)))
            return ()

        jax.lax.fori_loop(0, num_steps, next_step, ())
        products = [plgpu.wgmma_accumulator_load(acc, wait_n=0) for acc in accumulators]
        phase.after_steps(tile, warpgroup)
        pl.when(num_steps > 0)(lambda: ring.consumer_release(ring.slot(num_before + num_steps - 1)))
        phase.store(products, tile, warpgroup, smem.stored.at[warpgroup])

    pl.run_scoped(multiply, *[accumulator(columns)] * smem.right.shape[1])
