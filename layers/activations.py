"""Activations of an MLP: a function of the hidden features, or their product with a gate.

Shapes: F MLP width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels.tracing.number_types import at_least_float32
from layers.config import MLPKind

# gpt-oss's (arXiv:2508.10925): its gate's sigmoid is steeper, and both sides are clamped.
_CLAMPED_SLOPE = 1.702
_CLAMPED_LIMIT = 7.0
_GELU_SLOPE = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715


# These arrays are as large as the hidden features. A GPU computes them as the features pass by, if that takes few
# instructions: hence no tanh and no division, slopes written out, and in the backward pass everything once more from
# the features themselves (`jax.checkpoint`) and not from something that the forward pass has written beside them. The
# weights are in here so that one pass over the features gives all gradients.
@functools.partial(jax.checkpoint, static_argnums=0)
def activate(
    kind: MLPKind,
    features: Float[Array, "*batch F"],
    gate: Float[Array, "*batch F"] | None = None,
    weights: Float[Array, "*batch"] | None = None,
) -> Float[Array, "*batch F"]:
    """The hidden features that an MLP's last matrix multiplies, computed in float32 or wider.

    Args:
      kind: gelu, in its tanh approximation; the others multiply the features with a gate. swiglu: silu(gate) ·
        features; geglu: gelu(gate) · features; clamped_swiglu: g · sigmoid(1.702 g) · (x + 1), where g is the gate up
        to 7, and x the features from -7 to 7.
      features: any float type.
      gate: of that type; None for gelu, which has none.
      weights: factors on the hidden features; None: 1.

    Returns:
      In the features' own type.

    Raises:
      ValueError: a gate that is missing, or one for gelu.

    Source: GELU, Hendrycks and Gimpel, arXiv:1606.08415, where (1 + tanh(z)) / 2 is sigmoid(2z); the gates, Shazeer,
    arXiv:2002.05202; clamped, gpt-oss, arXiv:2508.10925, and its reference code, https://github.com/openai/gpt-oss.
    """
    if (gate is None) != (kind == "gelu"):
        expected, got = ("a gate", "none") if gate is None else ("no gate", "one")
        raise ValueError(f"kind={kind!r} takes {expected}, got {got}")
    dtype = at_least_float32(features.dtype)
    hidden = features.astype(dtype)
    hidden = _gelu(hidden) if gate is None else _apply(GATES[kind], gate.astype(dtype), hidden)
    if weights is not None:
        hidden *= weights[..., None].astype(dtype)
    return hidden.astype(features.dtype)


def _sigmoid(x: Array) -> Array:
    # GPUs have an instruction for 1/√y; a division takes ten.
    return jnp.square(lax.rsqrt(1 + jnp.exp(-x)))


def _silu_and_slope(x: Array, steepness: float = 1.0) -> tuple[Array, Array]:
    sigmoid = _sigmoid(steepness * x if steepness != 1 else x)
    value = x * sigmoid
    return value, sigmoid + steepness * (value - value * sigmoid)


def _gelu_and_slope(x: Array) -> tuple[Array, Array]:
    square = jnp.square(x)
    sigmoid = _sigmoid(_GELU_SLOPE * x * (1 + _GELU_CUBIC * square))
    slope = sigmoid + (sigmoid - jnp.square(sigmoid)) * (_GELU_SLOPE * x) * (1 + 3 * _GELU_CUBIC * square)
    return x * sigmoid, slope


def _swiglu(gate: Array, features: Array) -> tuple[Array, Array, Array]:
    silu, slope = _silu_and_slope(gate)
    return silu * features, slope * features, silu


def _geglu(gate: Array, features: Array) -> tuple[Array, Array, Array]:
    gelu, slope = _gelu_and_slope(gate)
    return gelu * features, slope * features, gelu


def _clamped_swiglu(gate: Array, features: Array) -> tuple[Array, Array, Array]:
    silu, slope = _silu_and_slope(jnp.minimum(gate, _CLAMPED_LIMIT), _CLAMPED_SLOPE)
    clamped = jnp.minimum(jnp.maximum(features, -_CLAMPED_LIMIT), _CLAMPED_LIMIT)
    to_gate = jnp.where(gate > _CLAMPED_LIMIT, 0.0, slope * (clamped + 1))
    is_beyond = (features > _CLAMPED_LIMIT) | (features < -_CLAMPED_LIMIT)
    return silu * (clamped + 1), to_gate, jnp.where(is_beyond, 0.0, silu)


GATES: dict[str, Callable[[Array, Array], tuple[Array, Array, Array]]] = {
    "swiglu": _swiglu,
    "geglu": _geglu,
    "clamped_swiglu": _clamped_swiglu,
}
"""(gate, features) → the hidden features, and their slopes in the gate and in the features."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _apply(gated: Callable[[Array, Array], tuple[Array, Array, Array]], gate: Array, features: Array) -> Array:
    return gated(gate, features)[0]


@_apply.defjvp
def _apply_jvp(gated: Callable, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    hidden, *slopes = gated(*primals)
    return hidden, slopes[0] * tangents[0] + slopes[1] * tangents[1]


@jax.custom_jvp
def _gelu(x: Array) -> Array:
    return _gelu_and_slope(x)[0]


@_gelu.defjvp
def _gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    value, slope = _gelu_and_slope(*primals)
    return value, slope * tangents[0]
