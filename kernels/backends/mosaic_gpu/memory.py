"""Shared memory and registers of the kernels, as the tensor cores and the copy engine (TMA) read them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.call import AttentionInputs

WGMMA_ROWS = 64
"""Rows of a WGMMA tile: a warpgroup's matmul."""
ROWS_OF_A_THREAD, THREADS_OF_A_ROW, COLUMNS_OF_A_THREAD = 2, 4, 2
"""Of an accumulator: a thread's registers hold two neighbouring columns each, alternately of two rows. Four threads
share eight columns of a row."""
_ALIGNMENT, _BARRIER_BYTES = 1024, 8
"""Of shared memory: arrays begin at multiples of the first."""
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


def padded_head_dim(head_dim: int) -> int:
    """The head dim that the kernels work at: 32 or a multiple of 64."""
    return 32 if head_dim <= 32 else -(-head_dim // 64) * 64


def padded_matrices(
    inputs: AttentionInputs, block_q: int, block_kv: int, head_dim: int, value_dim: int
) -> tuple[Array, Array, Array]:
    """Query, key and value, padded to whole blocks and to these head dims."""
    query, key = padded(inputs.query, block_q, head_dim), padded(inputs.key, block_kv, head_dim)
    return query, key, padded(inputs.value, block_kv, value_dim)


def padded(x: Float[Array, "B L N H"], block: int, width: int) -> Float[Array, "B L2 N H2"]:
    """Fills the last block of the length, and the head dim up to `width`, with zeros."""
    length, head_dim = x.shape[1], x.shape[3]
    padding = [(0, 0), (0, -length % block), (0, 0), (0, width - head_dim)]
    return x if not any(after for _, after in padding) else jnp.pad(x, padding)


def num_bytes(scratch: Any) -> int:
    """Shared memory that Pallas allocates for a tree of arrays and barriers."""
    size = 0
    for x in jax.tree.leaves(scratch):
        if isinstance(x, plgpu.Barrier):
            size += _BARRIER_BYTES * math.prod(jax.tree.leaves(x.num_barriers))
        else:
            array_bytes = math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
            size += -(-array_bytes // _ALIGNMENT) * _ALIGNMENT
    return size


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


def spread(vector, shape, *, rows: bool) -> jax.Array:
    """A vector as a matrix: one number for each row, or for each column."""
    return jax.lax.broadcast_in_dim(vector, shape, [0 if rows else 1])
