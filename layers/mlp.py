"""The feed-forward layer of a transformer block.

Shapes: B batch, T tokens, W width, F MLP width.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from layers.activation_sharding import ActivationSharding
from layers.activations import activate
from layers.checks import check_choice
from layers.config import MLPKind
from layers.projections import project, project_back, small_init


class MLP(nnx.Module):
    """Two matrices with a GELU between them, or three, one of them a gate.

    Args:
      width: input and output features.
      hidden_width: features in between.
      kind: "gelu" (tanh approximation, as GPT-2), "swiglu", "geglu" (Shazeer, arXiv:2002.05202) or "clamped_swiglu"
        (gpt-oss, arXiv:2508.10925).
      use_bias: adds a bias to each matrix.
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
        projections = (self.up,) if self.kind == "gelu" else (self.up, self.gate)
        projected = project(self.activation_sharding, inputs, *projections)
        hidden = activate(self.kind, *(checkpoint_name(features, "projection") for features in projected))
        return checkpoint_name(project_back(self.activation_sharding, hidden, self.down), "projection")
