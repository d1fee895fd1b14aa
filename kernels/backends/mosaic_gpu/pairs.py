"""Which pairs of a PARTIAL tile may attend, evaluated within a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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

    def given(self, side: str = "") -> dict[str, Any]:
        """What was given, or what was given of one side ("query" or "key_value"), by name."""
        return {name: x for name, x in self._asdict().items() if x is not None and name.startswith(side)}

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
      is_partial: whether the tile is PARTIAL: a traced scalar, or a bool where that is known.
      allowed: (shape) → which pairs may attend.
    """

    def mask(logits):
        return jnp.where(allowed(logits.shape), logits, -jnp.inf)

    if isinstance(is_partial, bool):
        return mask(logits) if is_partial else logits
    return jax.lax.cond(is_partial, mask, lambda logits: logits, logits)


def token_memory(tokens: Tokens, *, query: tuple[int, int], key_value: tuple[int, int]) -> dict[str, Any]:
    """Shared memory for what is given of tokens, by name.

    Args:
      tokens: the arrays.
      query, key_value: number of pieces of either side that are kept, and tokens in a piece.
    """
    sides = {"query": query, "key_value": key_value}
    return {name: plgpu.SMEM(sides[side], jnp.int32) for side in sides for name in tokens.given(side)}


def copy_tokens(tokens: Tokens, memory: dict[str, Any], side: str, where, piece, ready) -> None:
    """Starts to copy a piece of one side's tokens; each array arrives at the barrier once.

    Args:
      tokens: references to the arrays.
      memory: of `token_memory`.
      side: "query" or "key_value".
      where: (element of the batch, tokens) to copy.
      piece: where to.
      ready: the barrier.
    """
    for name, ref in tokens.given(side).items():
        plgpu.copy_gmem_to_smem(ref.at[where], memory[name].at[piece], ready)


def tile_tokens(memory: dict[str, Any], *, query, key_value) -> Tokens:
    """References to the tokens of one tile: a piece of either side."""
    pieces = {"query": query, "key_value": key_value}
    return Tokens(
        **{name: memory[name].at[pieces[side]] for side in pieces for name in memory if name.startswith(side)}
    )


def allowed_pairs(
    call: AttentionCall,
    tokens: Tokens,
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
      tokens: references to the tile's own, in shared memory.
      q_first, kv_first: index of the tile's first query and first key.
      shape: (queries, keys) of the tile, or (keys, queries) if transposed.
      kv_padded: whether keys past the call's last one may be in the tile.
      transposed: whether keys are the rows.

    Returns:
      bool of `shape`, in the layout of an accumulator.
    """
    q_dim, kv_dim = (1, 0) if transposed else (0, 1)

    def index(first, dim):
        return first + plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=_LAYOUT)

    def given(ref, dim):
        return jax.lax.broadcast_in_dim(load_vector(ref, rows=dim == 0), shape, [dim])

    kv_index = index(kv_first, kv_dim)
    if call.has_positions:
        q_pos = given(tokens.query_positions, q_dim)
        kv_pos = given(tokens.key_value_positions, kv_dim)
    else:
        q_pos, kv_pos = index(q_first, q_dim), kv_index
    allowed = call.mask(q_pos, kv_pos)
    if call.has_segment_ids:
        allowed &= given(tokens.query_segment_ids, q_dim) == given(tokens.key_value_segment_ids, kv_dim)
    if kv_padded:
        allowed &= kv_index < call.kv_len
    return allowed
