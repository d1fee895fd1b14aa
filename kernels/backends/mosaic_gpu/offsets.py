"""lse and delta as further columns of the queries, so that the tensor cores subtract them: from S, and from dP.

Where queries are a tile's columns, each thread would load both numbers for every column that it holds, and the
bandwidth of shared memory bounds the pass (docs/hopper_kernels.md). So the numbers are further columns of the queries,
where the keys have constants. The accumulators start from this product of 16 more columns.

A 16-bit number holds 8 or 11 bits of a float32. So an offset is a sum of four such numbers, each with a weight of its
own, which gives float16 the range. The weights are what the keys have in these columns.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.memory import WGMMA_ROWS

NUM_COLUMNS = 16
"""Columns of one product of 16-bit numbers: room for up to four offsets."""
_WEIGHTS = (2.0**15, 2.0**4, 2.0**-7, 2.0**-14)


def offset_columns(*offsets: Float[Array, "B N T"], dtype) -> Float[Array, "B N T 16"]:
    """The offsets of each query, in columns for the tensor cores.

    Args:
      offsets: float32. They are clipped to ±2³¹ in float16 and to ±10³⁸ in bfloat16. Float16 keeps nothing below 2⁻²⁸.
      dtype: of the columns.
    """
    info = jnp.finfo(dtype)
    # Below float32's largest number by as much as rounding up the first part may add.
    largest = min(float(info.max) * _WEIGHTS[0], 1e38)
    column = jax.lax.broadcasted_iota(jnp.uint32, (*offsets[0].shape, NUM_COLUMNS), offsets[0].ndim)
    index, digit = column // len(_WEIGHTS), column % len(_WEIGHTS)
    # One loop computes every column from the offset itself. Stacked columns would need one loop, too, but it takes
    # longer to compile.
    rest = jnp.float32(0)
    for i, offset in enumerate(offsets):
        rest = jnp.where(index == i, offset[..., None], rest)
    rest = jnp.clip(rest, -largest, largest)
    columns = jnp.zeros_like(rest)
    for i, weight in enumerate(_WEIGHTS):
        # XLA removes a conversion to 16 bits and back, but not this.
        part = jax.lax.reduce_precision(rest * (1 / weight), info.nexp, info.nmant)
        columns = jnp.where(digit == i, part, columns)
        rest = rest - part * weight
    return columns.astype(dtype)


def offset_weights(index: int, dtype) -> jax.Array:
    """Within a kernel: the keys' columns `[64, 16]` for the offset of an index, laid out as an accumulator."""
    column = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS, NUM_COLUMNS), 1, layout=plgpu.Layout.WGMMA)
    weights = jnp.float32(0)
    for i, weight in enumerate(_WEIGHTS):
        weights = weights + jnp.where(column == len(_WEIGHTS) * index + i, jnp.float32(weight), jnp.float32(0))
    return weights.astype(dtype)
