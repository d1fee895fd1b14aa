"""Shared memory and registers of the kernels, as the tensor cores and the copy engine (TMA) read them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

WGMMA_ROWS = 64
"""Rows of a WGMMA tile: a warpgroup's matmul."""
ROWS_OF_A_THREAD, THREADS_OF_A_ROW, COLUMNS_OF_A_THREAD = 2, 4, 2
"""Of an accumulator: a thread's registers hold pairs of neighbouring columns, alternately of two rows. Four threads
share eight columns of a row."""
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
"""Layout of one number for each row of an accumulator."""


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

    Allocate it where everything is there that its first product reads: the assembler leaves out the zeros only if the
    product follows at once, with no wait in between.
    """
    return plgpu.WGMMAAccumulatorRef((WGMMA_ROWS, num_columns), jnp.float32)


def load_matrix(ref) -> jax.Array:
    """Loads a matrix from shared memory, laid out as an accumulator."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA)  # type: ignore[call-arg]  # as JAX 0.10 has it


def load_vector(ref, *, rows: bool, shared: bool = True) -> jax.Array:
    """Loads a vector from shared or else global memory: one number for each row of a matrix, or for each column."""
    layout = ROW_LAYOUT if rows else plgpu.Layout.WGMMA.reduce(0)
    return plgpu.load(ref, layout=layout, optimized=shared)  # type: ignore[call-arg]  # as JAX 0.10 has it


def spread(vector, shape, *, rows: bool) -> jax.Array:
    """A vector as a matrix: one number for each row, or for each column."""
    return jax.lax.broadcast_in_dim(vector, shape, [0 if rows else 1])
