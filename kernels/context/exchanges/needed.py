"""Which chunks of keys an all-gather has to move: those that a query of another rank may attend to.

Documents end, and windows reach only so far. A chunk is needed if another rank holds a chunk whose queries may attend
to it, by the ids of the two and by the mask's reach. All ranks work that out for all ranks, so they agree on it.

A program's shapes are static, and each sequence decides how much is needed. So there are a few programs of the
exchange, from a sixteenth of a rank's chunks to all of them. The rank whose chunks are in most demand chooses among
them. The kernel sees a whole sequence in any case. Other keys fill the slots of chunks that weren't sent; no query
attends to these slots.

Dimensions: B batch, t tokens of a rank, T of a sequence, R ranks, c chunks of a rank, C = c·R of a sequence, n that a
rank sends, l tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from kernels.call import AttentionCall
from kernels.context.exchanges.halo import reach_by_side, reach_of
from kernels.context.split import Split, take

# The parts of its chunks that a rank sends in each of the programs.
_PARTS = (16, 8, 4, 2, 1)
# Pairs of chunks are compared. Of a sequence that divides only into tiny ones there would be too many.
MOST_CHUNKS = 8192


def can_leave_any(call: AttentionCall, split: Split) -> bool:
    """True where there may be keys that no other rank needs, in chunks few enough to tell."""
    is_bounded = call.has_segment_ids or reach_of(call) is not None
    return is_bounded and split.length // split.run_chunk <= MOST_CHUNKS


def num_sent(needed: int, num_chunks: int) -> int:
    """How many of a rank's chunks are sent where so many of the most demanded rank's are needed."""
    return next(size for size in _sizes(num_chunks) if size >= needed)


def _sizes(num_chunks: int) -> list[int]:
    return sorted({max(1, num_chunks // part) for part in _PARTS})


def needed_by_others(
    call: AttentionCall,
    split: Split,
    chunks: Int[Array | np.ndarray, "B C"],
    segment_ids: Int[Array, "B t"] | None,
) -> Bool[Array | np.ndarray, "B C R"]:
    """True where a rank may attend to a chunk that it doesn't hold.

    Args:
      call: of one rank.
      split: of the sequences.
      chunks: which chunk of the sequence each is, in the order of the ranks; NumPy's if every sequence has them alike.
      segment_ids: of the rank's tokens; None: one document.
    """
    owners = np.arange(chunks.shape[1]) // (call.q_len // split.run_chunk)
    # Of each chunk of keys, by the chunks of queries.
    ahead = chunks[:, None] - chunks[:, :, None]
    tokens_between = (abs(ahead) - 1) * split.run_chunk
    back, forth = (
        is_side if reach is None else is_side & (tokens_between < reach)
        for is_side, reach in zip((ahead > 0, ahead < 0), reach_by_side(call), strict=True)
    )
    needs = (owners[None, :, None] != owners) & (back | forth)
    if segment_ids is not None:
        needs = needs & may_share_documents(cut_into_chunks(segment_ids, split), split)
    return needs.reshape(*needs.shape[:2], split.num_ranks, -1).any(-1)


def may_share_documents(segment_ids: Int[Array, "B c l"], split: Split) -> Bool[Array, "B C C"]:
    """True where the ids of two chunks lie in ranges that overlap, for all chunks in the order of the ranks.

    Args:
      segment_ids: of the rank's chunks, of whatever length.
      split: of the sequences.
    """
    ends = split.gather(jnp.stack([segment_ids.min(-1), segment_ids.max(-1)], axis=-1))
    lowest, highest = ends[..., 0], ends[..., 1]
    return (lowest[:, None] <= highest[:, :, None]) & (highest[:, None] >= lowest[:, :, None])


def cut_into_chunks(x: Shaped[Array, "B L ..."], split: Split) -> Shaped[Array, "B chunks l ..."]:
    """Tokens by the split's chunks."""
    return x.reshape(x.shape[0], -1, split.run_chunk, *x.shape[2:])


