"""Products of bfloat16 and float32 as exact as those of float32, on tensor cores that take bfloat16.

A float32 between 10⁻³⁰ and 3·10³⁸ is the sum of three bfloat16, its parts: the first has its highest eight bits, the
second the next eight, and so on. Of smaller ones the last parts may be lost, and larger ones give NaN. So three
products of bfloat16, added up in float32, are one with float32. Where both operands are float32, nine would be.

Shapes: N rows, K summed features, F features.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float32

_NUM_PARTS = 3
_EXPONENT_BITS, _MANTISSA_BITS = 8, 7  # of bfloat16


@jax.custom_vjp
def multiply_by_parts(rows: BFloat16[Array, "N K"], matrix: Float32[Array, "K F"]) -> Float32[Array, "N F"]:
    """The product, to float32's rounding.

    The matrix's gradient is as exact. That of the rows is rounded to bfloat16 in the end, and so its products lack the
    parts of both operands that lie below 2⁻¹⁶ of them.
    """
    return _sum_parts(lax.dot(rows, jnp.concatenate(_parts(matrix), axis=1), preferred_element_type=jnp.float32))


def _backward(
    operands: tuple[BFloat16[Array, "N K"], Float32[Array, "K F"]], gradient: Float32[Array, "N F"]
) -> tuple[BFloat16[Array, "N K"], Float32[Array, "K F"]]:
    rows, matrix = operands
    high, middle, low = _parts(gradient)
    of_matrix = lax.dot(rows.T, jnp.concatenate([high, middle, low], axis=1), preferred_element_type=jnp.float32)
    matrix_high, matrix_middle, _ = _parts(matrix)
    left = jnp.concatenate([high, middle, high], axis=1)
    right = jnp.concatenate([matrix_high, matrix_high, matrix_middle], axis=1)
    return lax.dot(left, right.T, preferred_element_type=jnp.float32).astype(rows.dtype), _sum_parts(of_matrix)


multiply_by_parts.defvjp(lambda rows, matrix: (multiply_by_parts(rows, matrix), (rows, matrix)), _backward)


def _parts(numbers: Float32[Array, "N F"]) -> list[BFloat16[Array, "N F"]]:
    """Numbers whose sum is these, from the highest to the lowest."""
    parts = []
    for _ in range(_NUM_PARTS):
        # XLA may leave out a conversion to bfloat16 and back. This one it keeps.
        part = lax.reduce_precision(numbers, _EXPONENT_BITS, _MANTISSA_BITS)
        parts.append(part.astype(jnp.bfloat16))
        numbers -= part
    return parts


def _sum_parts(products: Float32[Array, "N 3F"]) -> Float32[Array, "N F"]:
    """The sum of the parts' products, which lie side by side; the smallest first."""
    high, middle, low = jnp.split(products, _NUM_PARTS, axis=1)
    return high + (middle + low)
