"""Matmuls with tokens that a mesh axis splits on one side and features that it splits on the other.

Both are for functions that `jax.shard_map` maps over the axis, and their gradients are by hand: JAX can't tell that
ranks hold different tokens where it doesn't check what varies. The gradient of each needs what the other does.

Source: sequence parallelism (arXiv:2205.05198).

Shapes: B batch, T tokens, t tokens of one rank, W width, F features of one rank.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from kernels.collectives import peer_memory
from kernels.tracing.slice_fusion import without_slice_fusion
from kernels.tracing.target import Target

Collectives = Literal["mosaic_gpu", "xla"]
"""mosaic_gpu: kernels in which GPUs write to each other's memory. xla: XLA's collectives, everywhere."""

# Of the kernels' tiles.
_TOKENS, _FEATURES = 128, 64


class ChosenCollectives(NamedTuple):
    """How tokens get to the other ranks of a mesh axis.

    Attributes:
      name: of the implementation.
      passed_over: why the kernels can't serve, if that is why they don't.
      num_multiprocessors: of a GPU that runs the kernels; None: XLA's collectives.
    """

    name: Collectives
    passed_over: str | None = None
    num_multiprocessors: int | None = None


def choose_collectives(
    mesh: Mesh,
    axis: str,
    part: tuple[int, ...],
    features: Sequence[int],
    dtype: jax.typing.DTypeLike,
    named: Collectives | None = None,
) -> ChosenCollectives:
    """How tokens get to the other ranks of an axis.

    Args:
      mesh: all of the devices.
      axis: whose ranks hold different tokens, and different features.
      part: shape of one rank's tokens, `[B, t, W]`.
      features: F of one rank, for each matrix.
      dtype: of the operands.
      named: what is to be taken; None: the fastest that serves.

    Raises:
      ValueError: there is no such implementation, or it can't serve, with the reason.
    """
    if named is not None and named not in get_args(Collectives):
        raise ValueError(f"collectives={named!r} is not one of {', '.join(get_args(Collectives))}, or None")
    if named == "xla":
        return ChosenCollectives("xla")
    reason = peer_memory.unsupported_reason(mesh, axis) or _unsupported_reason(part, features, dtype)
    if reason is None:
        target = Target.of(mesh.devices.flat[0])
        return ChosenCollectives("mosaic_gpu", num_multiprocessors=target.num_multiprocessors)
    if named is not None:
        raise ValueError(f"collectives={named!r} can't serve: it {reason}; use 'xla', or None for the fastest")
    return ChosenCollectives("xla", reason)


def _unsupported_reason(part: tuple[int, ...], features: Sequence[int], dtype: jax.typing.DTypeLike) -> str | None:
    """Why the kernels can't send such tokens, or None if they can."""
    if jnp.dtype(dtype) not in map(jnp.dtype, (jnp.bfloat16, jnp.float16)):
        return f"takes bfloat16 and float16, not {jnp.dtype(dtype)}"
    _, length, width = part
    if length % _TOKENS:
        return f"takes a GPU's tokens in multiples of {_TOKENS}, not {length}"
    for size in (width, *features):
        if size % _FEATURES:
            return f"takes a GPU's features in multiples of {_FEATURES}, not {size}"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def all_gather_matmul(
    part: Float[Array, "B t W"], matrices: tuple[Float[Array, "W F"], ...], axis: str, chosen: ChosenCollectives
) -> tuple[Float[Array, "B T F"], ...]:
    """All ranks' tokens, in the order of the ranks, times each of this rank's matrices.

    Args:
      part: this rank's tokens.
      matrices: to this rank's features, of which each may have a number of its own.
      axis: the mesh axis.
      chosen: from `choose_collectives`.
    """
    return _all_gather_matmul_forward(part, matrices, axis, chosen)[0]


def _all_gather_matmul_forward(part: Array, matrices: tuple[Array, ...], axis: str, chosen: ChosenCollectives):
    products, whole = _gather_and_multiply(part, matrices, axis, chosen)
    return products, (whole, matrices)


