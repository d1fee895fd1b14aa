"""Peer: each of a few GPUs reads the keys and values that its queries need from the others' memory.

Documents and windows decide which keys a rank needs (`needed.py`), on the devices. So nothing else moves, and no host
waits. The kernel sees as many keys as a whole sequence has. Under a causal mask, documents leave out some chunks: the
chunks that a rank holds or needs come first, and the kernels skip the rest.

- Before the custom gradient: keys and values are brought. The backward pass has them. They are brought again only where
  a remat policy computes a layer again.
- Forward and backward: nothing moves.
- Home: the transpose of the bringing returns dK and dV, added up in float32.

Source: one-sided reads, as in NVSHMEM.

Dimensions: B batch, t tokens of a rank, T of a row, R ranks, n chunks of a rank, C of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients
from kernels.collectives import chunks as chunk_collectives
from kernels.collectives import peer_memory
from kernels.context.exchanges.all_gather import arange_like, kernel_call
from kernels.context.exchanges.needed import MOST_CHUNKS, cut_into_chunks, needed_by_others
from kernels.context.rank import Rank
from kernels.context.spans import Spans
from kernels.context.split import Split, take

__all__ = ["bring", "bwd", "fwd", "kernel_call", "unsupported_reason"]


def unsupported_reason(call: AttentionCall, split: Split) -> str | None:
    """The ranks have to be GPUs that reach each other's memory, and chunks whole tiles of it."""
    if split.num_ranks > peer_memory.MOST_RANKS:
        return f"is for at most {peer_memory.MOST_RANKS} ranks, not for {split.num_ranks}"
    if split.peer_refusal is not None:
        return split.peer_refusal
    if split.length // split.run_chunk > MOST_CHUNKS:
        return (
            f"takes rows of at most {MOST_CHUNKS} chunks, not of {split.length // split.run_chunk}; a length that a "
            "larger power of two divides has larger chunks"
        )
    features = call.num_kv_heads * call.head_dim, call.num_kv_heads * call.value_dim
    return chunk_collectives.unsupported_reason(split.run_chunk, features, call.dtype)


def bring(rank: Rank) -> Callable[[AttentionInputs], AttentionInputs]:
    """Brings the keys that the rank's queries need; differentiable."""
    call, split, longest_tile = rank.call, rank.split, rank.kernel.backend.longest_tile

    def bring_keys(inputs: AttentionInputs) -> AttentionInputs:
        keys = GatheredKeys.of(inputs, call, split, is_compact=_may_be_compact(call) and longest_tile is not None)
        tables = keys.tables(longest_tile or 0)
        own = tuple(cut_into_chunks(x, split) for x in (inputs.key, inputs.value))
        whole = chunk_collectives.gather_chunks(own, tables, split.axis, call.target.num_multiprocessors)
        key, value = (x.reshape(x.shape[0], split.length, *x.shape[3:]) for x in whole)
        ids, positions, bounds = inputs.query_segment_ids, inputs.query_positions, inputs.bounds
        if bounds is not None:
            queries = split.spans(inputs)
            bounds = bounds.map(keys.spans.num_before, lambda q: queries.num_before(keys.gather(q)))
        return inputs._replace(
            key=key,
            value=value,
            key_value_segment_ids=None if ids is None else keys.gather(ids),
            query_positions=keys.order_of_own if positions is None else positions,
            key_value_positions=arange_like(key) if positions is None else keys.gather(positions),
            num_keys=keys.num_keys[:, None] if keys.is_compact else None,
            bounds=bounds,
        )

    return bring_keys


def fwd(inputs: AttentionInputs, rank: Rank) -> tuple[Array, Array]:
    """Output and lse of this rank's queries."""
    return rank.fwd(inputs)


def bwd(inputs: AttentionInputs, rank: Rank, cotangent: Cotangent) -> Gradients:
    """Gradients of this rank's queries, and of the keys and values that were brought."""
    return rank.bwd(inputs, cotangent)


