"""The experts of a mixture: MLPs of one shape, of which each token goes through some.

No token is dropped. A token has one copy for each of its experts. The copies are sorted by expert, so that an expert's
are neighbours, and one grouped matmul multiplies each by its own expert's matrix.

Shapes: N tokens, K experts of a token, R sorted copies of tokens (N · K and those that pad an expert's), E experts,
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
from kernels.experts import (
    GatedMatrices,
    GroupedMatmul,
    GroupedMatmulChoice,
    RowGroups,
    choose_grouped_matmul,
    copy_rows,
    group_rows,
    grouped_gated_mlp,
    grouped_matmul,
    own_groups,
    sum_copies,
)
from layers.activations import GATES, activate
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
        implementation: GroupedMatmul | None,
        rngs: nnx.Rngs,
    ):
        projection = functools.partial(
            GroupedLinear, config.num_experts, use_bias=config.expert_bias, param_dtype=param_dtype, rngs=rngs
        )
        self.kind = kind
        self.num_experts, self.implementation = config.num_experts, implementation
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
        choice = choose_grouped_matmul(tokens.dtype, (width, hidden_features), target, self.implementation)
        groups = group_rows(chosen.reshape(-1), self.num_experts, choice.alignment)

        copies = copy_rows(tokens, groups, chosen.shape[1], choice)
        # Weighted before `down`, which is linear: the weights' gradient then needs no outputs.
        sorted_weights = _sort_weights(weights, groups)
        if choice.has_kernels and self.kind != "gelu" and not self._has_adapters:
            matrices = (each.matrices(copies.dtype) for each in (self.up, self.gate, self.down))
            biases = (each.biases(copies.dtype) for each in (self.up, self.gate))
            parameters = GatedMatrices(*matrices, *biases)
            gated = GATES[self.kind]
            outputs = grouped_gated_mlp(copies, sorted_weights, parameters, groups, gated, choice, "projection")
        else:
            into = [self.up] if self.kind == "gelu" else [self.up, self.gate]
            products = grouped_matmul(copies, [each.matrices(copies.dtype) for each in into], groups, choice)
            features, *gate = (
                checkpoint_name(each.add_bias(each.adapted(copies, product, groups, choice), groups), "projection")
                for each, product in zip(into, products, strict=True)
            )
            hidden = activate(self.kind, features, gate[0] if gate else None, sorted_weights)
            (outputs,) = grouped_matmul(hidden, [self.down.matrices(hidden.dtype)], groups, choice)
            outputs = self.down.adapted(hidden, outputs, groups, choice)
        mixed = sum_copies(outputs, groups, chosen.shape[1], choice)
        if features_over is not None:
            mixed = lax.psum(mixed, features_over)
        if self.down.bias is not None:  # once for all ranks, and so apart from the matmul
            share = (jax.nn.one_hot(chosen, self.num_experts, dtype=weights.dtype) * weights[..., None]).sum(1)
            mixed += jnp.dot(share.astype(tokens.dtype), self.down.bias[...].astype(tokens.dtype))
        return mixed

    @property
    def _has_adapters(self) -> bool:
        return any(hasattr(each, "lora") for each in (self.up, self.down, getattr(self, "gate", None)))


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

    def adapted(
        self,
        rows: Float[Array, "R K"],
        products: Float[Array, "R N"],
        groups: RowGroups,
        choice: GroupedMatmulChoice,
    ) -> Float[Array, "R N"]:
        """The products of rows with what the experts' adapters add, if there are any."""
        lora = getattr(self, "lora", None)
        if lora is None:
            return products
        a, b = lora.a[...].astype(rows.dtype), lora.b[...].astype(rows.dtype)
        padding = -a.shape[-1] % choice.feature_multiple
        a, b = jnp.pad(a, ((0, 0), (0, 0), (0, padding))), jnp.pad(b, ((0, 0), (0, padding), (0, 0)))
        (reduced,) = grouped_matmul(rows, [a], groups, choice)
        (added,) = grouped_matmul(reduced * lora.scale, [b], groups, choice)
        return products + added

    def biases(self, dtype: jnp.dtype) -> Float[Array, "E N"] | None:
        """The experts' biases, for operands of this type."""
        return None if self.bias is None else self.bias[...].astype(dtype)

    def add_bias(self, products: Float[Array, "R N"], groups: RowGroups) -> Float[Array, "R N"]:
        """The products of sorted copies and their experts' matrices, with the biases, if there are any."""
        biases = self.biases(products.dtype)
        return products if biases is None else products + jnp.dot(own_groups(groups, products.dtype), biases)


# Each copy has a weight of its own, so the gradient is a lookup, too. JAX would add up copy by copy.
@jax.custom_vjp
def _sort_weights(weights: Float[Array, "N K"], groups: RowGroups) -> Float[Array, " R"]:
    """The weights of sorted copies."""
    return weights.reshape(-1).at[groups.sources].get(mode="fill", fill_value=0)


_sort_weights.defvjp(
    lambda weights, groups: (_sort_weights(weights, groups), (groups.places, weights.shape)),
    lambda residuals, gradient: (gradient[residuals[0]].reshape(residuals[1]), None),
)
