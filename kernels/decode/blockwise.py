"""Decoding in plain XLA, on any device: an online softmax over the blocks that are visited.

All rows of a call advance together, each through a list of its own; one that is through waits for the longest.

Dimensions: B rows of the call (each one sequence's), T new tokens of each, N query heads, K key/value heads
(N = K·G), R = G·T rows of a query tile, c cells of some blocks, H and V head dims.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kernels.decode.blocks import block_kinds, list_visits
from kernels.decode.call import DecodeCall, DecodeInputs

# Masked logits and the softmax's initial maximum: finite, so that no inf − inf arises, and apart, so that
# exp(masked − initial) is 0.
_MASKED = -0.7 * float(np.finfo(np.float32).max)
_INITIAL_MAX = 0.5 * _MASKED
# Cells that one turn of the loop takes of each row: on a CPU few, so that short sequences pay for little; elsewhere
# enough that starting a turn's kernels doesn't count.
_CPU_CELLS, _ACCELERATOR_CELLS = 256, 2048


def unsupported_reason(call: DecodeCall) -> str | None:
    """Serves every call."""
    return None


def attend(inputs: DecodeInputs, call: DecodeCall) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention of one call. See `kernels.decode_attention`."""
    cache, sequences = inputs.cache, inputs.sequences
    visits = list_visits(block_kinds(call.mask, inputs.query_positions, cache.blocks(sequences)))
    num_visited = visits.counts[:, 1]
    cells = _CPU_CELLS if call.target.platform == "cpu" else _ACCELERATOR_CELLS
    blocks_per_turn = min(max(1, cells // call.block_size), call.num_blocks)
    query = inputs.query.reshape(call.batch, call.num_new, call.num_kv_heads, call.group_size, call.head_dim)
    query = query.transpose(0, 2, 3, 1, 4).reshape(call.batch, call.num_kv_heads, -1, call.head_dim)

    def turn(i, carry):
        acc, peak, total = carry
        rank = i * blocks_per_turn + jnp.arange(blocks_per_turn, dtype=jnp.int32)
        blocks = visits.blocks.at[:, rank].get(mode="clip")
        cell = (blocks[..., None] * call.block_size + jnp.arange(call.block_size, dtype=jnp.int32)).reshape(
            call.batch, -1
        )
        position, seen = cache.cells(sequences, cell)
        seen &= jnp.repeat(rank[None] < num_visited[:, None], call.block_size, axis=1)
        key, value = cache.read(sequences, cell)
        allowed = _allowed(call, inputs.query_positions, position, seen)
        # What no query may see isn't multiplied by a weight of 0 either: another sequence's NaN would come through.
        value = jnp.where(allowed.any((1, 2))[..., None, None], value, 0)

        logits = _matmul(call, "bkrh,bckh->bkrc", query, key) * call.scale
        if call.logits_soft_cap is not None:
            logits = call.logits_soft_cap * jnp.tanh(logits / call.logits_soft_cap)
        logits = jnp.where(allowed, logits, _MASKED)
        new_peak = jnp.maximum(peak, logits.max(-1))
        weights = jnp.exp(logits - new_peak[..., None])
        shrink = jnp.exp(peak - new_peak)
        total = total * shrink + weights.sum(-1)
        acc = acc * shrink[..., None] + _matmul(call, "bkrc,bckv->bkrv", weights.astype(call.dtype), value)
        return acc, new_peak, total

    rows = query.shape[:3]
    carry = (
        jnp.zeros((*rows, call.value_dim), call.softmax_dtype),
        jnp.full(rows, _INITIAL_MAX, call.softmax_dtype),
        jnp.zeros(rows, call.softmax_dtype),
    )
    num_turns = -(-num_visited.max() // blocks_per_turn)
    acc, peak, total = jax.lax.fori_loop(0, num_turns, turn, carry)

    attends = total > 0
    if inputs.sinks is not None:
        sinks = inputs.sinks.astype(call.softmax_dtype).reshape(call.num_kv_heads, -1)
        sinks = jnp.repeat(sinks, call.num_new, axis=1)
        new_peak = jnp.maximum(peak, sinks)
        shrink = jnp.exp(peak - new_peak)
        acc, peak, total = acc * shrink[..., None], new_peak, total * shrink + jnp.exp(sinks - new_peak)
    total = jnp.where(attends, total, 1)
    lse = jnp.where(attends, peak + jnp.log(total), -jnp.inf)
    output = (acc / total[..., None]).astype(call.dtype)
    return _by_token(call, output), _by_token(call, lse[..., None])[..., 0]


def _allowed(
    call: DecodeCall,
    query_positions: Int[Array, "B T"],
    position: Int[Array, "B c"],
    seen: Bool[Array, "B c"],
) -> Bool[Array, "B K R c"]:
    """Which cells each row of each query tile may attend to."""
    allowed = call.mask(query_positions[:, :, None], position[:, None, :])
    # A per-head mask answers [N, B, T, c], any other [B, T, c].
    by_head = jnp.moveaxis(allowed, 0, 1) if allowed.ndim == 4 else allowed[:, None]
    by_head = jnp.broadcast_to(by_head & seen[:, None, None], (call.batch, call.num_heads, *allowed.shape[-2:]))
    return by_head.reshape(call.batch, call.num_kv_heads, -1, allowed.shape[-1])


def _by_token(call: DecodeCall, tile: Float[Array, "B K R X"]) -> Float[Array, "B T N X"]:
    """Turns query tiles, whose rows run over (group, token), back into tokens."""
    tile = tile.reshape(call.batch, call.num_heads, call.num_new, -1)
    return tile.transpose(0, 2, 1, 3)


def _matmul(call: DecodeCall, subscripts: str, a: Array, b: Array) -> Array:
    """Operands in the call's dtype, at its full precision; sums in the softmax's."""
    # By default GPUs and TPUs round 32-bit operands to fewer bits.
    precision = None if call.dtype.itemsize == 2 else jax.lax.Precision.HIGHEST
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=call.softmax_dtype)
