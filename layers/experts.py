"""The experts of a mixture: MLPs of one shape, of which each token goes through some.

No token is dropped. A token has one copy for each of its experts. The copies are sorted by expert, so that an expert's
are neighbours, and one grouped matmul multiplies each by its own expert's matrix.

Shapes: N tokens, K experts of a token, C copies of all tokens (N · K), E experts, W width.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from layers.config import MLPKind, MoEConfig
from layers.mlp import GATES, gelu


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
        *,
        features_over: str | None,
    ) -> Float[Array, "N W"]:
        """The weighted sums of the chosen experts' outputs, in the tokens' type."""
        experts = chosen.reshape(-1)
        order = jnp.argsort(experts, stable=True)  # of the copies, when they are sorted by expert
        place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
        num_copies = jnp.bincount(experts, length=self.num_experts)

        copies = _copy_tokens(tokens, order, place)
        hidden = checkpoint_name(self.up(copies, experts[order], num_copies), "projection")
        if self.kind == "gelu":
            hidden = gelu(hidden)
        else:
            hidden = GATES[self.kind](
                checkpoint_name(self.gate(copies, experts[order], num_copies), "projection"), hidden
            )
        outputs = _uncopy(self.down.multiply(hidden, num_copies), order, place)
        outputs = checkpoint_name(outputs, "projection").reshape(*chosen.shape, -1)
        mixed = jnp.einsum("nkw,nk->nw", outputs, weights, preferred_element_type=weights.dtype).astype(tokens.dtype)
        if features_over is not None:
            mixed = lax.psum(mixed, features_over)
        if self.down.bias is not None:  # once for all ranks, and so apart from the matmul
            share = (jax.nn.one_hot(chosen, self.num_experts, dtype=weights.dtype) * weights[..., None]).sum(1)
            mixed += jnp.dot(share.astype(tokens.dtype), self.down.bias[...].astype(tokens.dtype))
        return mixed


class GroupedLinear(nnx.Module):
    """A linear map for each expert, applied to copies of tokens that are sorted by expert."""

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

    def __call__(
        self, copies: Float[Array, "C in"], experts: Int[Array, " C"], num_copies: Int[Array, " E"]
    ) -> Float[Array, "C out"]:
        """The outputs in the copies' type, of copies sorted by `experts`, of which each has `num_copies`."""
        outputs = self.multiply(copies, num_copies)
        if self.bias is None:
            return outputs
        # A matmul and no lookup, whose gradient would add up copy by copy.
        is_own = jax.nn.one_hot(experts, num_copies.size, dtype=copies.dtype)
        return outputs + jnp.dot(is_own, self.bias[...].astype(copies.dtype))

    def multiply(self, copies: Float[Array, "C in"], num_copies: Int[Array, " E"]) -> Float[Array, "C out"]:
        """The outputs without the bias: the first num_copies[0] rows times the first expert's matrix, and so on."""
        return lax.ragged_dot(copies, self.kernel[...].astype(copies.dtype), num_copies)


# Each copy is read once by its own token, so both gradients are lookups, too. JAX would add up copy by copy.
@jax.custom_vjp
def _copy_tokens(tokens: Float[Array, "N W"], order: Int[Array, " C"], place: Int[Array, " C"]) -> Float[Array, "C W"]:
    """The copies of tokens, sorted: copy c of token c // K is at `place[c]`, and `order[place[c]]` is c."""
    return tokens[order // (order.size // tokens.shape[0])]


@jax.custom_vjp
def _uncopy(copies: Float[Array, "C W"], order: Int[Array, " C"], place: Int[Array, " C"]) -> Float[Array, "C W"]:
    """The copies by token again."""
    return copies[place]


def _sum_copies(residuals: tuple[Array, int], gradient: Array) -> tuple[Array, None, None]:
    place, num_tokens = residuals
    dtype = jnp.promote_types(gradient.dtype, jnp.float32)
    by_token = gradient[place].reshape(num_tokens, -1, gradient.shape[-1])
    return by_token.sum(1, dtype=dtype).astype(gradient.dtype), None, None


_copy_tokens.defvjp(
    lambda tokens, order, place: (_copy_tokens(tokens, order, place), (place, tokens.shape[0])),
    _sum_copies,
)
_uncopy.defvjp(
    lambda copies, order, place: (_uncopy(copies, order, place), order),
    lambda order, gradient: (gradient[order], None, None),
)
