"""Rotary position embedding (RoPE), with the usual ways of stretching it.

Shapes: B batch, T tokens, N heads, H head dim, R features of a head that turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels.arguments.token_integers import int32_positions
from kernels.tracing.number_types import at_least_float32
from layers.checks import rotary_dim
from layers.rope_scaling import RopeScaling

# Positions are split at this many tokens before they meet a frequency; see `_phases`.
_COARSE_TOKENS = 1024


class Rotation(NamedTuple):
    """How each feature pair is turned, and stretched where a scaling says so; the same for every head."""

    cos: Float[Array, "B T half_R"] | Float[Array, "1 T half_R"]
    sin: Float[Array, "B T half_R"] | Float[Array, "1 T half_R"]


@dataclass(frozen=True)
class Rotary:
    """The settings of a rotation. Layers with equal settings share their rotation."""

    head_dim: int
    base: float
    scaling: RopeScaling
    fraction: float


def inverse_frequencies(
    num_features: int, base: float, scaling: RopeScaling, context_length: int | None = None
) -> np.ndarray:
    """Radians per token of each feature pair, in float64.

    Args:
      num_features: features of a head that turn, R; even.
      base: ratio between the fastest and (nearly) the slowest frequency.
      scaling: how to change the frequencies for longer contexts.
      context_length: the most tokens that a sequence may have. longrope takes one table or the other by it; the others
        don't ask.

    Returns:
      [R / 2], fastest first.

    Raises:
      ValueError: longrope without a context length.

    Source: Su et al., RoFormer, arXiv:2104.09864; for the scalings see `RopeScaling`.
    """
    if scaling.kind == "ntk":
        # The slowest frequency is interpolated by the whole factor, the fastest not at all.
        base = base * scaling.factor ** (num_features / max(num_features - 2, 1))
    frequencies = base ** (-np.arange(0, num_features, 2, dtype=np.float64) / num_features)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        kept = _yarn_kept_share(num_features, base, scaling)
        return frequencies * (kept + (1 - kept) / scaling.factor)
    if scaling.kind == "longrope":
        if context_length is None:
            raise ValueError(
                "rope_scaling.kind='longrope' takes its short or its long factors by the length of the context; "
                "give context_length, the most tokens that a sequence may have"
            )
        is_long = context_length > scaling.original_context_length
        return frequencies / np.array(scaling.long_factors if is_long else scaling.short_factors)
    if scaling.kind == "llama3":
        num_turns = scaling.original_context_length * frequencies / (2 * np.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        unscaled_share = np.clip((num_turns - low) / (high - low), 0.0, 1.0)
        return frequencies * (unscaled_share + (1 - unscaled_share) / scaling.factor)
    return frequencies


def _yarn_kept_share(num_features: int, base: float, scaling: RopeScaling) -> np.ndarray:
    """The share of each frequency that YaRN keeps: 1 for fast ones, 0 for slow ones."""

    def index_of(num_turns: float) -> float:
        """Fractional index of the frequency that makes `num_turns` turns in the original context."""
        ratio = scaling.original_context_length / (num_turns * 2 * math.pi)
        return num_features * math.log(ratio) / (2 * math.log(base))

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The bound is one of features, not of pairs, as in YaRN's own code.
    first, last = max(first, 0), min(last, num_features - 1)
    if first == last:
        last += 0.001  # a step, without a division by 0
    return 1 - np.clip((np.arange(num_features // 2) - first) / (last - first), 0.0, 1.0)


def attention_factor(scaling: RopeScaling) -> float:
    """The factor of a scaling on turned queries, and on turned keys: it makes attention over long contexts sharper.

    Source: YaRN, arXiv:2309.00071, section 3.4; LongRoPE, arXiv:2402.13753, as in Phi-3's code.
    """
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "yarn":
        return 0.1 * math.log(scaling.factor) + 1.0
    if scaling.kind == "longrope":
        return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_context_length))
    return 1.0


def apply_rope(
    inputs: Float[Array, "B T N H"],
    positions: Int[Array, "B T"] | Int[Array, "1 T"],
    *,
    base: float = 10_000.0,
    scaling: RopeScaling = RopeScaling(),  # noqa: B008  (frozen)
    fraction: float = 1.0,
    context_length: int | None = None,
) -> Float[Array, "B T N H"]:
    """Turns each feature pair (i, i + R/2) by an angle proportional to its token's position, in float32 at least.

    Args:
      inputs: queries or keys.
      positions: each token's position in its document.
      base: base of the frequencies.
      scaling: how the frequencies are changed for longer contexts.
      fraction: part of the features that turn, R / H; those from R on stay as they are.
      context_length: the most tokens that a sequence may have; only longrope asks.

    Returns:
      The turned inputs, in the inputs' own type.

    Raises:
      ValueError: longrope without a context length.

    Source: Su et al., RoFormer, arXiv:2104.09864; pairs are taken from both halves of the turned features, as in
    GPT-NeoX and Hugging Face's Llama.
    """
    inputs = jnp.asarray(inputs)
    rotary = Rotary(inputs.shape[-1], base, scaling, fraction)
    return rotate(inputs, make_rotation(positions, rotary, context_length=context_length, dtype=inputs.dtype))


def make_rotation(
    positions: Int[Array, "B T"] | Int[Array, "1 T"],
    rotary: Rotary,
    *,
    context_length: int | None = None,
    dtype: jnp.dtype | str = "float32",
) -> Rotation:
    """The angles of `apply_rope`, for many layers to share.

    Args:
      positions: each token's position in its document.
      rotary: the layers' settings, as for `apply_rope`.
      context_length: as for `apply_rope`.
      dtype: of the inputs to turn. The angles are float32 or wider.
    """
    with jax.named_scope("rope"):
        num_features = rotary_dim(rotary.head_dim, rotary.fraction)
        frequencies = inverse_frequencies(num_features, rotary.base, rotary.scaling, context_length)
        phases = _phases(int32_positions("positions", positions), frequencies, at_least_float32(dtype))
        cos, sin, factor = jnp.cos(phases), jnp.sin(phases), attention_factor(rotary.scaling)
        return Rotation(cos, sin) if factor == 1 else Rotation(factor * cos, factor * sin)


def rotate(inputs: Float[Array, "B T N H"], rotation: Rotation) -> Float[Array, "B T N H"]:
    """The second step of `apply_rope`.

    Args:
      inputs: queries or keys.
      rotation: from `make_rotation`.

    Returns:
      The turned inputs, in the inputs' own type.
    """
    num_turned = 2 * rotation.cos.shape[-1]
    if num_turned < inputs.shape[-1]:
        turning, still = jnp.split(inputs, [num_turned], axis=-1)
        return jnp.concatenate([rotate(turning, rotation), still], axis=-1)
    with jax.named_scope("rope"):
        cos, sin = (angle[:, :, None, :] for angle in rotation)
        first, second = jnp.split(inputs.astype(at_least_float32(inputs.dtype)), 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.astype(inputs.dtype)


def _phases(positions: Int[Array, "B T"], frequencies: np.ndarray, dtype: np.dtype) -> Float[Array, "B T half_R"]:
    # A float32 product of a position near 2^20 and a frequency near 1 is off by up to 0.06 rad. The whole turns in each
    # 1024 tokens are therefore taken off in float64, ahead of time, which leaves 4e-4 rad at 2^20.
    coarse = np.angle(np.exp(1j * _COARSE_TOKENS * frequencies)).astype(dtype)
    num_coarse, num_fine = jnp.divmod(positions[..., None], _COARSE_TOKENS)
    return num_coarse.astype(dtype) * coarse + num_fine.astype(dtype) * frequencies.astype(dtype)
