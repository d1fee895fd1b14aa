"""Decoding over a small cache in plain XLA: every slot is read, and the mask says which of them count.

Starting kernels that list blocks, attend to them in parts and merge the parts takes longer than reading a few hundred
slots. Here XLA makes a few kernels of the whole call. Products are elementwise, with sums in the softmax's dtype. They
leave out the slots that a row may not see; a matrix product would multiply them by 0, and let another sequence's NaN
through.

Dimensions: B batch (each element one sequence), T new tokens of each, N query heads, K key/value heads (N = K·G),
R = G·T rows of a query tile, C slots that a sequence looks at, H and V head dims of key and value.
"""

from __future__ import annotations

import jax.numpy as jnp

from kernels.backends.softmax import INITIAL_MAX, RunningSoftmax
from kernels.decode.call import DecodeCall, DecodeInputs, OutputAndLse
from kernels.decode.query_tiles import allowed_pairs, capped_logits, finish, query_tiles

# Up to these, GPUs read everything faster than only the visited blocks: slots of a slab that all sequences share, slots
# of each sequence's own, and multiplications. Chosen on an H200 (docs/benchmarks.md, "Decoding").
_MOST_SHARED_SLOTS, _MOST_OWN_SLOTS = 1280, 160
_MOST_MULTIPLICATIONS = 8 * 12 * 1024 * (64 + 64)


def unsupported_reason(call: DecodeCall, tuning: None = None) -> str | None:
    """Serves every call."""
    return None


def slower_reason(call: DecodeCall) -> str | None:
    """Why another implementation is faster for this call, or None if none is."""
    if call.target.platform != "gpu":
        return f"is faster on GPUs only, not on {call.target.device_kind}"
    is_shared = call.one_slab or call.batch == 1
    most_slots = _MOST_SHARED_SLOTS if is_shared else _MOST_OWN_SLOTS
    if call.num_slots > most_slots:
        whose = "in the slab" if is_shared else "of each sequence"
        return f"reads all {call.num_slots} slots {whose}; over {most_slots}, skipping blocks is faster"
    num_rows, width = call.batch * call.num_new * call.num_heads, call.head_dim + call.value_dim
    num_multiplications = num_rows * call.num_slots * width
    if num_multiplications > _MOST_MULTIPLICATIONS:
        return (
            f"{num_rows} query rows × {call.num_slots} slots × {width} are {num_multiplications} multiplications; "
            f"over {_MOST_MULTIPLICATIONS}, skipping blocks is faster"
        )
    return None


def attend(inputs: DecodeInputs, call: DecodeCall, tuning: None = None) -> OutputAndLse:
    """Attention of one call. See `kernels.decode_attention`."""
    position, seen = inputs.cache.slots(inputs.sequences)
    key, value = (x.astype(call.softmax_dtype).swapaxes(1, 2)[:, :, None] for x in inputs.cache.read(inputs.sequences))
    allowed = allowed_pairs(inputs.query_positions, position, seen, inputs.tree, call)
    query = query_tiles(inputs.query, call).astype(call.softmax_dtype)
    logits = capped_logits((query[..., None, :] * key).sum(-1), allowed, call)
    row_max = jnp.maximum(logits.max(-1), INITIAL_MAX)
    p = jnp.exp(logits - row_max[..., None])
    # A slot that a row may not see can hold NaN, so it isn't even multiplied by 0.
    acc = jnp.where(allowed[..., None], p[..., None] * value, 0).sum(-2)
    return finish(RunningSoftmax(acc, row_max, p.sum(-1)), inputs.sinks, call)
