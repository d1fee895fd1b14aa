"""Decoding in plain XLA, on any device: an online softmax over the blocks that are visited.

All rows of a call advance together, each through a list of its own; one that is through waits for the longest.

Dimensions: B rows of the call (each one sequence's), T new tokens of each, N query heads, K key/value heads
(N = K·G), R = G·T rows of a query tile, c cells of some blocks, H and V head dims of key and value.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.decode.blocks import block_kinds, list_visits
from kernels.decode.call import DecodeCall, DecodeInputs
from kernels.decode.query_tiles import INITIAL_MAX, allowed_pairs, capped_logits, finish, query_tiles
from kernels.varying import vary

# Cells that one turn of the loop takes of each row: on a CPU few, so that short sequences pay for little; elsewhere
# enough that starting a turn's kernels doesn't count.
_CPU_CELLS, _ACCELERATOR_CELLS = 256, 2048


def unsupported_reason(call: DecodeCall, tuning: None = None) -> str | None:
    """Serves every call."""
    return None


def attend(
    inputs: DecodeInputs, call: DecodeCall, tuning: None = None
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention of one call. See `kernels.decode_attention`."""
    cache, sequences = inputs.cache, inputs.sequences
    visits = list_visits(block_kinds(call.mask, inputs.query_positions, cache.blocks(sequences)))
    num_visited = visits.counts[:, 1]
    cells = _CPU_CELLS if call.target.platform == "cpu" else _ACCELERATOR_CELLS
    blocks_per_turn = min(max(1, cells // call.block_size), call.num_blocks)
    query = query_tiles(inputs.query, call)

    def turn(i, carry):
        acc, row_max, row_sum = carry
        rank = i * blocks_per_turn + jnp.arange(blocks_per_turn, dtype=jnp.int32)
        blocks = visits.blocks.at[:, rank].get(mode="clip")
        cell = (blocks[..., None] * call.block_size + jnp.arange(call.block_size, dtype=jnp.int32)).reshape(
            call.batch, -1
        )
        position, seen = cache.cells(sequences, cell)
        seen &= jnp.repeat(rank[None] < num_visited[:, None], call.block_size, axis=1)
        key, value = cache.read(sequences, cell)
        allowed = allowed_pairs(inputs.query_positions, position, seen, call)
        # What no query may see isn't multiplied by a weight of 0 either: another sequence's NaN would come through.
        value = jnp.where(allowed.any((1, 2))[..., None, None], value, 0)

        logits = capped_logits(_matmul(call, "bkrh,bckh->bkrc", query, key), allowed, call)
        new_max = jnp.maximum(row_max, logits.max(-1))
        probabilities = jnp.exp(logits - new_max[..., None])
        rescale = jnp.exp(row_max - new_max)
        row_sum = row_sum * rescale + probabilities.sum(-1)
        acc = acc * rescale[..., None] + _matmul(call, "bkrc,bckv->bkrv", probabilities.astype(call.dtype), value)
        return acc, new_max, row_sum

    rows = query.shape[:3]
    carry = (
        jnp.zeros((*rows, call.value_dim), call.softmax_dtype),
        jnp.full(rows, INITIAL_MAX, call.softmax_dtype),
        jnp.zeros(rows, call.softmax_dtype),
    )
    num_turns = -(-num_visited.max() // blocks_per_turn)
    acc, row_max, row_sum = jax.lax.fori_loop(0, num_turns, turn, vary(carry, call.varying_axes))

    return finish(acc, row_max, row_sum, inputs.sinks, call)


def _matmul(call: DecodeCall, subscripts: str, a: Array, b: Array) -> Array:
    """Operands in the call's dtype, at its full precision; sums in the softmax's."""
    # By default GPUs and TPUs round 32-bit operands to fewer bits.
    precision = None if call.dtype.itemsize == 2 else jax.lax.Precision.HIGHEST
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=call.softmax_dtype)
