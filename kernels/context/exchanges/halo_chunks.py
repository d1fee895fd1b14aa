"""Halos that GPUs read from their neighbours' memory: one kernel puts a rank's keys and their halo together.

Which chunks those are is known ahead of time. At the ends of the sequence, own chunks stand for what isn't there.

Dimensions: B batch, t tokens of a rank, s = left + t + right keys, R ranks, l tokens of a chunk, n = t / l chunks of a
rank, C = s / l.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from kernels.call import AttentionCall
from kernels.collectives import chunks as chunk_collectives
from kernels.collectives import peer_memory
from kernels.context.sequence_sharding import default_chunk_size
from kernels.context.split import Split
from kernels.tracing.target import Target


class HaloChunks(NamedTuple):
    """How a rank's keys and their halo are cut.

    Attributes:
      length: l.
      num_left: chunks of the halo before a rank's own.
      num_own: n.
      num_right: chunks of the halo after them.
    """

    length: int
    num_left: int
    num_own: int
    num_right: int

    @staticmethod
    def of(call: AttentionCall, split: Split, left: int, right: int) -> HaloChunks | None:
        """Those of a call of one rank, or None if the kernels can't serve it.

        Args:
          call: of one rank, which holds one run of consecutive tokens.
          split: of the sequences.
          left, right: tokens of the halo.
        """
        if split.peer_refusal is not None or split.num_ranks > peer_memory.MOST_RANKS:
            return None
        if max(left, right) == 0 or max(left, right) > call.q_len:  # nothing to read, or from more than the neighbours
            return None
        length = default_chunk_size(math.gcd(call.q_len, left, right), 1)
        features = call.num_kv_heads * call.head_dim, call.num_kv_heads * call.value_dim
        if chunk_collectives.unsupported_reason(length, features, call.dtype) is not None:
            return None
        return HaloChunks(length, left // length, call.q_len // length, right // length)

    def tables(self, split: Split, batch: int) -> chunk_collectives.ChunkTables:
        """Where chunks are, inside `jax.shard_map`."""
        rank = lax.axis_index(split.axis).astype(jnp.int32)
        is_first, is_last, last = rank == 0, rank == split.num_ranks - 1, split.num_ranks - 1
        number = jnp.arange(self.num_own, dtype=jnp.int32)
        before, after = number[self.num_own - self.num_left :], number[: self.num_right]
        # The rank before comes last among those after this one.
        of_row = jnp.concatenate(
            [
                jnp.where(is_first, before, last * self.num_own + before),
                number,
                jnp.where(is_last, after, self.num_own + after),
            ]
        )
        of_own = jnp.zeros((self.num_own, split.num_ranks), jnp.int32).at[:, 0].set(self.num_left + number)
        # One more than an index. Of two ranks, one is after the other and before it, but not both at the ends.
        in_next = jnp.where(is_last, 0, 1 + jnp.arange(self.num_left, dtype=jnp.int32))
        in_previous = jnp.where(is_first, 0, 1 + self.num_left + self.num_own + after)
        of_own = of_own.at[self.num_own - self.num_left :, 1].add(in_next)
        of_own = of_own.at[: self.num_right, last].add(in_previous)
        of_row, of_own = (jnp.broadcast_to(table, (batch, *table.shape)) for table in (of_row, of_own))
        return chunk_collectives.ChunkTables(of_row, of_own, jnp.full(1, of_row.shape[1], jnp.int32))


def with_halos(
    arrays: tuple[Shaped[Array, "B t ..."], ...], chunks: HaloChunks, split: Split, target: Target
) -> tuple[Shaped[Array, "B s ..."], ...]:
    """A rank's keys and values with their halos; differentiable."""

    def cut(x: Shaped[Array, "B t ..."]) -> Shaped[Array, "B n l ..."]:
        return x.reshape(x.shape[0], chunks.num_own, chunks.length, *x.shape[2:])

    tables = chunks.tables(split, arrays[0].shape[0])
    rows = chunk_collectives.gather_chunks(tuple(map(cut, arrays)), tables, split.axis, target.num_multiprocessors)
    return tuple(x.reshape(x.shape[0], -1, *x.shape[3:]) for x in rows)
