"""Root-mean-square layer norm.

Shapes: `*batch` any leading dims, D features.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from kernels.tracing.number_types import at_least_float32


class RMSNorm(nnx.Module):
    """Divides by the root mean square over the last dim and multiplies by a learned scale, in float32 or wider.

    Args:
      num_features: size of the last dim.
      epsilon: added to the mean square.
      scale_offset: added to the scale. The sum starts at 1.
      param_dtype: type that the scale is stored in.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.

    Example:
      >>> norm = RMSNorm(64)
      >>> norm(jnp.full((2, 64), 3.0, jnp.bfloat16))[0, :3]
      Array([1, 1, 1], dtype=bfloat16)
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        scale_offset: float = 0.0,
        param_dtype: jnp.dtype | str = "float32",
    ):
        self.epsilon = epsilon
        self.scale_offset = scale_offset
        self.scale = nnx.Param(jnp.full(num_features, 1.0 - scale_offset, param_dtype))

    def __call__(self, inputs: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Returns the normalised inputs, in the inputs' own type."""
        with jax.named_scope("norm"):
            dtype = at_least_float32(inputs.dtype)
            values = inputs.astype(dtype)
            mean_square = jnp.mean(jnp.square(values), axis=-1, keepdims=True)
            values = values * jax.lax.rsqrt(mean_square + self.epsilon)
            scale = self.scale[...].astype(dtype)
            return (values * (scale + self.scale_offset if self.scale_offset else scale)).astype(inputs.dtype)