class GatheredKeys(NamedTuple):
    """The chunks of keys that each rank puts together, a slot for each chunk of a sequence.

    "By rank": first rank 0's chunks as it holds them, then rank 1's, and so on.

    Attributes:
      split: of the sequences.
      is_compact: whether the chunks that a rank holds or needs come first, and the slots after them may hold anything.
        Otherwise all chunks are there, in the sequence's order.
      chunks: which chunk of the sequence each is, by rank.
      is_needed: whether each rank, the first dimension, needs each chunk that it doesn't hold, by rank.
      order: the chunk in each of this rank's slots, by rank.
      slots: the slot of each chunk on rank 0, on rank 1, and so on, by rank.
      num_chunks: the number of this rank's slots, from the first on, that hold chunks of each sequence.
    """

    split: Split
    is_compact: bool
    chunks: Int[Array, "B C"]
    is_needed: Bool[Array, "R B C"]
    order: Int[Array, "B C"]
    slots: Int[Array, "R B C"]
    num_chunks: Int[Array, " B"]

    @staticmethod
    def of(inputs: AttentionInputs, call: AttentionCall, split: Split, *, is_compact: bool) -> GatheredKeys:
        """The keys of a call of one rank."""
        chunks = split.chunks(split.sequence_order(inputs), call.batch)
        is_needed = jnp.moveaxis(jnp.asarray(needed_by_others(call, split, chunks, inputs.query_segment_ids)), -1, 0)
        chunks, num_all = jnp.asarray(chunks, jnp.int32), chunks.shape[1]
        ranks = jnp.arange(split.num_ranks, dtype=jnp.int32)[:, None, None]
        is_there = is_needed | (jnp.arange(num_all, dtype=jnp.int32) // (num_all // split.num_ranks) == ranks)
        is_there = is_there if is_compact else jnp.ones_like(is_there)
        order = jnp.argsort(jnp.where(is_there, chunks, chunks + num_all), axis=-1).astype(jnp.int32)
        slots = jnp.argsort(order, axis=-1).astype(jnp.int32)  # the inverse
        here, num_chunks = lax.axis_index(split.axis), is_there.sum(-1, dtype=jnp.int32)
        return GatheredKeys(split, is_compact, chunks, is_needed, order[here], slots, num_chunks[here])

    @property
    def num_keys(self) -> Int[Array, " B"]:
        """The number of keys of each sequence that this rank has."""
        return self.num_chunks * self.split.run_chunk

    @property
    def order_of_own(self) -> Int[Array, "B t"]:
        """The index of each of this rank's tokens among its keys."""
        length = self.split.run_chunk
        first = self._own(self.slots[self._rank]) * length
        return (first[..., None] + jnp.arange(length, dtype=jnp.int32)).reshape(first.shape[0], -1)

    @property
    def spans(self) -> Spans:
        """Where this rank's keys lie in the sequence; past its end, what comes after the last key."""
        length, slots = self.split.run_chunk, jnp.arange(self.order.shape[1], dtype=jnp.int32)
        starts = jnp.take_along_axis(self.chunks, self.order, axis=1) * length
        return Spans(jnp.where(slots < self.num_chunks[:, None], starts, self.split.length), length)

    def gather(self, x: Shaped[Array, "B t"]) -> Shaped[Array, "B T"]:
        """A number of each token, in the order of this rank's keys; past the last key, the last key's.

        So documents have no more parts than where all keys are there, and a plan's tiles stay FULL.
        """
        by_rank = cut_into_chunks(self.split.gather(x), self.split)
        keys = take(by_rank, self.order, unique_indices=True).reshape(x.shape[0], -1)
        last = jnp.take_along_axis(keys, self.num_keys[:, None] - 1, axis=1)
        return jnp.where(arange_like(keys) < self.num_keys[:, None], keys, last)

    def tables(self, num_more_keys: int) -> chunk_collectives.ChunkTables:
        """Where chunks are, for this rank's kernels, which put `num_more_keys` together past the last key, too."""
        num_ranks, _, num_all = self.is_needed.shape
        num_own = num_all // num_ranks
        holder, number = jnp.divmod(self.order, num_own)
        is_read = jnp.take_along_axis(self.is_needed[self._rank], self.order, axis=1)
        of_row = number + num_own * jnp.where(is_read, (holder - self._rank) % num_ranks, 0)
        others = (self._rank + jnp.arange(1, num_ranks, dtype=jnp.int32)) % num_ranks
        there = jnp.where(self.is_needed[others], self.slots[others] + 1, 0)
        of_own = jnp.stack([self._own(x) for x in (self.slots[self._rank], *there)], axis=-1)
        num_more = -(-num_more_keys // self.split.run_chunk)
        num_chunks = jnp.minimum(self.num_chunks.max(keepdims=True) + num_more, num_all)
        return chunk_collectives.ChunkTables(*(x.astype(jnp.int32) for x in (of_row, of_own, num_chunks)))

    @property
    def _rank(self) -> Int[Array, ""]:
        return lax.axis_index(self.split.axis)

    def _own(self, x: Shaped[Array, "B C"]) -> Shaped[Array, "B n"]:
        return x.reshape(x.shape[0], self.split.num_ranks, -1)[:, self._rank]


def _may_be_compact(call: AttentionCall) -> bool:
    """True: a rank may do without the chunks that, by the documents, it doesn't need.

    Positions then count on over the chunks that are left out. So the mask has to look at the tokens' order alone, and
    not ahead: the slots after the last key come after all queries.
    """
    return call.has_segment_ids and not call.has_positions and call.mask.window == (None, 0)
