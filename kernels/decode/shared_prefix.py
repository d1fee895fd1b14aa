"""Decoding over a cache whose first slots all sequences share: these are read once for all, and not once for each.

A few queries of many sequences become many queries over one long key. Each sequence's own tokens are attended to as in
any cache, and log-sum-exps merge the two, as in Hydragen (arXiv:2402.05099) and cascade inference (FlashInfer,
arXiv:2501.01005).

Dimensions: B batch (each element one sequence), T new tokens of each, N query heads, K key/value heads, H and V head
dims of key and value, S shared slots, P parts that they are split into.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.attention.dispatch import dot_product_attention
from kernels.context.exchanges.ring import merge
from kernels.decode.call import DecodeCall, DecodeInputs, OutputAndLse
from kernels.decode.unified import UnifiedCache

# Chosen for an H200: a GPU's programs are tiles of so many query rows of a head, and no part is shorter than this.
_QUERY_ROWS, _SHORTEST_PART = 128, 2048


def attend_to_shared(
    inputs: DecodeInputs, call: DecodeCall, cache: UnifiedCache, device: jax.Device | None
) -> OutputAndLse:
    """Attention to the shared slots alone, without sinks, by the fastest backend of `dot_product_attention`."""
    num_shared, num_queries = cache.table.num_shared, call.batch * call.num_new
    num_parts = _num_parts(call, num_shared, cache.block_size)
    query = inputs.query.reshape(1, num_queries, call.num_heads, call.head_dim)

    def divide(slots: Float[Array, "C K X"]) -> Float[Array, "P S/P K X"]:
        return slots[:num_shared].reshape(num_parts, -1, *slots.shape[1:])

    output, lse = dot_product_attention(
        jnp.broadcast_to(query, (num_parts, *query.shape[1:])),
        divide(cache.key),
        divide(cache.value),
        call.mask,
        query_positions=jnp.broadcast_to(inputs.query_positions.reshape(1, -1), (num_parts, num_queries)),
        key_value_positions=jnp.arange(num_shared, dtype=jnp.int32).reshape(num_parts, -1),
        scale=call.scale,
        logits_soft_cap=call.logits_soft_cap,
        device=device,
        return_lse=True,
    )
    whole = output[0].astype(call.softmax_dtype), lse[0]
    for part in range(1, num_parts):
        whole = merge(whole, (output[part].astype(call.softmax_dtype), lse[part]))
    output, lse = whole
    return (
        output.reshape(call.batch, call.num_new, call.num_heads, call.value_dim),
        lse.reshape(call.batch, call.num_new, call.num_heads),
    )


def _num_parts(call: DecodeCall, num_shared: int, block_size: int) -> int:
    """The parts that keep a GPU's multiprocessors busy where there are few queries, a power of two."""
    busy = call.target.num_multiprocessors or 1
    num_programs = call.num_heads * math.ceil(call.batch * call.num_new / _QUERY_ROWS)
    num_parts, num_blocks = 1, num_shared // block_size
    while 2 * num_parts * num_programs <= busy and num_shared // (2 * num_parts) >= _SHORTEST_PART:
        if num_blocks % (2 * num_parts):
            break
        num_parts *= 2
    return num_parts
