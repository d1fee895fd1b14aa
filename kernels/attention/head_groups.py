"""Per-head masks for backends whose kernels take one mask: one kernel call per distinct mask."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels.call import AttentionCall, AttentionInputs


def attend_by_distinct_mask(attend: Callable, inputs: AttentionInputs, call: AttentionCall):
    """Output and lse of all heads, by one `attend(inputs, call)` for each distinct mask on the heads that share it.

    Key/value heads are picked, not repeated, as long as each serves equally many of the query heads.
    """
    if call.mask.num_heads is None:
        return attend(inputs, call)
    outputs, order = [], []
    for mask, sharing in call.mask.distinct_heads(call.num_heads).items():
        heads = np.array(sharing)
        order.append(heads)
        kv_heads, counts = np.unique(heads // call.group_size, return_counts=True)
        if len(set(counts)) > 1:
            kv_heads = heads // call.group_size
        part = inputs._replace(
            query=take_heads(inputs.query, heads),
            key=take_heads(inputs.key, kv_heads),
            value=take_heads(inputs.value, kv_heads),
            sinks=None if inputs.sinks is None else inputs.sinks[heads],
        )
        outputs.append(attend(part, call._replace(mask=mask, num_heads=len(heads), num_kv_heads=len(kv_heads))))
    original_order = np.argsort(np.concatenate(order))
    return tuple(take_heads(jnp.concatenate(parts, axis=2), original_order) for parts in zip(*outputs, strict=True))


def take_heads(x: Float[Array, "B L N ..."], heads: Int[np.ndarray, " n"]) -> Float[Array, "B L n ..."]:
    """`x[:, :, heads]` by slices: an indexed read's gradient is a scatter, slow to compile for TPUs and to run."""
    pieces, begin = [], 0
    while begin < len(heads):
        end, step = begin + 1, 1
        if end < len(heads) and heads[end] > heads[begin]:
            step = int(heads[end] - heads[begin])
            while end < len(heads) and heads[end] - heads[end - 1] == step:
                end += 1
        pieces.append(jax.lax.slice_in_dim(x, int(heads[begin]), int(heads[end - 1]) + 1, step, axis=2))
        begin = end
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=2)
