"""One block of a GPT: attention and an MLP on the residual stream, with their norms.

Shapes: B batch, T tokens, W width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from kernels import Bounds, SlabCache
from layers.activation_sharding import ActivationSharding
from layers.attention import Attention
from layers.config import GPTConfig, NormPlacement
from layers.layer_config import LayerConfig
from layers.mlp import MLP
from layers.moe import MoE, RouterSums
from layers.norm import RMSNorm
from layers.projections import small_init
from layers.rotary import Rotation


class Block(nnx.Module):
    """Attention, then an MLP or a mixture of experts, each added to the residual stream.

    Norms stand before them, behind them or both.

    Args:
      config: the network's sizes.
      layer: the block's own settings, from `config.layer`.
      activation_sharding: how activations lie on a mesh; None: left to XLA.
      rngs: source of the initial values.

    Source: pre-norm as in GPT-2 (Radford et al., 2019), with RMSNorm and without biases as in Llama (arXiv:2302.13971).
    """

    def __init__(
        self,
        config: GPTConfig,
        layer: LayerConfig,
        *,
        activation_sharding: ActivationSharding | None = None,
        rngs: nnx.Rngs,
    ):
        kernel_init = small_init(config.width)
        output_kernel_init = small_init(config.width, num_layers=config.num_layers)

        def norm(placement: NormPlacement) -> RMSNorm | None:
            return make_norm(config) if config.norm_placement in (placement, "both") else None

        self.activation_sharding = activation_sharding
        self.attention_norm, self.attention_post_norm = norm("pre"), norm("post")
        self.attention = Attention(
            config.width,
            config.num_heads,
            layer.head_dim,
            num_kv_heads=layer.num_kv_heads,
            mask=layer.mask,
            rope_base=layer.rope_base,
            rope_scaling=layer.rope_scaling,
            rope_fraction=layer.rope_fraction,
            attention_bias=config.attention_bias,
            output_bias=config.output_bias,
            qk_norm=config.qk_norm,
            qk_norm_after_rope=config.qk_norm_after_rope,
            query_scale=config.query_scale,
            logits_soft_cap=config.logits_soft_cap,
            sinks=config.sinks,
            implementation=config.implementation,
            decode_implementation=config.decode_implementation,
            compute_dtype=config.compute_dtype,
            param_dtype=config.param_dtype,
            norm_epsilon=config.norm_epsilon,
            norm_scale_offset=config.norm_scale_offset,
            kernel_init=kernel_init,
            output_kernel_init=output_kernel_init,
            activation_sharding=activation_sharding,
            rngs=rngs,
        )
        self.mlp_norm, self.mlp_post_norm = norm("pre"), norm("post")
        options: dict[str, Any] = {
            "kind": config.mlp,
            "compute_dtype": config.compute_dtype,
            "param_dtype": config.param_dtype,
            "kernel_init": kernel_init,
            "output_kernel_init": output_kernel_init,
            "activation_sharding": activation_sharding,
            "rngs": rngs,
        }
        self.mlp = (
            MLP(config.width, config.mlp_width, use_bias=config.mlp_bias, **options)
            if config.moe is None
            else MoE(config.width, config.moe, **options)
        )

    def __call__(
        self,
        hidden: Float[Array, "B T W"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        rotation: Rotation | None = None,
        token_order: Int[Array, "B T"] | None = None,
        counted: Bool[Array, "B T"] | None = None,
        bounds: Bounds | None = None,
    ) -> tuple[Float[Array, "B T W"], RouterSums | None]:
        """Returns the residual stream after this block and the sums of its router; None without one.

        See `MoE` for `counted`, and `Attention` for the other arguments.
        """
        hidden = checkpoint_name(hidden, "layer_input")
        with jax.named_scope("attention"):
            inputs = _normalize(self.attention_norm, hidden)
            attended = self.attention(inputs, segment_ids, positions, rotation, token_order, bounds)
            hidden = hidden + _normalize(self.attention_post_norm, attended)
        return self._add_mlp(hidden, counted)

    def prefill(
        self, hidden: Float[Array, "B T W"], cache: SlabCache, rotation: Rotation | None, **options: Any
    ) -> tuple[Float[Array, "B T W"], SlabCache]:
        """Returns the residual stream after this block and the cache; see `Attention.prefill` for the arguments."""
        return self._with_cache(self.attention.prefill, hidden, cache, rotation, options)

    def decode(
        self, hidden: Float[Array, "B T W"], cache: SlabCache, rotation: Rotation | None, **options: Any
    ) -> tuple[Float[Array, "B T W"], SlabCache]:
        """Returns the residual stream after this block and the cache; see `Attention.decode` for the arguments."""
        return self._with_cache(self.attention.decode, hidden, cache, rotation, options)

    def _with_cache(
        self,
        attend: Callable[..., tuple[Array, SlabCache]],
        hidden: Float[Array, "B T W"],
        cache: SlabCache,
        rotation: Rotation | None,
        options: dict[str, Any],
    ) -> tuple[Float[Array, "B T W"], SlabCache]:
        attended, cache = attend(_normalize(self.attention_norm, hidden), cache, rotation, **options)
        return self._add_mlp(hidden + _normalize(self.attention_post_norm, attended))[0], cache

    def _add_mlp(
        self, hidden: Float[Array, "B T W"], counted: Bool[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T W"], RouterSums | None]:
        with jax.named_scope("mlp"):
            inputs = _normalize(self.mlp_norm, hidden)
            outputs, sums = self.mlp(inputs, counted) if isinstance(self.mlp, MoE) else (self.mlp(inputs), None)
            return hidden + _normalize(self.mlp_post_norm, outputs), sums


def make_norm(config: GPTConfig) -> RMSNorm:
    """A norm of the residual stream."""
    return RMSNorm(
        config.width,
        epsilon=config.norm_epsilon,
        scale_offset=config.norm_scale_offset,
        param_dtype=config.param_dtype,
    )


def _normalize(norm: RMSNorm | None, hidden: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
    return hidden if norm is None else norm(hidden)
