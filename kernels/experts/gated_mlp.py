"""Gated MLPs of groups of rows on Hopper GPUs, whose matmuls compute the activation, and the gradient.

Dimensions: R rows, G groups, W features of a row, F hidden features of a group's MLP.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from kernels.experts import matmul_kernels
from kernels.experts.choice import GroupedMatmulChoice
from kernels.experts.gated_kernels import Activation, GatedMatrices, differentiate_gated, multiply_gated
from kernels.experts.row_groups import RowGroups, own_groups


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def grouped_gated_mlp(
    rows: Float[Array, "R W"],
    weights: Float[Array, " R"],
    matrices: GatedMatrices,
    groups: RowGroups,
    activation: Activation,
    choice: GroupedMatmulChoice,
    residual_name: str,
) -> Float[Array, "R W"]:
    """Each row through its group's MLP, its hidden features times the row's weight.

    Args:
      rows: sorted by group; zeros pad a group as by `copy_rows`.
      weights: float32; 0 where no row lies.
      matrices: of the groups.
      groups: as by `group_rows`, at the choice's alignment.
      activation: computes in float32. A function that is the same one in each call: programs differ by it.
      choice: one that `has_kernels`.
      residual_name: `checkpoint_name` of features and gates, all that the gradient needs beside the arguments.

    Returns:
      In the rows' dtype. The rows that pad a group, or come after the last group's, may have any values.
    """
    return _forward(rows, weights, matrices, groups, activation, choice, residual_name)[0]


def _forward(
    rows: Array,
    weights: Array,
    matrices: GatedMatrices,
    groups: RowGroups,
    activation: Activation,
    choice: GroupedMatmulChoice,
    residual_name: str,
) -> tuple[Array, tuple]:
    features, gates, hidden = multiply_gated(rows, matrices, weights, groups, activation, choice)
    features, gates = checkpoint_name(features, residual_name), checkpoint_name(gates, residual_name)
    outputs = matmul_kernels.multiply_rows([hidden], [matrices.down], groups, choice, transpose=False, stores_all=False)
    return outputs, (rows, weights, matrices, groups, features, gates)


def _backward(
    activation: Activation, choice: GroupedMatmulChoice, residual_name: str, residuals: tuple, gradients: Array
) -> tuple[Array, Array, GatedMatrices, None]:
    rows, weights, matrices, groups, features, gates = residuals
    (of_features, of_gates, hidden), of_weights = differentiate_gated(
        gradients, matrices, features, gates, weights, groups, activation, choice
    )
    between = [of_features, of_gates]
    of_rows = matmul_kernels.multiply_rows(
        between, [matrices.up, matrices.gate], groups, choice, transpose=True, stores_all=False
    )
    of_up, of_gate = (matmul_kernels.multiply_groups(rows, each, groups, choice) for each in between)
    of_down = matmul_kernels.multiply_groups(hidden, gradients, groups, choice)
    of_biases: list[Array] = []
    if matrices.up_bias is not None:
        of_biases = [jnp.dot(own_groups(groups, each.dtype).T, each) for each in between]
    return of_rows, of_weights, GatedMatrices(of_up, of_gate, of_down, *of_biases), None


grouped_gated_mlp.defvjp(_forward, _backward)
