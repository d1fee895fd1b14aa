"""Decoding in plain XLA, on any device: an online softmax over the blocks that are visited.

All sequences of a call advance together, each through its own list of blocks; shorter lists wait for the longest.

Dimensions: B batch (each element one sequence), T new tokens of each, N query heads, K key/value heads (N = K·G),
R = G·T rows of a query tile, c slots of some blocks, H and V head dims of key and value.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.backends.softmax import RunningSoftmax, matmul
from kernels.decode.blocks import block_tile_kinds
from kernels.decode.call import DecodeCall, DecodeInputs, OutputAndLse
from kernels.decode.query_tiles import allowed_pairs, capped_logits, finish, query_tiles
from kernels.plan import list_rows
from kernels.tracing.mesh_axes import vary

# Slots of a sequence that one step of the loop reads: on a CPU few, so that short sequences pay for little; elsewhere
# enough that starting a step's kernels doesn't count.
_CPU_SLOTS, _ACCELERATOR_SLOTS = 256, 2048


def unsupported_reason(call: DecodeCall, tuning: None = None) -> str | None:
    """Serves every call."""
    return None


def attend(inputs: DecodeInputs, call: DecodeCall, tuning: None = None) -> OutputAndLse:
    """Attention of one call. See `kernels.decode_attention`."""
    cache, sequences = inputs.cache, inputs.sequences
    plan = list_rows(block_tile_kinds(call.mask, inputs.query_positions, inputs.blocks())[:, None])
    blocks, num_visited = plan.tiles, plan.bounds[:, 0, 3]
    assert blocks is not None, "a plan of lists"
    num_slots = _CPU_SLOTS if call.target.platform == "cpu" else _ACCELERATOR_SLOTS
    blocks_per_step = min(max(1, num_slots // call.block_size), call.num_blocks)
    query = query_tiles(inputs.query, call)

    def attend_step(step, softmax):
        rank = step * blocks_per_step + jnp.arange(blocks_per_step, dtype=jnp.int32)
        first_slot = blocks.at[:, rank].get(mode="clip")[..., None] * call.block_size
        slot = (first_slot + jnp.arange(call.block_size, dtype=jnp.int32)).reshape(call.batch, -1)
        position, seen = cache.slots(sequences, slot)
        seen &= jnp.repeat(rank[None] < num_visited[:, None], call.block_size, axis=1)
        key, value = cache.read(sequences, slot)
        tree = None if inputs.tree is None else inputs.tree.take(slot)
        allowed = allowed_pairs(inputs.query_positions, position, seen, tree, call)
        # Multiplied by a probability of 0, another sequence's NaN would still come through.
        value = jnp.where(allowed.any((1, 2))[..., None, None], value, 0)

        logits = capped_logits(matmul("bkrh,bckh->bkrc", query, key, call.softmax_dtype), allowed, call)
        return softmax.add_tile(
            logits, lambda p: matmul("bkrc,bckv->bkrv", p.astype(call.dtype), value, call.softmax_dtype)
        )

    start = vary(RunningSoftmax.start(query.shape[:3], call.value_dim, call.softmax_dtype), call.varying_axes)
    softmax = jax.lax.fori_loop(0, -(-num_visited.max() // blocks_per_step), attend_step, start)
    return finish(softmax, inputs.sinks, call)
