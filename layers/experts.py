"""The experts of a mixture: MLPs of one shape, of which each token goes through some.

No token is dropped. A token has one copy for each of its experts. The copies are sorted by expert, so that an expert's
are neighbours, and one grouped matmul multiplies each by its own expert's matrix.

Shapes: N tokens, K experts of a token, R rows of sorted copies (N · K and those that pad an expert's), E experts,
W width, and for a linear map K and N features.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from kernels import Target
from kernels.grouped_matmul import RowGroups, choose_grouped_matmul, group_rows, grouped_matmul
from layers.activations import activate
from layers.config import MLPKind, MoEConfig


class Experts(nnx.Module):
    """MLPs of one shape, of which each token goes through some; see `MoE` for the arguments."""

    def __init__(
        self,
        width: int,
        config: MoEConfig,
        *,
        kind: MLPKind,
        param_dtype: jnp.dtype,
        kernel_init: nnx.Initializer,
        output_kernel_init: nnx.Initializer,
        rngs: nnx.Rngs,
    ):
        projection = functools.partial(
            GroupedLinear, config.num_experts, use_bias=config.expert_bias, param_dtype=param_dtype, rngs=rngs
        )
        self.kind = kind
        self.num_experts = config.num_experts
        self.up = projection(width, config.expert_width, kernel_init=kernel_init)
        if kind != "gelu":
            self.gate = projection(width, config.expert_width, kernel_init=kernel_init)
        self.down = projection(config.expert_width, width, kernel_init=output_kernel_init)

    def __call__(
        self,
        tokens: Float[Array, "N W"],
        chosen: Int[Array, "N K"],
        weights: Float[Array, "N K"],
        target: Target,
        *,
        features_over: str | None,
    ) -> Float[Array, "N W"]:
        """The weighted sums of the chosen experts' outputs, in the tokens' type, computed on a device like `target`."""
        width, hidden_features = self.up.kernel.shape[1:]
        choice = choose_grouped_matmul(tokens.dtype, (width, hidden_features), target)
        groups = group_rows(chosen.reshape(-1), self.num_experts, choice.alignment)

        copies = _copy_tokens(tokens, groups, chosen.shape[1])
        into = [self.up] if self.kind == "gelu" else [self.up, self.gate]
        products = grouped_matmul(copies, [each.matrices(copies.dtype) for each in into], groups, choice)
        features, *gate = (
            checkpoint_name(each.add_bias(product, groups), "projection")
            for each, product in zip(into, products, strict=True)
        )
        # Weighted before `down`, which is linear: the weights' gradient then needs no outputs.
        hidden = activate(self.kind, features, gate[0] if gate else None, _sort_weights(weights, groups))
        (outputs,) = grouped_matmul(hidden, [self.down.matrices(hidden.dtype)], groups, choice)
        mixed = _sum_copies(outputs, groups, chosen.shape[1], weights.dtype)
        if features_over is not None:
            mixed = lax.psum(mixed, features_over)
        if self.down.bias is not None:  # once for all ranks, and so apart from the matmul
            share = (jax.nn.one_hot(chosen, self.num_experts, dtype=weights.dtype) * weights[..., None]).sum(1)
            mixed += jnp.dot(share.astype(tokens.dtype), self.down.bias[...].astype(tokens.dtype))
        return mixed


class GroupedLinear(nnx.Module):
    """The parameters of a linear map for each expert."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool,
        kernel_init: nnx.Initializer,
        param_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.kernel = nnx.Param(kernel_init(rngs.params(), (num_experts, in_features, out_features), param_dtype))
        self.bias = nnx.Param(jnp.zeros((num_experts, out_features), param_dtype)) if use_bias else None

    def matrices(self, dtype: jnp.dtype) -> Float[Array, "E K N"]:
        """The experts' matrices, for operands of this type."""
        return self.kernel[...].astype(dtype)

    def add_bias(self, products: Float[Array, "R N"], groups: RowGroups) -> Float[Array, "R N"]:
        """The products of sorted copies and their experts' matrices, with the biases, if there are any."""
        if self.bias is None:
            return products
        ends = jnp.cumsum(groups.sizes)
        experts = jnp.searchsorted(ends, jnp.arange(products.shape[0]), side="right", method="compare_all")
        # A matmul and no lookup, whose gradient would add up copy by copy.
        is_own = jax.nn.one_hot(experts, groups.sizes.size, dtype=products.dtype)
        return products + jnp.dot(is_own, self.bias[...].astype(products.dtype))


# Each copy is read once by its own token, so all gradients are lookups, too. JAX would add up copy by copy. Where no
# copy lies, rows and gradients are 0, so that those rows don't reach the experts' gradients.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _copy_tokens(tokens: Float[Array, "N W"], groups: RowGroups, num_copies: int) -> Float[Array, "R W"]:
    """The copies of tokens, sorted by expert: each token has `num_copies`. Where no copy lies are zeros."""
    return _take_rows(tokens, groups.sources // num_copies)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _sum_copies(
    copies: Float[Array, "R W"], groups: RowGroups, num_copies: int, dtype: jnp.dtype
) -> Float[Array, "N W"]:
    """The sum of each token's copies, added up in `dtype`."""
    places = groups.places.reshape(-1, num_copies)
    total = jnp.zeros((len(places), copies.shape[1]), dtype)
    for k in range(num_copies):
        total += copies[places[:, k]].astype(dtype)
    return total.astype(copies.dtype)


@jax.custom_vjp
def _sort_weights(weights: Float[Array, "N K"], groups: RowGroups) -> Float[Array, " R"]:
    """The weights of sorted copies."""
    return weights.reshape(-1).at[groups.sources].get(mode="fill", fill_value=0)


def _take_rows(rows: Float[Array, "N W"], numbers: Int[Array, " R"]) -> Float[Array, "R W"]:
    """Rows by their numbers, and zeros for those that there aren't.

    Two features of 16 bits go as one number: XLA's lookups take a time for each number.
    """
    if rows.dtype.itemsize != 2 or rows.shape[1] % 2:
        return rows.at[numbers].get(mode="fill", fill_value=0)
    pairs = lax.bitcast_convert_type(rows.reshape(rows.shape[0], -1, 2), jnp.uint32)
    taken = pairs.at[numbers].get(mode="fill", fill_value=0)
    return lax.bitcast_convert_type(taken, rows.dtype).reshape(numbers.size, -1)


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


_copy_tokens.defvjp(
    lambda tokens, groups, num_copies: (_copy_tokens(tokens, groups, num_copies), groups),
    lambda num_copies, groups, gradient: (_sum_copies(gradient, groups, num_copies, _wide(gradient.dtype)), None),
)
_sum_copies.defvjp(
    lambda copies, groups, num_copies, dtype: (_sum_copies(copies, groups, num_copies, dtype), groups),
    lambda num_copies, dtype, groups, gradient: (_copy_tokens(gradient, groups, num_copies), None),
)
_sort_weights.defvjp(
    lambda weights, groups: (_sort_weights(weights, groups), (groups.places, weights.shape)),
    lambda residuals, gradient: (gradient[residuals[0]].reshape(residuals[1]), None),
)
