"""Heads: an all-to-all gives every rank all tokens of some heads, and another one brings the output back.

The kernels see whole rows, as on one device. Every rank does the same work, whatever the documents.

Source: DeepSpeed-Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from kernels.call import AttentionCall, AttentionInputs
from kernels.context.exchanges.collected import Collected
from kernels.context.split import Split


def unsupported_reason(call: AttentionCall, split: Split) -> str | None:
    """Heads have to divide, and to share one mask."""
    if call.mask.num_heads is not None:
        return "gives each rank other heads, which can't have masks of their own; use one mask for all heads"
    if call.num_heads % split.num_ranks:
        return f"gives each rank as many query heads, and {call.num_heads} don't divide by {split.num_ranks} ranks"
    if call.num_kv_heads % split.num_ranks and split.num_ranks % call.num_kv_heads:
        return (
            f"gives each rank as many key/value heads, and neither do {call.num_kv_heads} divide by "
            f"{split.num_ranks} ranks nor the ranks by them"
        )
    return None


def local_call(call: AttentionCall, split: Split) -> AttentionCall:
    """What a rank's kernel is called for: whole rows of its share of the heads."""
    return call._replace(
        q_len=split.length,
        kv_len=split.length,
        num_heads=call.num_heads // split.num_ranks,
        num_kv_heads=max(1, call.num_kv_heads // split.num_ranks),
    )


class Heads(Collected):
    """One rank's part. See `Collected`."""

    def queries(self, x: Shaped[Array, "B t N ..."]) -> Shaped[Array, "B T n ..."]:
        return self.order.sort(lax.all_to_all(x, self.split.axis, split_axis=2, concat_axis=1, tiled=True))

    def queries_back(self, x: Shaped[Array, "B T n ..."]) -> Shaped[Array, "B t N ..."]:
        return lax.all_to_all(self.order.unsort(x), self.split.axis, split_axis=1, concat_axis=2, tiled=True)

    def keys(self, x: Shaped[Array, "B t K ..."]) -> Shaped[Array, "B T k ..."]:
        # Fewer heads than ranks: several ranks get the same one.
        return self.queries(jnp.repeat(x, self.num_copies, axis=2))

    def keys_back(self, x: Shaped[Array, "B T k ..."]) -> Shaped[Array, "B t K ..."]:
        x = self.queries_back(x).astype(self.call.softmax_dtype)
        return x.reshape(*x.shape[:2], -1, self.num_copies, *x.shape[3:]).sum(3)

    @property
    def num_copies(self) -> int:
        """Ranks that get the same key/value head."""
        return max(1, self.split.num_ranks // self.call.num_kv_heads)

    def collect(self, inputs: AttentionInputs) -> AttentionInputs:
        sinks, ids, positions = inputs.sinks, inputs.query_segment_ids, inputs.query_positions
        if sinks is not None:
            num_heads = self.call.num_heads // self.split.num_ranks
            sinks = lax.dynamic_slice_in_dim(sinks, lax.axis_index(self.split.axis) * num_heads, num_heads)
        ids, positions = (None if x is None else self.order.sort(self.split.gather(x)) for x in (ids, positions))
        query, key, value = self.queries(inputs.query), self.keys(inputs.key), self.keys(inputs.value)
        return AttentionInputs(query, key, value, sinks, ids, ids, positions, positions)


part = Heads
