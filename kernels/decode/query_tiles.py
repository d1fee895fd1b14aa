"""Query tiles of a decoding step in plain XLA: their masked logits, and their output back by token.

A query tile holds the rows that read one key/value head, so that its keys and values are read once for all of them.

Dimensions: B batch (each element one sequence), T new tokens of each, N query heads, K key/value heads (N = K·G),
R = G·T rows of a query tile, c slots, H and V head dims of key and value.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.backends.softmax import MASKED, RunningSoftmax, soft_capped
from kernels.decode.call import DecodeCall, OutputAndLse
from kernels.decode.tree import SlotTree


def query_tiles(query: Float[Array, "B T N H"], call: DecodeCall) -> Float[Array, "B K R H"]:
    """Queries by key/value head; a tile's rows run over (query head of the group, token)."""
    query = query.reshape(call.batch, call.num_new, call.num_kv_heads, call.group_size, call.head_dim)
    return query.transpose(0, 2, 3, 1, 4).reshape(call.batch, call.num_kv_heads, -1, call.head_dim)


def allowed_pairs(
    query_positions: Int[Array, "B T"],
    position: Int[Array, "#B c"],
    seen: Bool[Array, "B c"],
    tree: SlotTree | None,
    call: DecodeCall,
) -> Bool[Array, "B K R c"]:
    """Which slots each row of each query tile may attend to. With a tree of these slots, it has their positions."""
    position = position if tree is None else tree.positions
    allowed = call.mask(query_positions[:, :, None], position[:, None, :])
    if tree is not None:
        allowed &= tree.sees
    # A per-head mask answers [N, B, T, c], any other [B, T, c].
    by_head = jnp.moveaxis(allowed, 0, 1) if allowed.ndim == 4 else allowed[:, None]
    by_head = jnp.broadcast_to(by_head & seen[:, None, None], (call.batch, call.num_heads, *allowed.shape[-2:]))
    return by_head.reshape(call.batch, call.num_kv_heads, -1, allowed.shape[-1])


def capped_logits(
    products: Float[Array, "B K R c"], allowed: Bool[Array, "B K R c"], call: DecodeCall
) -> Float[Array, "B K R c"]:
    """Logits from the products of queries and keys: scaled, capped and masked."""
    return jnp.where(allowed, soft_capped(products * call.scale, call.logits_soft_cap), MASKED)


def finish(softmax: RunningSoftmax, sinks: Float[Array, " N"] | None, call: DecodeCall) -> OutputAndLse:
    """Output and lse of the tokens, sinks included."""
    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(call.softmax_dtype).reshape(call.num_kv_heads, -1), call.num_new, axis=1)
    output, lse = softmax.finish(sinks, call.dtype)
    return _by_token(output, call), _by_token(lse[..., None], call)[..., 0]


def _by_token(tiles: Float[Array, "B K R X"], call: DecodeCall) -> Float[Array, "B T N X"]:
    """Query tiles back to tokens."""
    tiles = tiles.reshape(call.batch, call.num_heads, call.num_new, -1)
    return tiles.transpose(0, 2, 1, 3)
