"""Packed documents as intervals of indices: for a token of one sequence, the tokens of the other in its document.

The intervals are data: a token may attend to tokens at `first ≤ index < stop` only. The intervals narrow a plan. Their
cost is proportional to the number of tokens. Documents are one source of such intervals. A document that comes back
after another one has the interval from its first token to its last, with tiles that may hold both; none of these is
FULL then.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kernels.plan.intervals import Intervals
from kernels.tracing.mesh_axes import vary

_NOWHERE = np.int32(-(2**31) + 1)
_FEWEST_SLOTS = 1 << 16


def document_intervals(
    own: Int[Array, "B L"], block: int, others: Int[Array, "B M"], varying_axes: tuple[str, ...] = ()
) -> Intervals:
    """The interval of the tokens with the same segment ids.

    Args:
      own: segment ids of the sequence that is cut into tiles of `block` tokens.
      others: segment ids of the sequence that the intervals lie in.
      varying_axes: mesh axes over which the ids differ (`kernels.tracing.mesh_axes`).
    """
    table, num_slots = _table_of_documents(others, varying_axes)

    def look_up(ids):
        return jnp.take_along_axis(table, (ids & (num_slots - 1))[..., None], axis=1)

    batch, length = own.shape
    # Repeating the last token adds no document.
    filled = jnp.pad(own, [(0, 0), (0, -length % block)], mode="edge")
    # The barrier keeps XLA from making one kernel of the reductions of several plans' tiles: JAX 0.11.2's gives some of
    # them the whole sequence's result (seen on one H200, 2026-11-23, as Triton's pass for dQ that visited all tiles).
    found = jax.lax.optimization_barrier(look_up(filled)).reshape(batch, -1, block, 3).max(2)
    start = jnp.minimum(-found[..., 0], others.shape[1])
    stop = jnp.maximum(found[..., 2] + 1, 0)

    filled = filled.reshape(batch, -1, block)
    document = filled[..., 0]
    first, last_start, last = (look_up(document)[..., i] for i in range(3))
    first = -first
    at_first = jnp.take_along_axis(others, jnp.minimum(first, others.shape[1] - 1), axis=1)
    # Another document may have the slot, and if it is this one's too, then there are two spans in it.
    is_one_span = (first == last_start) & (at_first == document) & (filled == document[..., None]).all(-1)
    return Intervals(start, stop, jnp.where(is_one_span, first, 0), jnp.where(is_one_span, last + 1, 0))


def _table_of_documents(ids: Int[Array, "B M"], varying_axes) -> tuple[Int[Array, "B slots 3"], int]:
    """For the tokens whose ids share their lowest bits: −(first index), start of the last span, last index.

    There are enough bits that ids which count from 0 have slots of their own, and others seldom share one. If two ids
    share a slot, the interval holds both documents.
    """
    batch, length = ids.shape
    num_slots = max(_FEWEST_SLOTS, 1 << (length - 1).bit_length())
    index = jnp.arange(length, dtype=jnp.int32)[None]
    differs, end = ids[:, 1:] != ids[:, :-1], jnp.ones((batch, 1), bool)
    is_start, is_end = jnp.concatenate([end, differs], axis=1), jnp.concatenate([differs, end], axis=1)
    entries = jnp.stack(
        [
            jnp.where(is_start, -index, _NOWHERE),
            jnp.where(is_start, index, _NOWHERE),
            jnp.where(is_end, index, _NOWHERE),
        ],
        axis=-1,
    )
    # A token amid its document says nothing new, and is dropped.
    slot = jnp.where(is_start | is_end, ids & (num_slots - 1), num_slots)
    table = vary(jnp.full((batch, num_slots, 3), _NOWHERE), varying_axes)
    return table.at[jnp.arange(batch, dtype=jnp.int32)[:, None], slot].max(entries, mode="drop"), num_slots
