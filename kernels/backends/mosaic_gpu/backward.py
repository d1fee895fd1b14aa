"""What the backward passes share.

Sources: FlashAttention-3 (arXiv:2407.08608), FlashAttention-2 (arXiv:2307.08691).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.memory import spread
from kernels.backends.mosaic_gpu.pairs import keep_allowed
from kernels.call import AttentionCall

_LOG2_E = math.log2(math.e)
LSE, PULL = 0, 1
"""Of a row's two numbers in shared memory, `row_smem`."""


class Operands(NamedTuple):
    """What both passes read, padded to whole tiles and whole head dims.

    `lse` is in units of log₂, and huge where a row attends to nothing; `pull` is the softmax's pull on a row,
    Σ output·d_output, less what arrives through lse itself.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    d_output: Float[Array, "B T N V"]
    lse: Float[Array, "B N T"]
    pull: Float[Array, "B N T"]


def log2_scale(call: AttentionCall) -> float:
    """What brings the tensor cores' product (with a soft cap: what the cap leaves of it) to units of log₂."""
    return _LOG2_E * (call.scale if call.logits_soft_cap is None else call.logits_soft_cap)


def weigh_pairs(logits, lse, call: AttentionCall, is_partial, allowed, *, rows: bool):
    """Weights of a tile, and by what the soft cap shrinks the gradient of its logits (None without one).

    Args:
      lse: of the rows or columns, in units of log₂; None if the logits had it subtracted already.
    """
    cap, slope = call.logits_soft_cap, None
    if cap is not None:
        logits = jnp.tanh(logits * (call.scale / cap))
        slope = 1 - logits * logits
    exponent = keep_allowed(logits, is_partial, allowed) * log2_scale(call)
    return jnp.exp2(exponent if lse is None else exponent - spread(lse, logits.shape, rows=rows)), slope


def see_last(free, num_steps, num_stages: int) -> None:
    """Waits for the last completions of a ring's barriers: whoever waits at a barrier must see each of them."""

    @pl.loop(jnp.maximum(num_steps - num_stages, 0), num_steps)
    def _(step):
        plgpu.barrier_wait(free.at[jax.lax.rem(step, num_stages)])


def multiply(acc, a, b, spare) -> None:
    if spare is not None:
        spare[...] = a
        a = spare
    plgpu.wgmma(acc, a, b)