class NeededChunks:
    """The chunks that ranks need of each other, on one of the ranks.

    "In the order of the ranks": first rank 0's chunks as it holds them, then rank 1's, and so on.

    Args:
      call: of one rank.
      split: of the sequences.
      chunks: which chunk of the sequence each is, in the order of the ranks; NumPy's if every sequence has them alike.
      segment_ids: of the rank's tokens; None: one document.
    """

    def __init__(
        self,
        call: AttentionCall,
        split: Split,
        chunks: Int[Array | np.ndarray, "B C"],
        segment_ids: Int[Array, "B t"] | None,
    ):
        self.call, self.split, self.rank = call, split, lax.axis_index(split.axis)
        self.num_chunks = call.q_len // split.run_chunk
        is_needed = needed_by_others(call, split, chunks, segment_ids).any(-1)
        by_rank = is_needed.reshape(-1, split.num_ranks, self.num_chunks)
        most = by_rank.sum(-1, dtype=np.int32).max()
        # Where neither documents nor the sharding of each sequence decide, it is known ahead of time.
        self.most = int(most) if isinstance(is_needed, np.ndarray) else most
        # The needed chunks have the first turns to be sent, in the order in which they are held.
        self.sent = jnp.argsort(~by_rank, axis=-1).astype(jnp.int32)
        turns = jnp.argsort(self.sent, axis=-1).astype(jnp.int32)
        self.chunks = jnp.asarray(chunks, jnp.int32).reshape(by_rank.shape)
        self.own_chunks, self.own_turns = self.chunks[:, self.rank], turns[:, self.rank]
        # Of each chunk of the sequence: the rank that holds it, which of the rank's chunks it is, and its turn.
        holders = jnp.argsort(chunks, axis=1).astype(jnp.int32)
        self.holders, self.numbers = jnp.divmod(holders, self.num_chunks)
        self.turns = jnp.take_along_axis(turns.reshape(chunks.shape), holders, axis=1)

    def gather(self, arrays: tuple[Shaped[Array, "B t ..."], ...]) -> tuple[Shaped[Array, "B T ..."], ...]:
        """Whole sequences, in their order, whose chunks are right where this rank needs or holds them."""

        def gather(x: Shaped[Array, "B t ..."], size: int) -> Shaped[Array, "B T ..."]:
            own = cut_into_chunks(x, self.split)
            sent = take(own, self.sent[:, self.rank, :size])
            received = lax.all_gather(sent, self.split.axis, axis=1, tiled=True)
            from_others = take(received, self.holders * size + jnp.minimum(self.turns, size - 1))
            is_own = _like(self.holders == self.rank, from_others)
            return _joined(jnp.where(is_own, take(own, self.numbers), from_others))

        return self._with_as_many_as_needed(gather, arrays)

    def sum_to_owners(self, arrays: tuple[Shaped[Array, "B T ..."], ...]) -> tuple[Shaped[Array, "B t ..."], ...]:
        """Each rank's tokens of the sum over all ranks, in the softmax's dtype; the transpose of `gather`."""
        dtype, ranks = self.call.softmax_dtype, jnp.arange(self.split.num_ranks, dtype=jnp.int32)

        def sum_to_owners(x: Shaped[Array, "B T ..."], size: int) -> Shaped[Array, "B t ..."]:
            whole = cut_into_chunks(x, self.split)
            sent = jnp.take_along_axis(self.chunks, self.sent[..., :size], axis=2).reshape(x.shape[0], -1)
            theirs = take(whole, sent).astype(dtype)
            is_own = jnp.broadcast_to(jnp.repeat(ranks == self.rank, size), sent.shape)
            theirs = jnp.where(_like(is_own, theirs), 0, theirs)  # added below, whether or not it is sent
            summed = lax.psum_scatter(theirs, self.split.axis, scatter_dimension=1, tiled=True)
            own = take(whole, self.own_chunks).astype(dtype)
            from_others = take(summed, jnp.minimum(self.own_turns, size - 1))
            return _joined(own + jnp.where(_like(self.own_turns < size, own), from_others, 0))

        return self._with_as_many_as_needed(sum_to_owners, arrays)

    def _with_as_many_as_needed(self, function: Callable, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        def of_size(size: int) -> Callable:
            return lambda arrays: tuple(function(x, size) for x in arrays)

        if isinstance(self.most, int):
            return of_size(num_sent(self.most, self.num_chunks))(arrays)
        sizes = _sizes(self.num_chunks)
        index = (self.most > jnp.array(sizes, jnp.int32)).sum()
        return lax.switch(index, [of_size(size) for size in sizes], arrays)


def _joined(chunks: Shaped[Array, "B chunks l ..."]) -> Shaped[Array, "B L ..."]:
    return chunks.reshape(chunks.shape[0], -1, *chunks.shape[3:])


def _like(flags: Bool[Array, "B n"], x: Shaped[Array, "B n ..."]) -> Bool[Array, "B n ..."]:
    return flags.reshape(*flags.shape, *[1] * (x.ndim - 2))
