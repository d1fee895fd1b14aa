"""The config of a GPT as plain data: no Flax, no device.

A field's docstring is its help text on the command line. The classes validate themselves on construction.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import jax

from kernels import CausalMask, Mask, ScheduledWindow, Tuning
from kernels.arguments.static_numbers import checked_soft_cap
from layers.checks import check_choice, check_implementation, check_numbers
from layers.layer_config import LayerConfig, LayerOverride
from layers.remat import parse_remat
from layers.rope_scaling import RopeScaling

DTypeName = Literal["float32", "bfloat16", "float64"]
MLPKind = Literal["gelu", "swiglu", "geglu", "clamped_swiglu"]
NormPlacement = Literal["pre", "post", "both"]
QKNorm = Literal["none", "per_head", "whole"]

# Composed masks are evaluated recursively, also while JAX traces, when Python's stack is deep already.
_MAX_MASK_DEPTH = 64


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts that replaces each block's MLP: every token goes to its top few, and none is dropped."""

    num_experts: int
    """Experts of a layer."""
    num_experts_per_token: int
    """Experts that each token goes to, those of the largest router logits."""
    expert_width: int
    """Hidden features of an expert, an MLP of the kind that `GPTConfig.mlp` names."""
    normalize_top_k: bool = True
    """A token's weights add up to 1 over its own experts (Mixtral, gpt-oss); False: over all of them."""
    router_bias: bool = False
    """A bias on the router's logits (gpt-oss)."""
    expert_bias: bool = False
    """Biases in the experts' matrices (gpt-oss)."""
    load_balance_loss_weight: float = 0.01
    """Weight in the loss of the load-balance loss (arXiv:2101.03961); 0: it is a metric only."""
    router_z_loss_weight: float = 0.001
    """Weight in the loss of the mean square of the router logits' log-sum-exp (arXiv:2202.08906); 0: a metric only."""

    def __post_init__(self):
        for name in ("num_experts", "num_experts_per_token", "expert_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.moe.{name}={getattr(self, name)} must be at least 1")
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"model.moe.num_experts_per_token={self.num_experts_per_token} is more than "
                f"num_experts={self.num_experts}; use at most that many"
            )
        for name in ("load_balance_loss_weight", "router_z_loss_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"model.moe.{name}={getattr(self, name)} must be finite and not negative; 0 keeps the metric alone"
                )
        check_numbers(self, "model.moe.")


