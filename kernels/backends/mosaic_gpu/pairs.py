"""Which pairs of a PARTIAL tile may attend, evaluated within a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from kernels.backends.mosaic_gpu.memory import load_vector
from kernels.call import AttentionCall, AttentionInputs

_LAYOUT = plgpu.Layout.WGMMA


class Tokens(NamedTuple):
    """What is known of each token on the device only, `[B, L]` padded to whole tiles; None where it wasn't given.

    The same tuple holds the arrays outside of a kernel and the references to them inside.
    """

    query_segment_ids: Any = None
    key_value_segment_ids: Any = None
    query_positions: Any = None
    key_value_positions: Any = None

    @staticmethod
    def of(inputs: AttentionInputs, block_q: int, block_kv: int) -> Tokens:
        """The ids and positions of a call; the last tile is filled by repeating the last token's."""

        def padded(tokens: Int[Array, "B L"] | None, block: int):
            if tokens is None:
                return None
            return jnp.pad(tokens, [(0, 0), (0, -tokens.shape[1] % block)], mode="edge")

        return Tokens(
            padded(inputs.query_segment_ids, block_q),
            padded(inputs.key_value_segment_ids, block_kv),
            padded(inputs.query_positions, block_q),
            padded(inputs.key_value_positions, block_kv),
        )


def keep_allowed(logits: jax.Array, is_partial, allowed: Callable[[tuple[int, int]], jax.Array]) -> jax.Array:
    """Sets the logits of pairs that may not attend to −inf; evaluates the mask in PARTIAL tiles only.

    Args:
      logits: of a tile, in registers.
      is_partial: whether the tile is PARTIAL, a scalar.
      allowed: (shape) → which pairs may attend.
    """
    # One loop with a branch, not one loop for each kind of tile: half the program, and fewer registers spilled.
    return jax.lax.cond(is_partial, lambda x: jnp.where(allowed(x.shape), x, -jnp.inf), lambda x: x, logits)


def allowed_pairs(
    call: AttentionCall,
    tokens: Tokens,
    batch,
    q_first,
    kv_first,
    shape: tuple[int, int],
    *,
    kv_padded: bool,
    transposed: bool,
) -> jax.Array:
    """Which pairs of a tile may attend.

    Args:
      call: its mask, lengths and what is given of tokens.
      tokens: references to what is given.
      batch, q_first, kv_first: element of the batch; index of the tile's first query and first key.
      shape: (queries, keys) of the tile, or (keys, queries) if transposed.
      kv_padded: whether keys past the call's last one may be in the tile.
      transposed: whether keys are the rows.

    Returns:
      bool of `shape`, in the layout of an accumulator.
    """
    q_dim, kv_dim = (1, 0) if transposed else (0, 1)

    def index(first, dim):
        return first + plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=_LAYOUT)

    def given(ref, first, dim):
        vector = load_vector(ref.at[batch, pl.ds(first, shape[dim])], rows=dim == 0, shared=False)
        return jax.lax.broadcast_in_dim(vector, shape, [dim])

    kv_index = index(kv_first, kv_dim)
    if call.has_positions:
        q_pos = given(tokens.query_positions, q_first, q_dim)
        kv_pos = given(tokens.key_value_positions, kv_first, kv_dim)
    else:
        q_pos, kv_pos = index(q_first, q_dim), kv_index
    allowed = call.mask(q_pos, kv_pos)
    if call.has_segment_ids:
        q_ids = given(tokens.query_segment_ids, q_first, q_dim)
        allowed &= q_ids == given(tokens.key_value_segment_ids, kv_first, kv_dim)
    if kv_padded:
        allowed &= kv_index < call.kv_len
    return allowed
