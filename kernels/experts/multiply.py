"""`grouped_matmul` and its gradient, and the choice between our kernel and XLA's `ragged_dot`.

Dimensions: R rows, G groups, K and N features.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels.experts import matmul_kernels
from kernels.experts.choice import GroupedMatmul, GroupedMatmulChoice
from kernels.experts.row_groups import RowGroups
from kernels.tracing.target import Target

_log_once = functools.lru_cache(maxsize=256)(logging.getLogger(__name__).info)


def choose_grouped_matmul(
    dtype: jnp.dtype | str,
    features: tuple[int, ...],
    target: Target,
    implementation: GroupedMatmul | None = None,
    *,
    interpret: bool = False,
) -> GroupedMatmulChoice:
    """The implementation of grouped matmuls from any of these numbers of features to any other.

    The log names once a GPU that the kernel can't serve.

    Args:
      dtype: of the operands.
      features: K and N.
      target: the device.
      implementation: None for the fastest that serves the device.
      interpret: run the kernel in Pallas's interpreter, on any device: for tests. As `MosaicGpuTuning.interpret`.

    Raises:
      ValueError: there is no such implementation, or it can't serve these matmuls.
    """
    if implementation not in (None, *get_args(GroupedMatmul)):
        names = ", ".join(get_args(GroupedMatmul))
        raise ValueError(f"implementation={implementation!r} is not one of {names}, or None for the fastest")
    reason = matmul_kernels.unsupported_reason(jnp.dtype(dtype), features, target, interpret=interpret)
    if implementation not in (None, "xla") and reason is not None:
        raise ValueError(f"implementation={implementation!r} can't serve this grouped matmul: it {reason}")
    if implementation == "xla" or reason is not None:
        if target.platform == "gpu" and reason is not None:
            _log_once("grouped matmul uses xla; mosaic_gpu passed over: it %s", reason)
        return GroupedMatmulChoice("xla", 1, reason, target)
    return GroupedMatmulChoice("mosaic_gpu", matmul_kernels.ALIGNMENT, None, target, interpret)


def grouped_matmul(
    rows: Float[Array, "R K"],
    matrices: Sequence[Float[Array, "G K ?N"]],
    groups: RowGroups,
    choice: GroupedMatmulChoice,
) -> tuple[Float[Array, "R ?N"], ...]:
    """Multiplies the rows of the first group by its matrix, the next group's by that one's, and so on.

    Each group may have several matrices, and each gives a product of its own. The rows' gradient is then added up
    within one kernel. Differentiable in rows and matrices. Rows after the last group's come out as 0, and have gradient
    0. A row that pads a group may be left out, and then so do its product and its gradients.

    Args:
      rows: sorted by group; those that pad a group have any finite values, and gradients of 0.
      matrices: of the rows' dtype, one array or several.
      groups: as by `group_rows`, at the choice's alignment.
      choice: what multiplies.

    Returns:
      The products by each array of matrices, in the operands' dtype, added up in float32 or wider.
    """
    if not choice.has_kernels:
        return tuple(lax.ragged_dot(rows, each, groups.sizes) for each in matrices)
    return _multiply(rows, tuple(matrices), groups, choice)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _multiply(
    rows: Array, matrices: tuple[Array, ...], groups: RowGroups, choice: GroupedMatmulChoice
) -> tuple[Array, ...]:
    return tuple(matmul_kernels.multiply_rows([rows], [each], groups, choice, transpose=False) for each in matrices)


def _forward(
    rows: Array, matrices: tuple[Array, ...], groups: RowGroups, choice: GroupedMatmulChoice
) -> tuple[tuple[Array, ...], tuple]:
    return _multiply(rows, matrices, groups, choice), (rows, matrices, groups)


def _backward(
    choice: GroupedMatmulChoice, residuals: tuple, gradients: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...], None]:
    rows, matrices, groups = residuals
    of_rows = matmul_kernels.multiply_rows(gradients, matrices, groups, choice, transpose=True)
    of_matrices = tuple(matmul_kernels.multiply_groups(rows, gradient, groups, choice) for gradient in gradients)
    return of_rows, of_matrices, None


_multiply.defvjp(_forward, _backward)
