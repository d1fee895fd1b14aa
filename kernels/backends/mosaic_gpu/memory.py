"""Shared memory of the kernels, as the tensor cores and the copy engine read it, and what the interpreter lacks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
"""Rows of a warpgroup's matmul."""
ROWS_OF_A_THREAD, THREADS_OF_A_ROW, COLUMNS_OF_A_THREAD = 2, 4, 2
"""Of an accumulator: in registers, one after another, a thread has pairs of neighbouring columns, of two rows in turn;
four threads share the next eight columns."""


def matrix(*shape: int, dtype):
    """A stack of matrices `[..., rows, columns]`, tiled and swizzled for the tensor cores."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = next(size for size in (128, 64, 32) if shape[-1] * itemsize % size == 0)
    transforms = (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def vector(*shape: int):
    """A stack of float32 vectors `[..., rows]`."""
    return plgpu.SMEM(shape, jnp.float32)


def accumulator(num_columns: int) -> plgpu.WGMMAAccumulatorRef:
    """A warpgroup's float32 accumulator `[64, num_columns]`.

    Where one begins, everything is there that its first product reads: the assembler leaves out its zeros only if the
    product follows at once, with no wait in between.
    """
    return plgpu.WGMMAAccumulatorRef((ROWS, num_columns), jnp.float32)


def load_matrix(ref) -> jax.Array:
    """Loads a matrix from shared memory, laid out as an accumulator."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA)  # type: ignore[call-arg]  # as JAX 0.10 has it


def load_vector(ref, *, rows: bool, shared: bool = True) -> jax.Array:
    """Loads a vector from shared or else global memory: one number for each row of a matrix, or for each column."""
    layout = plgpu.Layout.WGMMA.reduce(1 if rows else 0)
    return plgpu.load(ref, layout=layout, optimized=shared)  # type: ignore[call-arg]  # as JAX 0.10 has it


def spread(vector, shape, *, rows: bool) -> jax.Array:
    """A vector as a matrix: one number for each row, or for each column."""
    return jax.lax.broadcast_in_dim(vector, shape, [0 if rows else 1])


def multiply(acc, a, b, spare) -> None:
    """Adds `a @ b` to an accumulator, a in registers.

    Args:
      spare: None, or in Pallas's interpreter, which takes no operand from registers, memory to pass `a` through.
    """
    if spare is not None:
        spare[...] = a
        a = spare
    plgpu.wgmma(acc, a, b)
