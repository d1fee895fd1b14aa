"""Registers: a warpgroup's accumulators and vectors, and what depends on which thread holds which elements of them.

Four threads share a row of an accumulator. Each thread sums up its own elements of it. The parts are joined once, when
a row is done.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm
from jaxlib.mlir.dialects import vector as vectors
from jaxtyping import Array, Bool, Float, Int

WGMMA_ROWS = 64
"""Rows of a WGMMA tile: a warpgroup's matmul."""
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
"""Layout of one number for each row of an accumulator."""
# A thread's registers hold two neighbouring columns each, alternately of two rows. Four threads share eight columns of
# a row.
_ROWS_OF_A_THREAD, _THREADS_OF_A_ROW, _COLUMNS_OF_A_THREAD = 2, 4, 2
_ROW_SUMS = plgpu.ShapeDtypeStruct((WGMMA_ROWS,), jnp.float32, ROW_LAYOUT)
_ALL_LANES = 0xFFFFFFFF


def accumulator(num_columns: int) -> plgpu.WGMMAAccumulatorRef:
    """A warpgroup's float32 accumulator `[64, num_columns]`.

    Allocate it where everything is there that its first product reads: the assembler leaves out the zeros only if the
    product follows at once, with no wait in between.
    """
    return plgpu.WGMMAAccumulatorRef((WGMMA_ROWS, num_columns), jnp.float32)


def load_vector(ref, *, rows: bool, shared: bool = True) -> jax.Array:
    """Loads a vector from shared or else global memory: one number for each row of a matrix, or for each column."""
    layout = ROW_LAYOUT if rows else plgpu.Layout.WGMMA.reduce(0)
    return plgpu.load(ref, layout=layout, optimized=shared)  # type: ignore[call-arg]  # as JAX 0.10 has it


def load_matrix(ref, *, shared: bool) -> jax.Array:
    """Loads a matrix from shared or else global memory, as an accumulator's registers hold it."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=shared)  # type: ignore[call-arg]  # as JAX 0.10 has it


def store_matrix(ref, matrix) -> None:
    """Stores a matrix to global memory as an accumulator's registers hold it: 16-bit numbers in halves of sectors."""
    if hasattr(plgpu, "store"):
        # New in JAX 0.12, which refuses such a store otherwise.
        plgpu.store(ref, matrix, optimized=False)
    else:
        ref[...] = matrix


def zeros(num_columns: int, dtype) -> jax.Array:
    """A warpgroup's zeros `[64, num_columns]`, as an accumulator's registers hold them."""
    return plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, num_columns), dtype), plgpu.Layout.WGMMA)


def spread(vector, shape, *, rows: bool) -> jax.Array:
    """A vector as a matrix: one number for each row, or for each column."""
    return jax.lax.broadcast_in_dim(vector, shape, [0 if rows else 1])


def partial_sums(p: Float[Array, "rows columns"], limit: float) -> tuple[Float[Array, " rows"], Bool[Array, ""]]:
    """Each thread's part of the sums of rows, and whether one of a warp's is above a limit."""
    result = _ROW_SUMS, plgpu.ShapeDtypeStruct((), jnp.bool_, ROW_LAYOUT)  # A scalar has no layout.

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=result)
    def add_up(_, p: mgpu.FragmentedArray) -> tuple[mgpu.FragmentedArray, mgpu.FragmentedArray]:
        rows = p.registers.reshape(-1, _ROWS_OF_A_THREAD).T
        sums = [
            _sum([vectors.extract(two, [], [i]) for two in row for i in range(_COLUMNS_OF_A_THREAD)]) for row in rows
        ]
        highest = mgpu.c(limit, ir.F32Type.get())
        is_high = arith.ori(*(arith.cmpf(arith.CmpFPredicate.OGT, part, highest) for part in sums))
        is_high = nvvm.vote_sync(mgpu.c(_ALL_LANES, ir.IntegerType.get_signless(32)), is_high, "any")
        one = ir.VectorType.get((1,), ir.F32Type.get())
        return (
            _fragments([vectors.broadcast(one, part) for part in sums]),
            mgpu.FragmentedArray.splat(is_high, (), is_signed=False),
        )

    return add_up(p)


def join_partial_sums(sums: Float[Array, " rows"]) -> Float[Array, " rows"]:
    """The sums of rows, from the parts of the threads that share a row."""

    @plgpu.inline_mgpu(arg_types=(ROW_LAYOUT,), return_type=_ROW_SUMS)
    def join(_, sums: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        registers = list(sums.registers.flat)
        for distance in (1, 2):
            registers = [arith.addf(register, utils.shfl_bfly(register, distance)) for register in registers]
        return _fragments(registers)

    return join(sums)


def column_indices(first, shape: tuple[int, int]) -> Int[Array, "rows columns"]:
    """The index of each element's column: the thread's own first index, plus constants.

    An iota differs by the tile's first index only, so the compiler would hoist it out of the loop over tiles, into one
    register per column.
    """
    layout, row_layout = plgpu.Layout.WGMMA, ROW_LAYOUT

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct(shape[:1], jnp.int32, row_layout))
    def own_first(_) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        place = arith.remui(utils.thread_idx(), mgpu.c(_THREADS_OF_A_ROW, i32))
        return mgpu.FragmentedArray.splat(
            arith.muli(place, mgpu.c(_COLUMNS_OF_A_THREAD, i32)), shape[:1], row_layout.to_mgpu(), is_signed=True
        )

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout))
    def distances(_) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        vector_type = ir.VectorType.get((_COLUMNS_OF_A_THREAD,), i32)
        registers = np.empty(layout.to_mgpu().registers_shape(shape), object)
        for i in range(registers.size):
            distance = i // _ROWS_OF_A_THREAD * _COLUMNS_OF_A_THREAD * _THREADS_OF_A_ROW
            numbers = [ir.IntegerAttr.get(i32, distance + n) for n in range(_COLUMNS_OF_A_THREAD)]
            value = ir.DenseElementsAttr.get(numbers, type=vector_type)
            # jaxlib's stub knows constants that are numbers only.
            registers.flat[i] = arith.constant(vector_type, value)  # type: ignore[call-arg,arg-type]
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)

    return spread(first + own_first(), shape, rows=True) + distances()


def _sum(numbers: list[ir.Value]) -> ir.Value:
    # Four sums at a time: an addition takes some cycles, and the next addition to the same sum waits for it.
    sums = numbers[:4]
    for i, number in enumerate(numbers[4:]):
        sums[i % 4] = arith.addf(sums[i % 4], number)
    return arith.addf(arith.addf(sums[0], sums[1]), arith.addf(sums[2], sums[3]))


def _fragments(registers: list[ir.Value]) -> mgpu.FragmentedArray:
    """A number for each row, from the registers that a thread holds."""
    layout = ROW_LAYOUT.to_mgpu()
    shape = layout.registers_shape((WGMMA_ROWS,))
    return mgpu.FragmentedArray(_registers=np.array(registers, object).reshape(shape), _layout=layout, _is_signed=None)
