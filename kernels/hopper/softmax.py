"""Online softmax over the tiles of a row, which rescales only where it must.

Probabilities are relative to a row maximum, lest they overflow. The textbook's online softmax raises row_max with every
tile that holds a higher logit, and rescales what it has summed up. But probabilities are as exact relative to a number
some powers of two below the highest logit. So a tile's probabilities are first computed with the row_max as it is. If
their sums are small, which is nearly always so after the first tiles, that was all: no maximum, no exchange between
the threads that share a row, no rescaling. Only otherwise the tile's maximum raises row_max, and its probabilities are
computed again.

Sources: online softmax (arXiv:1805.02867). FlashAttention-4 (github.com/Dao-AILab/flash-attention, flash_attn/cute)
takes each tile's maximum, but rescales only where it rose far.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from kernels.hopper.machine import Hopper
from kernels.hopper.registers import ROW_LAYOUT, WGMMA_ROWS, spread

# Of a thread's probabilities in a tile. No probability is higher than their sum, and float16 ends at 2¹⁶.
_HIGHEST_SUM = 2.0**10
# Less than any logit, but finite. While a row has seen no allowed pair, exp2(−inf − this) = 0, and its first allowed
# pair has an infinite probability, so that row_max is raised.
_INITIAL_ROW_MAX = -1e30
LOG2_E = math.log2(math.e)
# exp(a logit − it) = 0.
_HUGE_LSE = 1e30


def finite_lse(lse: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """lse, but huge where a row attends to nothing, so that none of its pairs has a probability."""
    return jnp.where(lse != -jnp.inf, lse, _HUGE_LSE)


class SoftmaxState(NamedTuple):
    """Of rows, over the tiles so far."""

    row_max: Float[Array, " rows"]  # what probabilities are relative to, in units of log₂
    row_sum: Float[Array, " rows"]  # each thread's part of the sums (`Hopper.join_partial_sums` joins them)


class TileSoftmax(NamedTuple):
    """Of one tile."""

    p: Float[Array, "rows kv"]  # the probabilities, in the matmul's dtype
    state: SoftmaxState  # of the rows, with this tile
    alpha: Float[Array, " rows"]  # the factor that rescales everything summed up before this tile
    rescales: Bool[Array, ""]  # whether alpha differs from 1 in any of a warp's rows


class OnlineSoftmax(NamedTuple):
    """Softmax of logits that are −inf where a pair may not attend."""

    dtype: Any  # of the probabilities, as the matmul takes them
    log2_scale: float  # converts logits to units of log₂
    machine: Hopper

    def first_tile(self, logits: Float[Array, "rows kv"]) -> tuple[Float[Array, "rows kv"], SoftmaxState]:
        """Probabilities of the rows' first tile, whose maximum becomes row_max."""
        return self._raise_row_max(logits, SoftmaxState(_column(_INITIAL_ROW_MAX), _column(0.0)))[:2]

    def next_tile(self, logits: Float[Array, "rows kv"], state: SoftmaxState) -> TileSoftmax:
        """Probabilities of another tile."""
        p, sums, is_high = self._exp2(logits, state.row_max)
        same = p.astype(self.dtype), SoftmaxState(state.row_max, state.row_sum + sums), _column(1.0)
        # A warp branches by itself, so nothing in the branch may wait for another warp.
        p, state, alpha = jax.lax.cond(is_high, lambda: self._raise_row_max(logits, state), lambda: same)
        return TileSoftmax(p, state, alpha, is_high)

    def _raise_row_max(self, logits, state: SoftmaxState):
        """Probabilities relative to the higher of the tile's maximum and row_max, the new state, and alpha."""
        row_max = jnp.maximum(state.row_max, logits.max(axis=1) * self.log2_scale)
        alpha = jnp.exp2(state.row_max - row_max)
        p, sums, _ = self._exp2(logits, row_max)
        return p.astype(self.dtype), SoftmaxState(row_max, state.row_sum * alpha + sums), alpha

    def _exp2(self, logits, row_max):
        """Probabilities in float32, each thread's part of their rows' sums, and whether one of a warp's is high."""
        # In units of log₂ its argument is one multiply-add.
        p = jnp.exp2(logits * self.log2_scale - spread(row_max, logits.shape, rows=True))
        return p, *self.machine.partial_sums(p, _HIGHEST_SUM)


def _column(number: float) -> Float[Array, " rows"]:
    return plgpu.layout_cast(jnp.full((WGMMA_ROWS,), number, jnp.float32), ROW_LAYOUT)
