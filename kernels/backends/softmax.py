"""The online softmax in plain XLA, tile by tile: `blockwise` attention and decoding share it.

Source: FlashAttention (arXiv:2205.14135).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Masked logits and the softmax's initial maximum: finite, so that no inf − inf arises, and apart, so that
# exp(masked − initial) is 0.
MASKED = -0.7 * float(np.finfo(np.float32).max)
INITIAL_MAX = 0.5 * MASKED


class RunningSoftmax(NamedTuple):
    """What rows have accumulated over the tiles so far: unnormalised output, maximum and sum of exponentials."""

    acc: Float[Array, "*rows V"]
    row_max: Float[Array, "*rows"]
    row_sum: Float[Array, "*rows"]

    @staticmethod
    def start(rows: tuple[int, ...], value_dim: int, dtype: np.dtype) -> RunningSoftmax:
        """Before the first tile."""
        return RunningSoftmax(
            jnp.zeros((*rows, value_dim), dtype), jnp.full(rows, INITIAL_MAX, dtype), jnp.zeros(rows, dtype)
        )

    def add_tile(self, logits: Float[Array, "*rows C"], times_values: Callable[[Array], Array]) -> RunningSoftmax:
        """After one more tile, of masked logits; `times_values` multiplies its probabilities by its values."""
        new_max = jnp.maximum(self.row_max, logits.max(-1))
        p = jnp.exp(logits - new_max[..., None])
        alpha = jnp.exp(self.row_max - new_max)
        return RunningSoftmax(self.acc * alpha[..., None] + times_values(p), new_max, self.row_sum * alpha + p.sum(-1))

    def finish(self, sinks: Float[Array, "*rows"] | None, dtype: np.dtype) -> tuple[Array, Array]:
        """Output, in a dtype, and lse; with the sink of each row."""
        acc, row_max, row_sum = self
        # A NaN isn't 0: only a row without an allowed pair has summed up nothing.
        attends = row_sum != 0
        if sinks is not None:
            new_max = jnp.maximum(row_max, sinks)
            alpha = jnp.exp(row_max - new_max)
            acc, row_max, row_sum = acc * alpha[..., None], new_max, row_sum * alpha + jnp.exp(sinks - new_max)
        row_sum = jnp.where(attends, row_sum, 1)
        lse = jnp.where(attends, row_max + jnp.log(row_sum), -jnp.inf)
        return jnp.where(attends[..., None], acc / row_sum[..., None], 0).astype(dtype), lse


def matmul(subscripts: str, a: Array, b: Array, softmax_dtype: np.dtype) -> Array:
    """An einsum of operands at their full precision, with sums in the softmax's dtype."""
    # By default GPUs and TPUs round 32-bit operands to fewer bits.
    precision = None if a.dtype.itemsize == 2 else jax.lax.Precision.HIGHEST
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=softmax_dtype)


def soft_capped(logits: Array, cap: float | None) -> Array:
    """cap·tanh(logits / cap); None: as they are."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)
