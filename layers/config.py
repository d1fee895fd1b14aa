"""What a GPT is made of, as plain data: no Flax, no device.

A field's docstring is its help text on the command line. Both classes validate themselves on construction.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, get_args, get_type_hints

import jax

from kernels import CausalMask, Mask, Tuning
from kernels.backends import Task, find_backend
from kernels.static_numbers import checked_soft_cap
from layers.remat import parse_remat

DTypeName = Literal["float32", "bfloat16", "float64"]
MLPKind = Literal["gelu", "swiglu"]
RopeScalingKind = Literal["none", "linear", "ntk", "llama3"]

_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 2.0**128 - 2.0**104
_FLOAT32_SMALLEST = 2.0**-126  # devices take smaller ones for 0
# Composed masks are evaluated recursively, also while JAX traces, when Python's stack is deep already.
_MAX_MASK_DEPTH = 64


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed to serve positions past those trained on."""

    kind: RopeScalingKind = "none"
    """linear: position interpolation (arXiv:2306.15595); ntk: NTK-aware base change (arXiv:2309.00071);
    llama3: low frequencies only (arXiv:2407.21783)."""
    factor: float = 1.0
    """How many times longer the context becomes."""
    low_frequency_factor: float = 1.0
    """llama3: frequencies with fewer than this many turns in the original context are divided by `factor`."""
    high_frequency_factor: float = 4.0
    """llama3: frequencies with more than this many turns in the original context stay as they are."""
    original_context_length: int = 8192
    """llama3: the context length, in tokens, before scaling."""

    def __post_init__(self):
        check_choice("rope_scaling.kind", self.kind, RopeScalingKind)
        if not 1.0 <= self.factor < math.inf:
            raise ValueError(f"rope_scaling.factor={self.factor} must be finite and at least 1 (1 changes nothing)")
        if self.kind == "none" and self.factor != 1.0:
            raise ValueError(
                f"rope_scaling.factor={self.factor} has no effect with rope_scaling.kind='none'; "
                "set the kind to linear, ntk or llama3"
            )
        if not 0.0 < self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(
                f"rope_scaling.low_frequency_factor={self.low_frequency_factor} must be positive and less than "
                f"high_frequency_factor={self.high_frequency_factor}"
            )
        if self.original_context_length < 1:
            raise ValueError(f"rope_scaling.original_context_length={self.original_context_length} must be at least 1")
        check_numbers(self, "rope_scaling.")


