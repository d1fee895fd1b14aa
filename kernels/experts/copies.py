"""Rows' copies, sorted by group, and the sums of each row's copies.

XLA looks rows up, or a kernel of ours copies them. XLA adds copies up.

Each copy is of one row, and each row's copies are summed up once, so each function's gradient is the other one. JAX
would add up copy by copy.

Shapes: N rows of the caller's, K copies of each, R places of copies, W features.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels.experts import copy_kernel
from kernels.experts.choice import GroupedMatmulChoice
from kernels.experts.row_groups import RowGroups
from kernels.tracing.number_types import at_least_float32


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def copy_rows(
    rows: Float[Array, "N W"], groups: RowGroups, num_copies: int, choice: GroupedMatmulChoice
) -> Float[Array, "R W"]:
    """The copies of rows, sorted by group, for grouped matmuls.

    Args:
      rows: any float type; of the choice's dtype for a kernel.
      groups: of the copies, of which the first `num_copies` are the first row's, and so on.
      num_copies: K.
      choice: of the matmuls.

    Returns:
      A copy in each place that has one. Zeros pad a group as far as products read; what lies after may hold anything.
    """
    if choice.has_kernels and copy_kernel.serves(rows):
        return copy_kernel.copy_rows(rows, groups, num_copies, choice)
    return _take_rows(rows, groups.sources // num_copies)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def sum_copies(
    copies: Float[Array, "R W"], groups: RowGroups, num_copies: int, choice: GroupedMatmulChoice
) -> Float[Array, "N W"]:
    """The sum of each row's copies, added up in float32 or wider; arguments as of `copy_rows`."""
    places = groups.places.reshape(-1, num_copies)
    total = jnp.zeros((len(places), copies.shape[1]), at_least_float32(copies.dtype))
    for k in range(num_copies):
        total += copies[places[:, k]].astype(total.dtype)
    return total.astype(copies.dtype)


def _take_rows(rows: Float[Array, "N W"], numbers: Int[Array, " R"]) -> Float[Array, "R W"]:
    """Rows by their numbers, and zeros for those that there aren't.

    Two features of 16 bits go as one number: XLA's lookups take a time for each number.
    """
    if rows.dtype.itemsize != 2 or rows.shape[1] % 2:
        return rows.at[numbers].get(mode="fill", fill_value=0)
    pairs = lax.bitcast_convert_type(rows.reshape(rows.shape[0], rows.shape[1] // 2, 2), jnp.uint32)
    taken = pairs.at[numbers].get(mode="fill", fill_value=0)
    return lax.bitcast_convert_type(taken, rows.dtype).reshape(numbers.size, rows.shape[1])


copy_rows.defvjp(
    lambda rows, groups, num_copies, choice: (copy_rows(rows, groups, num_copies, choice), groups),
    lambda num_copies, choice, groups, gradient: (sum_copies(gradient, groups, num_copies, choice), None),
)
sum_copies.defvjp(
    lambda copies, groups, num_copies, choice: (sum_copies(copies, groups, num_copies, choice), groups),
    lambda num_copies, choice, groups, gradient: (copy_rows(gradient, groups, num_copies, choice), None),
)
