"""Products of a matrix and its low-rank adapter that pass over the wide features as seldom as can be.

The features of a projection are wide, and a product by a matrix of r rows takes as long as it takes to read or write
them. So x W + (x A) B isn't a sum of two products: it is one, [x, x A] [W; B], whose inner dimension is r longer. The
same holds backward, where a matrix maps features back to the residual stream: its gradient by features is
[dy, dy Bᵀ] [Wᵀ; Aᵀ].

Shapes: W width, F features, r rank, R ranks of several adapters together.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.tracing.number_types import at_least_float32

_ALIGNMENT = 64  # elements by which the inner dimension grows: rows then begin at multiples of 128 bytes in bfloat16


class AdaptedMatrix(NamedTuple):
    """A matrix in the compute dtype, and its adapter in the parameters' own."""

    kernel: Float[Array, "W F"]
    a: Float[Array, "W r"]
    b: Float[Array, "r F"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def into_features(
    inputs: Float[Array, "*batch W"], matrices: tuple[AdaptedMatrix, ...], scale: float
) -> tuple[Float[Array, "*batch F"], ...]:
    """inputs W + (inputs A) B · scale, for several matrices of the same inputs."""
    return _into_features(inputs, matrices, scale)[0]


def _into_features(inputs: Array, matrices: tuple[AdaptedMatrix, ...], scale: float):
    dtype = inputs.dtype
    reduced = scale * jnp.dot(inputs, _joined_a(matrices, dtype))
    ends = _ends(matrices)
    products = []
    for matrix, end in zip(matrices, ends, strict=True):
        rank = matrix.b.shape[0]
        b = jnp.pad(matrix.b.astype(dtype), ((end - rank, ends[-1] - end), (0, 0)))
        products.append(_longer_product(inputs, reduced, matrix.kernel, b))
    return tuple(products), (inputs, reduced, matrices)


def _into_features_backward(scale: float, residuals: tuple, gradients: tuple[Array, ...]):
    inputs, reduced, matrices = residuals
    dtype = inputs.dtype
    pairs = list(zip(gradients, matrices, strict=True))
    of_reduced = scale * jnp.concatenate(
        [jnp.dot(gradient, matrix.b.astype(dtype).T) for gradient, matrix in pairs], axis=-1
    )
    of_inputs = jnp.dot(of_reduced, _joined_a(matrices, dtype).T)
    for gradient, matrix in pairs:
        of_inputs += jnp.dot(gradient, matrix.kernel.T)
    of_a = jnp.split(_summed_over_tokens(inputs, of_reduced), _ends(matrices)[:-1], axis=-1)
    parts = jnp.split(reduced, _ends(matrices)[:-1], axis=-1)
    of_matrices = tuple(
        AdaptedMatrix(
            _summed_over_tokens(inputs, gradient).astype(matrix.kernel.dtype),
            a.astype(matrix.a.dtype),
            _summed_over_tokens(part, gradient).astype(matrix.b.dtype),
        )
        for gradient, matrix, a, part in zip(gradients, matrices, of_a, parts, strict=True)
    )
    return of_inputs, of_matrices


into_features.defvjp(_into_features, _into_features_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def out_of_features(
    features: Float[Array, "*batch F"], matrix: AdaptedMatrix, scale: float
) -> Float[Array, "*batch W"]:
    """features W + (features A) B · scale."""
    return _out_of_features(features, matrix, scale)[0]


def _out_of_features(features: Array, matrix: AdaptedMatrix, scale: float):
    dtype = features.dtype
    reduced = scale * jnp.dot(features, matrix.a.astype(dtype))
    product = jnp.dot(features, matrix.kernel) + jnp.dot(reduced, matrix.b.astype(dtype))
    return product, (features, reduced, matrix)


def _out_of_features_backward(scale: float, residuals: tuple, gradient: Array):
    features, reduced, matrix = residuals
    dtype = features.dtype
    of_reduced = scale * jnp.dot(gradient, matrix.b.astype(dtype).T)
    of_features = _longer_product(gradient, of_reduced, matrix.kernel.T, matrix.a.astype(dtype).T)
    return of_features, AdaptedMatrix(
        _summed_over_tokens(features, gradient).astype(matrix.kernel.dtype),
        _summed_over_tokens(features, of_reduced).astype(matrix.a.dtype),
        _summed_over_tokens(reduced, gradient).astype(matrix.b.dtype),
    )


out_of_features.defvjp(_out_of_features, _out_of_features_backward)


def _longer_product(
    inputs: Float[Array, "*batch W"],
    reduced: Float[Array, "*batch R"],
    kernel: Float[Array, "W F"],
    b: Float[Array, "R F"],
) -> Float[Array, "*batch F"]:
    """inputs · kernel + reduced · b, in one product."""
    padding = -b.shape[0] % _ALIGNMENT
    longer = jnp.concatenate([inputs, jnp.pad(reduced, [(0, 0)] * (inputs.ndim - 1) + [(0, padding)])], axis=-1)
    return jnp.dot(longer, jnp.concatenate([kernel, jnp.pad(b, ((0, padding), (0, 0)))]))


def _summed_over_tokens(one: Float[Array, "*batch N"], other: Float[Array, "*batch M"]) -> Float[Array, "N M"]:
    """The gradient of a matrix, added up in float32 or wider."""
    batch = tuple(range(one.ndim - 1))
    return jax.lax.dot_general(
        one, other, ((batch, batch), ((), ())), preferred_element_type=at_least_float32(one.dtype)
    )


def _joined_a(matrices: tuple[AdaptedMatrix, ...], dtype: jnp.dtype) -> Float[Array, "W R"]:
    return jnp.concatenate([matrix.a for matrix in matrices], axis=-1).astype(dtype)


def _ends(matrices: tuple[AdaptedMatrix, ...]) -> list[int]:
    """Where each adapter's ranks end, among those of all."""
    ranks = [matrix.a.shape[-1] for matrix in matrices]
    return [sum(ranks[: index + 1]) for index in range(len(ranks))]