@dataclass(frozen=True)
class GPTConfig:
    """A pre-norm decoder-only transformer; the defaults are GPT-2 small's size, 124M parameters."""

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
    """gelu: two matrices; swiglu: three, gated (arXiv:2002.05202)."""
    tie_embeddings: bool = True
    """The head uses the embedding's own matrix."""
    masks: tuple[Mask, ...] = (CausalMask(),)
    """Attention masks, repeated over the layers: layer i uses masks[i % len(masks)]."""
    rope_base: float | None = 10_000.0
    """Base of the rotary frequencies (arXiv:2104.09864); None: no position embedding at all."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """How rotary frequencies are scaled for a longer context."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head (arXiv:2302.05442)."""
    logits_soft_cap: float | None = None
    """Attention logits become cap * tanh(logits / cap); None: as they are."""
    sinks: bool = False
    """A learned logit per head that takes part in the softmax and has no value (arXiv:2309.17453)."""
    implementation: str | Tuning | None = None
    """Attention backend of training and of prompts: its name, or in a config file a tuning object from `kernels`, which
    also says how it runs; None: the fastest that serves the call."""
    decode_implementation: str | Tuning | None = None
    """The same for the tokens that are written one after another: dense, triton, blockwise or None."""
    remat: str = "full"
    """What the backward pass recomputes. none: nothing; save_matmuls: only what is elementwise; save_attention: all but
    the attention kernel; full: each block from its input; offload_attention: as save_attention, but what is kept, the
    blocks' inputs too, waits in the host's memory; offload_inputs: as full, with the inputs there. Or by names, such as
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

    def __post_init__(self):
        for name in ("vocab_size", "num_layers", "width", "num_heads", "num_kv_heads", "head_dim", "mlp_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 1")
        check_numbers(self, "model.")
        check_choice("model.mlp", self.mlp, MLPKind)
        check_remat(self.remat)
        for name in ("compute_dtype", "param_dtype"):
            check_choice(f"model.{name}", getattr(self, name), DTypeName)
            if getattr(self, name) == "float64" and not jax.config.read("jax_enable_x64"):
                raise ValueError(
                    f"model.{name}='float64' needs JAX's 64-bit types, without which every array would be float32; "
                    "set JAX_ENABLE_X64=1 in the environment, or use float32"
                )
        check_implementation(self.implementation, "attention", "model.implementation")
        check_implementation(self.decode_implementation, "decoding", "model.decode_implementation")
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim, self.rope_base)
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
        if len(self.masks) > self.num_layers:
            raise ValueError(
                f"model.masks has {len(self.masks)} entries for num_layers={self.num_layers}, so the last would "
                f"never be used; drop some, or raise num_layers to {len(self.masks)}"
            )
        object.__setattr__(self, "logits_soft_cap", checked_soft_cap(self.logits_soft_cap, "model.logits_soft_cap"))
        if not self.norm_epsilon > 0:
            raise ValueError(f"model.norm_epsilon={self.norm_epsilon} must be positive")

    def check_looks_back_only(self) -> None:
        """Checks that a text can be written with this model, one token after another.

        Raises:
          ValueError: a mask lets a token see later ones, or has no closed form to tell by.
        """
        for mask in self.masks:
            if mask.looks_ahead:
                raise ValueError(
                    f"the model's mask {mask!r} may let a token see later ones, which aren't there yet while a text is "
                    "being written; sampling needs masks that only look back, such as CausalMask() & LocalMask(1023, 0)"
                )

    @property
    def layers_per_mask(self) -> dict[Mask, int]:
        """The masks, in the order of the layers, and how many layers have each."""
        return dict(Counter(self.masks[layer % len(self.masks)] for layer in range(self.num_layers)))

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole network, the embedding among them."""
        attention = self.width * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        attention += 2 * self.head_dim * self.qk_norm + self.num_heads * self.sinks
        mlp = (3 if self.mlp == "swiglu" else 2) * self.width * self.mlp_width
        vocabulary = (1 if self.tie_embeddings else 2) * self.vocab_size * self.width
        return vocabulary + self.num_layers * (attention + mlp + 2 * self.width) + self.width


def check_remat(remat: str) -> None:
    """Raises ValueError if this is no remat policy."""
    try:
        parse_remat(remat)
    except ValueError as error:
        raise ValueError(f"model.remat={remat!r}: {error}") from None


def check_implementation(implementation: str | Tuning | None, task: Task, argument: str) -> None:
    """Raises ValueError if there is no such backend."""
    if implementation is not None:
        find_backend(implementation, task, argument)


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int, rope_base: float | None) -> None:
    """Raises ValueError if these head counts and sizes cannot make an attention layer."""
    if num_heads % num_kv_heads:
        small = [n for n in range(1, math.isqrt(num_heads) + 1) if num_heads % n == 0]
        divisors = sorted({*small, *(num_heads // n for n in small)})
        raise ValueError(
            f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}; "
            f"set num_kv_heads to one of {divisors}"
        )
    if rope_base is None:
        return
    if head_dim % 2:
        raise ValueError(
            f"head_dim={head_dim} is odd, and rotary embedding turns pairs of features; "
            f"use {head_dim + 1}, or rope_base=None for no rotary embedding"
        )
    if not rope_base > 1:
        raise ValueError(
            f"rope_base={rope_base} must be greater than 1 (10,000 is usual); None turns rotary embedding off"
        )


def check_numbers(config: object, section: str = "") -> None:
    """Checks that a device can hold the numbers of a config class: integers are int32 there, and the rest float32.

    Raises:
      ValueError: a number is NaN or infinite, or lies outside of its type.
    """
    for name, hint in get_type_hints(type(config)).items():
        value, is_float = getattr(config, name), float in (hint, *get_args(hint))
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not abs(value) <= (_FLOAT32_MAX if is_float else _INT32_MAX):  # NaN compares as False
            raise ValueError(
                f"{section}{name}={value} must be finite and at most "
                + ("3.4e38, the most that float32 holds" if is_float else f"2^31 - 1 = {_INT32_MAX:,}")
            )
        if 0 < abs(value) < _FLOAT32_SMALLEST:
            raise ValueError(f"{section}{name}={value} is 0 in float32, whose smallest number is 1.2e-38")


def check_choice(name: str, value: object, choices: object) -> None:
    """Raises ValueError if the value isn't one of a Literal's."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}")