def _all_gather_matmul_backward(
    axis: str,
    chosen: ChosenCollectives,
    operands: tuple[Array, tuple[Array, ...]],
    gradients: tuple[Array, ...],
):
    whole, matrices = operands
    of_part = _multiply_and_scatter(gradients, matrices, axis, chosen, transpose=True)
    return of_part, tuple(_sum_over_tokens(whole, gradient) for gradient in gradients)


all_gather_matmul.defvjp(_all_gather_matmul_forward, _all_gather_matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def matmul_reduce_scatter(
    features: Float[Array, "B T F"], matrix: Float[Array, "F W"], axis: str, chosen: ChosenCollectives
) -> Float[Array, "B t W"]:
    """This rank's tokens of the products of all ranks, summed.

    Args:
      features: this rank's, of all tokens.
      matrix: from this rank's features.
      axis: the mesh axis.
      chosen: from `choose_collectives`.
    """
    return _multiply_and_scatter((features,), (matrix,), axis, chosen)


def _matmul_reduce_scatter_backward(
    axis: str, chosen: ChosenCollectives, operands: tuple[Array, Array], gradient: Array
):
    features, matrix = operands
    (of_features,), whole = _gather_and_multiply(gradient, (matrix,), axis, chosen, transpose=True)
    return of_features, _sum_over_tokens(features, whole)


matmul_reduce_scatter.defvjp(
    lambda features, matrix, axis, chosen: (matmul_reduce_scatter(features, matrix, axis, chosen), (features, matrix)),
    _matmul_reduce_scatter_backward,
)


@jax.named_scope("all_gather_matmul")
def _gather_and_multiply(
    part: Float[Array, "B t W"],
    matrices: Sequence[Array],
    axis: str,
    chosen: ChosenCollectives,
    *,
    transpose: bool = False,
) -> tuple[tuple[Float[Array, "B T ?F"], ...], Float[Array, "B T W"]]:
    """The products, and all ranks' tokens."""
    if chosen.num_multiprocessors is not None:
        from kernels.collectives.all_gather_kernel import num_joined, peer_all_gather_matmul

        part, *matrices = without_slice_fusion(part, *matrices)
        joined = num_joined([matrix.shape[0 if transpose else 1] for matrix in matrices])
        outputs = peer_all_gather_matmul(
            part, matrices[:joined], axis, lax.axis_size(axis), chosen.num_multiprocessors, transpose=transpose
        )
        *products, whole = without_slice_fusion(*outputs)
        matrices = matrices[joined:]
    else:
        products, whole = [], lax.all_gather(part, axis, axis=1, tiled=True)
    products += [whole @ (matrix.T if transpose else matrix) for matrix in matrices]
    return tuple(products), whole


@jax.named_scope("matmul_reduce_scatter")
def _multiply_and_scatter(
    features: Sequence[Float[Array, "B T F"]],
    matrices: Sequence[Array],
    axis: str,
    chosen: ChosenCollectives,
    *,
    transpose: bool = False,
) -> Float[Array, "B t W"]:
    """The sum of all products."""
    if chosen.num_multiprocessors is not None:
        from kernels.collectives.reduce_scatter_kernel import peer_matmul_reduce_scatter

        features, matrices = without_slice_fusion(*features), without_slice_fusion(*matrices)
        output = peer_matmul_reduce_scatter(
            features, matrices, axis, lax.axis_size(axis), chosen.num_multiprocessors, transpose=transpose
        )
        (part,) = without_slice_fusion(output)
        return part
    products = [left @ (matrix.T if transpose else matrix) for left, matrix in zip(features, matrices, strict=True)]
    return lax.psum_scatter(functools.reduce(operator.add, products), axis, scatter_dimension=1, tiled=True)


def _sum_over_tokens(left: Float[Array, "B T K"], right: Float[Array, "B T N"]) -> Float[Array, "K N"]:
    return lax.dot_general(left, right, (((0, 1), (0, 1)), ((), ())))
