"""lse and delta as columns of queries, so that the tensor cores subtract them from the tiles of the transposed pass.

Queries are a tile's columns there, so each thread would have to load both numbers for every column that it holds, and
the bandwidth of shared memory bounds the pass (docs/hopper_kernels.md). Instead, queries have 16 more columns, which
hold delta and lse, and keys have constants in these columns; the accumulators start from their product. A 16-bit number
holds 8 or 11 bits of a float32. So an offset is a sum of four such numbers, each times a weight of its own, which gives
float16 the range. The weights are the keys' constants.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.call import AttentionCall
from kernels.hopper.registers import WGMMA_ROWS, spread
from kernels.hopper.softmax import finite_lse

DELTA_OFFSET, LSE_OFFSET = 0, 1
"""The indices of delta and lse as offsets."""
NUM_COLUMNS = 16
"""The columns of one product of 16-bit numbers."""
# The weight of each column of an offset.
_OFFSET_WEIGHTS = (2.0**15, 2.0**4, 2.0**-7, 2.0**-14)
# With other scales, lse over the scale may be out of float16's range, or too small for it. Then lse is subtracted after
# the scale.
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-16, 2.0**10


def lse_is_offset(call: AttentionCall) -> bool:
    """True if the tensor cores subtract lse. A soft cap comes between the product and lse."""
    return call.logits_soft_cap is None and _LEAST_SCALE <= call.scale <= _LARGEST_SCALE


def offset_columns(
    delta: Float[Array, " rows"], lse: Float[Array, " rows"] | None = None, *, call: AttentionCall
) -> Float[Array, "rows 16"]:
    """The offsets of 64 queries, in columns for the tensor cores, within a kernel; `lse`, natural, where it is one.

    They are clipped to ±2³¹ in float16 and to ±10³⁸ in bfloat16. Float16 keeps nothing below 2⁻²⁸.
    """
    # Added to dP and to the products of queries and keys, whose logits are `call.scale` times as large.
    offsets = [-delta] if lse is None else [-delta, finite_lse(lse) * (-1 / call.scale)]
    # Below float32's largest number by as much as rounding up the first part may add.
    largest = min(float(jnp.finfo(call.dtype).max) * _OFFSET_WEIGHTS[0], 1e38)
    shape = (WGMMA_ROWS, NUM_COLUMNS)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    # There are four digits. The compiler doesn't know that columns aren't negative, and would divide in more steps.
    index, digit = column >> 2, column & 3
    rest = jnp.float32(0)
    for i, offset in enumerate(offsets):
        rest = jnp.where(index == i, spread(offset, shape, rows=True), rest)
    rest = jnp.clip(rest, -largest, largest)
    columns = jnp.zeros_like(rest)
    for i, weight in enumerate(_OFFSET_WEIGHTS):
        # The barrier is for the interpreter, whose programs XLA compiles: it removes a conversion to 16 bits and back.
        part = jax.lax.optimization_barrier((rest * (1 / weight)).astype(call.dtype)).astype(jnp.float32)
        columns = jnp.where(digit == i, part, columns)
        rest = rest - part * weight
    return columns.astype(call.dtype)


def offset_weights(index: int, dtype) -> jax.Array:
    """The keys' columns `[64, 16]` for the offset of an index, laid out as an accumulator."""
    column = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS, NUM_COLUMNS), 1, layout=plgpu.Layout.WGMMA)
    weights = jnp.float32(0)
    for i, weight in enumerate(_OFFSET_WEIGHTS):
        weights = weights + jnp.where(column == len(_OFFSET_WEIGHTS) * index + i, jnp.float32(weight), jnp.float32(0))
    return weights.astype(dtype)
