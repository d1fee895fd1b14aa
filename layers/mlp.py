"""The feed-forward half of a transformer block.

Shapes: B batch, T tokens, W width, F MLP width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from layers.activation_sharding import ActivationSharding
from layers.checks import check_choice
from layers.config import MLPKind
from layers.initializers import small_init

# gpt-oss's (arXiv:2508.10925): its gate's sigmoid is steeper, and both sides are clamped.
_CLAMPED_SLOPE = 1.702
_CLAMPED_LIMIT = 7.0
_GELU_SLOPE = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715


class MLP(nnx.Module):
    """Two matrices with a GELU between them, or three, one of them a gate.

    Args:
      width: input and output features.
      hidden_width: features in between.
      kind: "gelu" (tanh approximation, as GPT-2), "swiglu", "geglu" (Shazeer, arXiv:2002.05202) or "clamped_swiglu"
        (gpt-oss, arXiv:2508.10925).
      use_bias: whether each matrix has a bias.
      compute_dtype: type of the matmuls' operands and of the output.
      param_dtype: type that the matrices are stored in.
      kernel_init: initialiser of `up` and `gate`; None: `small_init(width)`.
      output_kernel_init: initialiser of `down`; None: `kernel_init`.
      activation_sharding: where the hidden features lie on a mesh; None: left to XLA.
      rngs: source of the initial values.
    """

    def __init__(
        self,
        width: int,
        hidden_width: int,
        *,
        kind: MLPKind = "gelu",
        use_bias: bool = False,
        compute_dtype: jnp.dtype | str = "bfloat16",
        param_dtype: jnp.dtype | str = "float32",
        kernel_init: nnx.Initializer | None = None,
        output_kernel_init: nnx.Initializer | None = None,
        activation_sharding: ActivationSharding | None = None,
        rngs: nnx.Rngs,
    ):
        check_choice("kind", kind, MLPKind)

        kernel_init = kernel_init or small_init(width)
        projection = functools.partial(
            nnx.Linear,
            use_bias=use_bias,
            dtype=jnp.dtype(compute_dtype),
            param_dtype=jnp.dtype(param_dtype),
            rngs=rngs,
        )

        self.kind = kind
        self.activation_sharding = activation_sharding
        self.up = projection(width, hidden_width, kernel_init=kernel_init)
        if kind != "gelu":
            self.gate = projection(width, hidden_width, kernel_init=kernel_init)
        self.down = projection(hidden_width, width, kernel_init=output_kernel_init or kernel_init)

    def __call__(self, inputs: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        """Returns the MLP's contribution to the residual stream, in the compute dtype."""
        sharding = self.activation_sharding
        if sharding is not None:
            inputs = sharding.gather_tokens(inputs)
        hidden = checkpoint_name(self.up(inputs), "projection")
        if self.kind == "gelu":
            hidden = gelu(hidden)
        else:
            hidden = GATES[self.kind](checkpoint_name(self.gate(inputs), "projection"), hidden)
        if sharding is not None:
            hidden = sharding.constrain_mlp(hidden)
        outputs = self.down(hidden)
        return checkpoint_name(outputs if sharding is None else sharding.scatter_tokens(outputs), "projection")


def gelu(inputs: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
    """GELU in its tanh approximation, computed in float32 or wider.

    Args:
      inputs: any float type.

    Returns:
      In the inputs' own type.

    Source: Hendrycks and Gimpel, arXiv:1606.08415; (1 + tanh(z)) / 2 is sigmoid(2z).
    """
    return _gelu(inputs)


def swiglu(gate: Float[Array, "*batch F"], inputs: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
    """silu(gate) · inputs, computed in float32 or wider.

    Args:
      gate, inputs: of one float type.

    Returns:
      In that type.

    Source: Shazeer, arXiv:2002.05202.
    """
    return _swiglu(gate, inputs)


def geglu(gate: Float[Array, "*batch F"], inputs: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
    """gelu(gate) · inputs, with GELU in its tanh approximation, computed in float32 or wider.

    Args:
      gate, inputs: of one float type.

    Returns:
      In that type.

    Source: Shazeer, arXiv:2002.05202.
    """
    return _geglu(gate, inputs)


def clamped_swiglu(gate: Float[Array, "*batch F"], inputs: Float[Array, "*batch F"]) -> Float[Array, "*batch F"]:
    """g · sigmoid(1.702 g) · (x + 1), computed in float32 or wider; g is the gate up to 7, x the inputs from -7 to 7.

    Args:
      gate, inputs: of one float type.

    Returns:
      In that type.

    Source: gpt-oss, arXiv:2508.10925, and its reference code, https://github.com/openai/gpt-oss.
    """
    return _clamped_swiglu(gate, inputs)


GATES: dict[str, Callable[[Array, Array], Array]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "clamped_swiglu": clamped_swiglu,
}
"""What joins the gate and the other hidden features, by the kind of MLP."""


# These are as large as the hidden features. A GPU computes them as the features pass by, if that takes few
# instructions: hence no tanh and no division, slopes written out, and in the backward pass everything once more from
# the features themselves (`jax.checkpoint`) and not from something that the forward pass has written beside them.


@jax.checkpoint
def _swiglu(gate: Array, inputs: Array) -> Array:
    dtype = jnp.promote_types(inputs.dtype, jnp.float32)
    wide_gate = gate.astype(dtype)
    return (wide_gate * _sigmoid(wide_gate) * inputs.astype(dtype)).astype(inputs.dtype)


@jax.checkpoint
def _geglu(gate: Array, inputs: Array) -> Array:
    dtype = jnp.promote_types(inputs.dtype, jnp.float32)
    return (_wide_gelu(gate.astype(dtype)) * inputs.astype(dtype)).astype(inputs.dtype)


@jax.checkpoint
def _clamped_swiglu(gate: Array, inputs: Array) -> Array:
    dtype = jnp.promote_types(inputs.dtype, jnp.float32)
    wide_gate = jnp.minimum(gate.astype(dtype), _CLAMPED_LIMIT)
    wide_inputs = jnp.clip(inputs.astype(dtype), -_CLAMPED_LIMIT, _CLAMPED_LIMIT)
    return (wide_gate * _sigmoid(_CLAMPED_SLOPE * wide_gate) * (wide_inputs + 1)).astype(inputs.dtype)


@jax.checkpoint
def _gelu(inputs: Array) -> Array:
    return _wide_gelu(inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))).astype(inputs.dtype)


@jax.custom_jvp
def _wide_gelu(x: Array) -> Array:
    return x * _sigmoid(_GELU_SLOPE * x * (1 + _GELU_CUBIC * jnp.square(x)))


@_wide_gelu.defjvp
def _wide_gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    square = jnp.square(x)
    gate = _sigmoid(_GELU_SLOPE * x * (1 + _GELU_CUBIC * square))
    slope = gate + (gate - jnp.square(gate)) * (_GELU_SLOPE * x) * (1 + 3 * _GELU_CUBIC * square)
    return x * gate, slope * tangent


@jax.custom_jvp
def _sigmoid(x: Array) -> Array:
    # GPUs have an instruction for 1/√y; a division takes ten.
    return jnp.square(jax.lax.rsqrt(1 + jnp.exp(-x)))


@_sigmoid.defjvp
def _sigmoid_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    y = _sigmoid(x)
    return y, (y - jnp.square(y)) * tangent
