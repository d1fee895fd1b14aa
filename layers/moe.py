"""A mixture of experts that replaces a block's MLP: each token goes to the few experts that its router chooses.

On a mesh each device routes its own tokens, and experts lie as a dense MLP does: whole on every device that computes
with them, but for their hidden features, which `tensor` splits. So the ranks of `tensor` have equal work, however
unevenly tokens choose. With whole experts on each rank instead, tokens would travel to their experts, and the
ranks of seldom chosen ones would wait.

Shapes: B batch, T sequence, N tokens of a device, K experts of a token, E experts, W width, L layers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from kernels import Target
from kernels.experts import GroupedMatmul
from kernels.tracing.mesh_axes import manual_axes
from kernels.tracing.number_types import at_least_float32
from layers.activation_sharding import ActivationSharding
from layers.config import MLPKind, MoEConfig
from layers.experts import Experts
from layers.projections import small_init

_HAS_BFLOAT16 = 8.0  # the compute capability from which on GPUs multiply it


class RouterSums(NamedTuple):
    """Sums over tokens of what a router does, of which its losses are made; of one layer, or of several in a stack."""

    choices: Int[Array, "*L E"]
    """Tokens that chose each expert."""
    probabilities: Float[Array, "*L E"]
    """The softmax over all experts' logits."""
    squared_log_partitions: Float[Array, "*L"]
    """The squared log-sum-exp of all experts' logits."""

    def load_balance(
        self, choices: Int[Array, "*L E"] | None = None, num_tokens: Int[Array, ""] | int = 1
    ) -> Float[Array, ""]:
        """The load-balance loss times a number of tokens, the mean over layers.

        A layer's loss is E times the sum over experts of the part of all tokens that chose the expert and its mean
        probability: K where all are chosen alike. The number that is chosen has no gradient. The loss of a batch is the
        sum of its parts', if each part gets the choices in all of them.

        Args:
          choices: of all tokens that share their load; None: of these.
          num_tokens: tokens that made them.

        Returns:
          The sum over these tokens.

        Source: Switch Transformers, arXiv:2101.03961, equations 4 to 6, where K is 1.

        Example:
          >>> sums = RouterSums(jnp.array([4, 4]), jnp.array([2.0, 2.0]), jnp.array(0.0))  # 4 tokens, K = E = 2
          >>> float(sums.load_balance(num_tokens=4) / 4)
          2.0
        """
        choices = self.choices if choices is None else choices
        load = choices.astype(self.probabilities.dtype) / num_tokens
        return choices.shape[-1] * jnp.sum(load * self.probabilities, axis=-1).mean()

    def z_loss(self) -> Float[Array, ""]:
        """The router z-loss times the number of tokens, the mean over layers.

        Source: ST-MoE, arXiv:2202.08906, equation 5.
        """
        return self.squared_log_partitions.mean()


