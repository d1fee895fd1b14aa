"""Peer: each of two GPUs reads the keys and values that its queries need from the other's memory.

Which those are, documents and windows say (`needed.py`), on the devices: so nothing else moves, and no host waits to
learn how much it is. The kernel sees whole rows. Own chunks stand in them for those that no query attends to.

Keys and values are brought before the custom gradient begins. So whole rows of them are kept for the backward pass, and
not brought again, but where a remat policy makes a layer anew. dK and dV come home in the same way, added up in
float32.

Source: one-sided reads, as in NVSHMEM.

Dimensions: B batch, t tokens of a rank, T of a row, R = 2 ranks, n chunks of a rank, C of a row.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from kernels.attention.core import Halves
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients
from kernels.collectives import chunks as chunk_collectives
from kernels.context.exchanges import gather
from kernels.context.exchanges.collected import arange_like
from kernels.context.exchanges.needed import MOST_CHUNKS, cut_into_chunks, is_needed_elsewhere
from kernels.context.split import Split

local_call = gather.local_call


def unsupported_reason(call: AttentionCall, split: Split) -> str | None:
    """The ranks have to be two GPUs that reach each other's memory, and chunks whole tiles of it."""
    if split.num_ranks != 2:
        return f"is for two ranks, not for {split.num_ranks}"
    if split.peer_refusal is not None:
        return split.peer_refusal
    if split.length // split.run_chunk > MOST_CHUNKS:
        return (
            f"takes rows of at most {MOST_CHUNKS} chunks, not of {split.length // split.run_chunk}; a length that a "
            "larger power of two divides has larger chunks"
        )
    features = call.num_kv_heads * call.head_dim, call.num_kv_heads * call.value_dim
    return chunk_collectives.unsupported_reason(split.run_chunk, features, call.dtype)


class Peer:
    """One rank's part.

    Args:
      inputs: what the rank holds, before or after `bring`.
      call: of one rank.
      split: of the rows.
    """

    def __init__(self, inputs: AttentionInputs, call: AttentionCall, split: Split):
        self.call, self.split = call, split
        self.order = split.row_order(inputs)

    def bring(self, inputs: AttentionInputs) -> AttentionInputs:
        """The rank's queries, and whole rows of keys; differentiable."""
        own = tuple(cut_into_chunks(x, self.split) for x in (inputs.key, inputs.value))
        tables, target = self._tables(inputs), self.call.target
        whole = chunk_collectives.gather_chunks(own, tables, self.split.axis, target.num_multiprocessors)
        key, value = (x.reshape(x.shape[0], self.split.length, *x.shape[3:]) for x in whole)
        of_tokens = inputs.query_segment_ids, inputs.query_positions
        ids, positions = (None if x is None else self.order.gather(x) for x in of_tokens)
        return inputs._replace(key=key, value=value, key_value_segment_ids=ids, key_value_positions=positions)

    def forward(self, inputs: AttentionInputs, local_call: AttentionCall, halves: Halves) -> tuple[Array, Array]:
        """Output and lse of this rank's queries."""
        return halves.forward(self._of_kernel(inputs), local_call, halves.tuning)

    def backward(
        self, inputs: AttentionInputs, local_call: AttentionCall, halves: Halves, cotangent: Cotangent
    ) -> Gradients:
        """Gradients of what `bring` returned."""
        return halves.backward(self._of_kernel(inputs), local_call, halves.tuning, cotangent)

    def _of_kernel(self, inputs: AttentionInputs) -> AttentionInputs:
        if inputs.query_positions is not None:
            return inputs._replace(places=None)
        places, of_keys = self.split.places(inputs), arange_like(inputs.key)
        return inputs._replace(query_positions=places, key_value_positions=of_keys, places=None)

    def _tables(self, inputs: AttentionInputs) -> chunk_collectives.ChunkTables:
        split, rank = self.split, lax.axis_index(self.split.axis)
        chunks = split.chunks(self.order, self.call.batch)
        num_chunks = chunks.shape[1]
        num_own = num_chunks // split.num_ranks
        is_needed = jnp.asarray(is_needed_elsewhere(self.call, split, chunks, inputs.query_segment_ids))
        chunks = jnp.asarray(chunks, jnp.int32)

        places = jnp.argsort(chunks, axis=1)
        holder, number = jnp.divmod(places, num_own)
        is_read = (holder != rank) & jnp.take_along_axis(is_needed, places, axis=1)
        of_row = number + num_own * is_read

        def own(x: Shaped[Array, "B C"]) -> Shaped[Array, "B n"]:
            return x.reshape(-1, split.num_ranks, num_own)[:, rank]

        of_own = own(chunks) + num_chunks * own(is_needed)
        return chunk_collectives.ChunkTables(of_row.astype(jnp.int32), of_own.astype(jnp.int32))


part = Peer