@dataclass(frozen=True)
class GPTConfig:
    """A decoder-only transformer; the defaults are GPT-2 small's size, 124M parameters."""

    vocab_size: int = 50_304
    """Tokens in the vocabulary (GPT-2's 50,257 rounded up to a multiple of 128)."""
    num_layers: int = 12
    """Transformer blocks."""
    width: int = 768
    """Features of the residual stream."""
    num_heads: int = 12
    """Query heads."""
    num_kv_heads: int = 12
    """Key and value heads; num_heads is a multiple of it (fewer: grouped-query attention, 1: multi-query)."""
    head_dim: int = 64
    """Features of one head."""
    mlp_width: int = 3072
    """Hidden features of the MLP."""
    mlp: MLPKind = "gelu"
    """gelu: two matrices, as in GPT-2 and in none of layers/pretrained/families; swiglu and geglu: three, gated by SiLU
    or GELU in its tanh form (arXiv:2002.05202); clamped_swiglu: gated by x sigmoid(1.702 x), with both sides clamped to
    7 and 1 added to the other one (gpt-oss, arXiv:2508.10925)."""
    mlp_bias: bool = False
    """Biases in the MLP's matrices."""
    moe: MoEConfig | None = None
    """A mixture of experts in each block; None: one MLP."""
    tie_embeddings: bool = True
    """The head uses the embedding's own matrix."""
    masks: tuple[Mask, ...] = (CausalMask(),)
    """Attention masks, repeated over the layers: layer i uses masks[i % len(masks)]. In training, a ScheduledWindow
    grows with the step."""
    layer_overrides: tuple[LayerOverride, ...] = ()
    """Settings of single layers, repeated over the layers as `masks` are: as many as there are masks, unless there is
    at most one of either. Set in a config file."""
    rope_base: float | None = 10_000.0
    """Base of the rotary frequencies (arXiv:2104.09864); None: no position embedding at all."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """How rotary frequencies are scaled for a longer context."""
    rope_fraction: float = 1.0
    """Part of each head's features that rotary embedding turns, from the first (GPT-NeoX, arXiv:2204.06745)."""
    attention_bias: bool = False
    """Biases in the query, key and value projections (Qwen 2, arXiv:2407.10671)."""
    output_bias: bool = False
    """A bias in attention's output projection (gpt-oss, arXiv:2508.10925)."""
    qk_norm: QKNorm = "none"
    """RMS-normalise queries and keys: per_head, over each head's features (arXiv:2302.05442), or whole, over those of
    all heads together (OLMo 2, arXiv:2501.00656)."""
    qk_norm_after_rope: bool = False
    """Normalise queries and keys after the rotary embedding, not before it."""
    query_scale: float | None = None
    """Attention logits are query · key times this; None: 1 / √head_dim. Gemma sets it (arXiv:2408.00118)."""
    logits_soft_cap: float | None = None
    """Attention logits become cap * tanh(logits / cap); None: as they are."""
    sinks: bool = False
    """A learned logit per head that takes part in the softmax and has no value (arXiv:2309.17453)."""
    implementation: str | Tuning | None = None
    """Attention backend of training and of prompts: its name, or in a config file a tuning object from `kernels`, which
    also says how it runs; None: the fastest that serves the call."""
    decode_implementation: str | Tuning | None = None
    """Attention backend of decoding: dense, triton, blockwise, or None, the fastest that serves the call."""
    remat: str = "full"
    """Activations that the backward pass recomputes. none: nothing; save_matmuls: only elementwise operations;
    save_attention: all but the attention kernel; full: each block from its input; offload_attention: as
    save_attention, but with the kept activations and the blocks' inputs in the host's memory; offload_inputs: as full,
    with the blocks' inputs in the host's memory. Or by names, such as
    "save(attention_output, attention_lse) & offload(layer_input)"; see layers/remat.py."""
    scan_layers: bool = True
    """One loop over the layers, so that compile time doesn't grow with depth. False: every layer compiled by itself,
    which spares the copies of activations into the loop's stacks and out of them."""
    compute_dtype: DTypeName = "bfloat16"
    """Type of activations and of the matmuls' operands; float64 for a reference, with JAX_ENABLE_X64=1."""
    param_dtype: DTypeName = "float32"
    """Type that parameters are stored in; no narrower than float32 in training."""
    norm_epsilon: float = 1e-6
    """Added to the mean square in every RMS norm."""
    norm_placement: NormPlacement = "pre"
    """Norms of attention and of the MLP: pre, on the input (GPT-2); post, on the output (OLMo 2, arXiv:2501.00656);
    both (Gemma 2, arXiv:2408.00118)."""
    norm_scale_offset: float = 0.0
    """Added to the scale of every RMS norm; Gemma's is 1, so that a stored scale of 0 changes nothing."""
    embedding_scale: float | None = None
    """Factor on embeddings; Gemma's is √width (arXiv:2403.08295). None: 1."""
    final_logits_soft_cap: float | None = None
    """The head's logits become cap * tanh(logits / cap) (Gemma 2, arXiv:2408.00118); None: as they are."""

    def __post_init__(self):
        for name in ("vocab_size", "num_layers", "width", "num_heads", "num_kv_heads", "head_dim", "mlp_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 1")
        check_numbers(self, "model.")
        for name, choices in (
            ("mlp", MLPKind),
            ("qk_norm", QKNorm),
            ("norm_placement", NormPlacement),
        ):
            check_choice(f"model.{name}", getattr(self, name), choices)
        try:
            parse_remat(self.remat)
        except ValueError as error:
            raise ValueError(f"model.remat={self.remat!r}: {error}") from None
        for name in ("compute_dtype", "param_dtype"):
            check_choice(f"model.{name}", getattr(self, name), DTypeName)
            if getattr(self, name) == "float64" and not jax.config.read("jax_enable_x64"):
                raise ValueError(
                    f"model.{name}='float64' needs JAX's 64-bit types, without which every array would be float32; "
                    "set JAX_ENABLE_X64=1 in the environment, or use float32"
                )
        check_implementation(self.implementation, "attention", "model.implementation")
        check_implementation(self.decode_implementation, "decoding", "model.decode_implementation")
        self._check_masks()
        self._check_layers()
        for name in ("logits_soft_cap", "final_logits_soft_cap"):
            object.__setattr__(self, name, checked_soft_cap(getattr(self, name), f"model.{name}"))
        for name in ("query_scale", "embedding_scale"):
            if (scale := getattr(self, name)) is not None and not scale > 0:
                raise ValueError(f"model.{name}={scale} must be positive; None is the usual scale")
        if not self.norm_epsilon > 0:
            raise ValueError(f"model.norm_epsilon={self.norm_epsilon} must be positive")
        if self.qk_norm == "none" and self.qk_norm_after_rope:
            raise ValueError(
                "model.qk_norm_after_rope=True has no effect with model.qk_norm='none'; set that to per_head or whole"
            )
        if self.moe is not None and self.mlp_bias:
            raise ValueError("model.mlp_bias=True has no effect with model.moe; set model.moe.expert_bias")

    def _check_masks(self) -> None:
        if not self.masks:
            raise ValueError("model.masks is empty; give at least one mask, for example (CausalMask(),)")
        for mask in self.masks:
            if not isinstance(mask, Mask):
                raise ValueError(f"model.masks holds {mask!r}; expected masks from kernels, such as CausalMask()")
            if mask.is_deeper_than(_MAX_MASK_DEPTH):
                raise ValueError(
                    f"model.masks holds a composition of more than {_MAX_MASK_DEPTH} levels of &, | and ~; "
                    "use fewer, or a MaskFn"
                )
            if mask.num_heads not in (None, self.num_heads):
                raise ValueError(
                    f"model.masks holds a MultiHeadMask for {mask.num_heads} heads, but num_heads={self.num_heads}; "
                    "give it one mask per query head"
                )
        if len(windows := {mask.scheduled_window for mask in self.masks} - {None}) > 1:
            raise ValueError(
                f"model.masks holds {' and '.join(sorted(map(repr, windows)))}; give all layers one ScheduledWindow"
            )
        if len(self.masks) > self.num_layers:
            raise ValueError(
                f"model.masks has {len(self.masks)} entries for num_layers={self.num_layers}, so the last would "
                f"never be used; drop some, or raise num_layers to {len(self.masks)}"
            )

    def _check_layers(self) -> None:
        for override in self.layer_overrides:
            if not isinstance(override, LayerOverride):
                raise ValueError(f"model.layer_overrides holds {override!r}; expected a LayerOverride")
        num_masks, num_overrides = len(self.masks), len(self.layer_overrides)
        if num_overrides > self.num_layers:
            raise ValueError(
                f"model.layer_overrides has {num_overrides} entries for num_layers={self.num_layers}, so the last "
                f"would never be used; drop some, or raise num_layers to {num_overrides}"
            )
        if min(num_masks, num_overrides) > 1 and num_masks != num_overrides:
            raise ValueError(
                f"model.layer_overrides has {num_overrides} entries and model.masks {num_masks}; "
                "spell both out to one length, or give one entry that serves all layers"
            )
        for index in range(self.pattern_length):
            try:
                self.layer(index).check(self.num_heads)
            except ValueError as error:
                if not self.layer_overrides:
                    raise
                raise ValueError(f"model.layer_overrides, layer {index}: {error}") from None

    def check_looks_back_only(self) -> None:
        """Checks that a text can be written with this model, one token after another.

        Raises:
          ValueError: a mask lets a token see later ones, or has no closed form that rules it out.
        """
        for mask in self.masks:
            if mask.looks_ahead:
                raise ValueError(
                    f"the model's mask {mask!r} may let a token see later ones, which aren't there yet while a text is "
                    "being written; sampling needs masks that only look back, such as CausalMask() & LocalMask(1023, 0)"
                )

    def with_rope(self, *, only_global: bool = False, **rope: Any) -> GPTConfig:
        """The model with another rotary embedding. Layers without one stay so.

        Args:
          only_global: change the layers whose mask has no window alone.
          **rope: `rope_base` and `rope_scaling`, or one of them.

        Raises:
          ValueError: no layer would change.

        Example:
          >>> from kernels import LocalMask
          >>> model = GPTConfig(masks=(CausalMask() & LocalMask(511, 0), CausalMask()))
          >>> model = model.with_rope(only_global=True, rope_base=1e6)
          >>> [model.layer(index).rope_base for index in range(2)]
          [10000.0, 1000000.0]
        """
        layers = [self.layer(index) for index in range(self.pattern_length)]
        is_changed = [
            layer.rope_base is not None and (layer.mask.lookback is None or not only_global) for layer in layers
        ]
        if not any(is_changed):
            raise ValueError(
                f"no layer's rotary embedding can be set to {rope}: the layers have none"
                + (" or a window" if only_global else "")
            )
        if all(is_changed):
            as_model: dict[str, Any] = dict.fromkeys(rope, "model")
            overrides = tuple(replace(override, **as_model) for override in self.layer_overrides)
            return replace(self, layer_overrides=overrides, **rope)
        held = self.layer_overrides or (LayerOverride(),)
        overrides = tuple(
            replace(held[index % len(held)], **(rope if changes else {})) for index, changes in enumerate(is_changed)
        )
        return replace(self, layer_overrides=overrides)

    @property
    def pattern_length(self) -> int:
        """After how many layers the masks and overrides repeat."""
        return max(len(self.masks), len(self.layer_overrides))

    def layer(self, index: int) -> LayerConfig:
        """The settings of one layer.

        Args:
          index: of the layer, from 0.

        Example:
          >>> nope = LayerOverride(rope_base=None)
          >>> config = GPTConfig(layer_overrides=(LayerOverride(),) * 3 + (nope,))
          >>> [config.layer(index).rope_base for index in range(5)]
          [10000.0, 10000.0, 10000.0, None, 10000.0]
        """
        override = self.layer_overrides[index % len(self.layer_overrides)] if self.layer_overrides else LayerOverride()
        own = {name: value for name in _OVERRIDABLE if (value := getattr(override, name)) != "model"}
        return LayerConfig(
            mask=self.masks[index % len(self.masks)],
            **{name: own.get(name, getattr(self, name)) for name in _OVERRIDABLE},
        )

    @property
    def scheduled_window(self) -> ScheduledWindow | None:
        """The window of `masks` whose width grows over a training run; None: there is none."""
        return next((window for mask in self.masks if (window := mask.scheduled_window) is not None), None)

    @property
    def layer_counts(self) -> dict[LayerConfig, int]:
        """The distinct layers, in their order, and how many there are of each."""
        return dict(Counter(self.layer(index) for index in range(self.num_layers)))

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole network, the embedding among them."""
        attention = sum(count * self._num_attention_parameters(layer) for layer, count in self.layer_counts.items())
        norms = (4 if self.norm_placement == "both" else 2) * self.width
        vocabulary = (1 if self.tie_embeddings else 2) * self.vocab_size * self.width
        return vocabulary + attention + self.num_layers * (self._num_mlp_parameters + norms) + self.width

    def _num_attention_parameters(self, layer: LayerConfig) -> int:
        query, key = self.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        biases = (query + 2 * key) * self.attention_bias + self.width * self.output_bias
        norms = {"none": 0, "per_head": 2 * layer.head_dim, "whole": query + key}[self.qk_norm]
        return self.width * 2 * (query + key) + biases + norms + self.num_heads * self.sinks

    @property
    def _num_mlp_parameters(self) -> int:
        num_inner = 1 if self.mlp == "gelu" else 2  # matrices into the hidden features; one leads out of them
        hidden, bias = (
            (self.mlp_width, self.mlp_bias) if self.moe is None else (self.moe.expert_width, self.moe.expert_bias)
        )
        expert = (num_inner + 1) * self.width * hidden + (num_inner * hidden + self.width) * bias
        if self.moe is None:
            return expert
        return self.moe.num_experts * (expert + self.width + self.moe.router_bias)


_OVERRIDABLE = tuple(field.name for field in fields(LayerOverride))