class MoE(nnx.Module):
    """A router, and experts that are MLPs.

    A token's output is the sum of its experts' outputs, each times the softmax of its logit: over the token's own
    experts, or over all. Where logits tie, the expert of the lower number goes first. The router computes in float32,
    or float64 where the layer does.

    Args:
      width: input and output features.
      config: numbers and sizes of experts.
      kind: of the experts, as of `MLP`.
      compute_dtype: type of the experts' operands and of the output.
      param_dtype: type that parameters are stored in.
      kernel_init: initialiser of the router, and of the experts' `up` and `gate`; None: `small_init(width)`.
      output_kernel_init: initialiser of the experts' `down`; None: `kernel_init`.
      activation_sharding: where tokens and hidden features lie on a mesh; None: on one device.
      implementation: of the experts' matmuls, as `kernels.experts` names it; None: the fastest that has been
        checked on the device.
      rngs: source of the initial values.

    Source: Shazeer et al., arXiv:1701.06538; dropless, with grouped matmuls: MegaBlocks, arXiv:2211.15841.

    Example:
      >>> config = MoEConfig(num_experts=8, num_experts_per_token=2, expert_width=32)
      >>> outputs, sums = MoE(64, config, rngs=nnx.Rngs(0))(jnp.ones((2, 128, 64)))
      >>> outputs.shape, int(sums.choices.sum())
      ((2, 128, 64), 512)
    """

    def __init__(
        self,
        width: int,
        config: MoEConfig,
        *,
        kind: MLPKind = "swiglu",
        compute_dtype: jnp.dtype | str = "bfloat16",
        param_dtype: jnp.dtype | str = "float32",
        kernel_init: nnx.Initializer | None = None,
        output_kernel_init: nnx.Initializer | None = None,
        activation_sharding: ActivationSharding | None = None,
        implementation: GroupedMatmul | None = None,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.activation_sharding = activation_sharding
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.router_dtype = at_least_float32(self.compute_dtype)
        kernel_init = kernel_init or small_init(width)
        self.router = nnx.Linear(
            width,
            config.num_experts,
            use_bias=config.router_bias,
            kernel_init=kernel_init,
            dtype=self.router_dtype,
            param_dtype=jnp.dtype(param_dtype),
            rngs=rngs,
        )
        self.experts = Experts(
            width,
            config,
            kind=kind,
            param_dtype=jnp.dtype(param_dtype),
            kernel_init=kernel_init,
            output_kernel_init=output_kernel_init or kernel_init,
            implementation=implementation,
            rngs=rngs,
        )

    def __call__(
        self, inputs: Float[Array, "B T W"], counted: Bool[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T W"], RouterSums]:
        """Sends each token through its experts.

        Args:
          inputs: any float type.
          counted: tokens that the sums are of; None: all. The others, such as padding, go through experts like them.

        Returns:
          The contribution to the residual stream, in the compute dtype, and sums over the tokens that this call sees:
          within a caller's `jax.shard_map`, those of this device.
        """
        sharding = self.activation_sharding
        if sharding is None:
            outputs, sums = self._mix(inputs, counted)
            return checkpoint_name(outputs, "projection"), sums
        layout = sharding.layout
        graphdef, state = nnx.split(self)
        tokens, features = P(layout.batch_axes, layout.sequence_axis), layout.head_axis
        own = tuple(axis for axis in (*layout.batch_axes, layout.sequence_axis) if axis not in manual_axes())

        def on_device(state: nnx.State, inputs: Array, counted: Array | None) -> tuple[Array, RouterSums]:
            outputs, sums = nnx.merge(graphdef, state)._mix(inputs, counted, features_over=features)
            return outputs, lax.psum(sums, own)

        specs = jax.tree_util.tree_map_with_path(lambda path, _: _spec(path, features), state)
        outputs, sums = layout.map(
            on_device,
            (state, sharding.gather_tokens(inputs), counted),
            (specs, tokens, None if counted is None else tokens),
            (tokens, P()),
        )
        return checkpoint_name(sharding.scatter_tokens(outputs), "projection"), sums

    def _logits(self, tokens: Float[Array, "N W"]) -> Float[Array, "N E"]:
        """The router's, by products as exact as those of float32.

        A GPU would round operands to TF32, and close logits would change their order. Its tensor cores multiply parts
        of 16 bits instead, in six products.
        """
        kernel, bias = self.router.kernel[...].astype(self.router_dtype), self.router.bias
        precision: lax.Precision | lax.DotAlgorithmPreset = lax.Precision.HIGHEST
        if self.router_dtype == jnp.float32 and (self._target.compute_capability or 0) >= _HAS_BFLOAT16:
            precision = lax.DotAlgorithmPreset.BF16_BF16_F32_X6
        logits = lax.dot(tokens.astype(self.router_dtype), kernel, precision=precision)
        return logits if bias is None else logits + bias[...].astype(self.router_dtype)

    @property
    def _target(self) -> Target:
        sharding = self.activation_sharding
        return Target.of(None if sharding is None else sharding.mesh.devices.flat[0])

    def _mix(
        self, inputs: Float[Array, "B T W"], counted: Bool[Array, "B T"] | None, *, features_over: str | None = None
    ) -> tuple[Float[Array, "B T W"], RouterSums]:
        """A call on one device. `features_over`: the mesh axis whose ranks each have some of the hidden features."""
        tokens = inputs.reshape(-1, inputs.shape[-1])
        with jax.named_scope("router"):
            logits = checkpoint_name(self._logits(tokens), "projection")
            highest, chosen = lax.top_k(logits, self.config.num_experts_per_token)
            log_partitions = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
            weights = jax.nn.softmax(highest) if self.config.normalize_top_k else jnp.exp(highest - log_partitions)
            sums = _router_sums(logits, log_partitions, chosen, counted)
        with jax.named_scope("experts"):
            tokens = tokens.astype(self.compute_dtype)
            outputs = self.experts(tokens, chosen, weights, self._target, features_over=features_over)
        return outputs.reshape(inputs.shape), sums


def _router_sums(logits: Array, log_partitions: Array, chosen: Array, counted: Array | None) -> RouterSums:
    num_tokens, num_experts = logits.shape
    counted = jnp.ones(num_tokens, bool) if counted is None else counted.reshape(-1)
    choices = jnp.zeros(num_experts, jnp.int32).at[chosen].add(counted[:, None].astype(jnp.int32))
    probabilities = jnp.where(counted[:, None], jnp.exp(logits - log_partitions), 0).sum(0)
    squares = jnp.where(counted, jnp.square(log_partitions[:, 0]), 0).sum()
    return RouterSums(choices, probabilities, squares)


def _spec(path: tuple, features: str) -> P:
    """The partition of one parameter of a layer, where an axis splits hidden features."""
    name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
    if name.startswith(("experts.up", "experts.gate")):
        return {"bias": P(None, features), "a": P()}.get(name.rpartition(".")[2], P(None, None, features))
    return P(None, features, None) if name in ("experts.down.kernel", "experts.down.lora.a") else P()
