"""Rotary position embedding (RoPE), with the usual ways of stretching it.

Shapes: B batch, T tokens, N heads, H head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels.token_integers import int32_positions
from layers.config import RopeScaling

# Positions are split at this many tokens before they meet a frequency; see `_phases`.
_COARSE_TOKENS = 1024


class Rotation(NamedTuple):
    """The angle that each feature pair is turned by, the same for every head and layer."""

    cos: Float[Array, "B T half_H"] | Float[Array, "1 T half_H"]
    sin: Float[Array, "B T half_H"] | Float[Array, "1 T half_H"]


def inverse_frequencies(head_dim: int, base: float, scaling: RopeScaling) -> np.ndarray:
    """Radians per token of each feature pair, in float64.

    Args:
      head_dim: features of a head; even.
      base: ratio between the fastest and (nearly) the slowest frequency.
      scaling: how to change the frequencies for longer contexts.

    Returns:
      [head_dim / 2], fastest first.

    Source: Su et al., RoFormer, arXiv:2104.09864; for the scalings see `RopeScaling`.
    """
    if scaling.kind == "ntk":
        # The slowest frequency is interpolated by the whole factor, the fastest not at all.
        base = base * scaling.factor ** (head_dim / max(head_dim - 2, 1))
    frequencies = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        num_turns = scaling.original_context_length * frequencies / (2 * np.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        unscaled_share = np.clip((num_turns - low) / (high - low), 0.0, 1.0)
        return frequencies * (unscaled_share + (1 - unscaled_share) / scaling.factor)
    return frequencies


def apply_rope(
    inputs: Float[Array, "B T N H"],
    positions: Int[Array, "B T"] | Int[Array, "1 T"],
    *,
    base: float = 10_000.0,
    scaling: RopeScaling = RopeScaling(),  # noqa: B008  (frozen)
) -> Float[Array, "B T N H"]:
    """Turns each feature pair (i, i + H/2) by an angle proportional to its token's position, in float32 at least.

    Args:
      inputs: queries or keys.
      positions: each token's position in its document.
      base: base of the frequencies.
      scaling: how the frequencies are changed for longer contexts.

    Returns:
      The turned inputs, in the inputs' own type.

    Source: Su et al., RoFormer, arXiv:2104.09864; pairs are halves of the head dim, as in GPT-NeoX and Hugging Face's
    Llama.
    """
    inputs = jnp.asarray(inputs)
    rotation = make_rotation(positions, inputs.shape[-1], base=base, scaling=scaling, dtype=inputs.dtype)
    return rotate(inputs, rotation)


def make_rotation(
    positions: Int[Array, "B T"] | Int[Array, "1 T"],
    head_dim: int,
    *,
    base: float = 10_000.0,
    scaling: RopeScaling = RopeScaling(),  # noqa: B008  (frozen)
    dtype: jnp.dtype | str = "float32",
) -> Rotation:
    """The angles of `apply_rope`, for many layers to share.

    Args:
      positions: each token's position in its document.
      head_dim: features of a head; even.
      base, scaling: as for `apply_rope`.
      dtype: of the inputs to turn. The angles are float32 or wider.
    """
    with jax.named_scope("rope"):
        frequencies = inverse_frequencies(head_dim, base, scaling)
        phases = _phases(int32_positions("positions", positions), frequencies, jnp.promote_types(dtype, jnp.float32))
        return Rotation(jnp.cos(phases), jnp.sin(phases))


def rotate(inputs: Float[Array, "B T N H"], rotation: Rotation) -> Float[Array, "B T N H"]:
    """The second half of `apply_rope`.

    Args:
      inputs: queries or keys.
      rotation: from `make_rotation`.

    Returns:
      The turned inputs, in the inputs' own type.
    """
    with jax.named_scope("rope"):
        cos, sin = (angle[:, :, None, :] for angle in rotation)
        first, second = jnp.split(inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32)), 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned.astype(inputs.dtype)


def _phases(positions: Int[Array, "B T"], frequencies: np.ndarray, dtype: np.dtype) -> Float[Array, "B T half_H"]:
    # A float32 product of a position near 2^20 and a frequency near 1 is off by up to 0.06 rad. The whole turns in each
    # 1024 tokens are therefore taken off in float64, ahead of time, which leaves 4e-4 rad at 2^20.
    coarse = np.angle(np.exp(1j * _COARSE_TOKENS * frequencies)).astype(dtype)
    num_coarse, num_fine = jnp.divmod(positions[..., None], _COARSE_TOKENS)
    return num_coarse.astype(dtype) * coarse + num_fine.astype(dtype) * frequencies.astype(dtype)
