"""The split of each sequence's tokens over the ranks of a mesh axis, and the way back to the sequence's order.

Dimensions: B batch, T tokens of a sequence, t = T / R tokens of a rank, R ranks.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Shaped

from kernels.call import AttentionInputs
from kernels.context.sequence_sharding import SequenceSharding, default_chunk_size, shard_sequence
from kernels.context.spans import Spans

UNKNOWN_DEVICES = "is for GPUs of a mesh that is known"
"""Why ranks can't read each other's memory where nobody says what they are."""


class Split(NamedTuple):
    """The split of all sequences, inside `jax.shard_map`.

    Attributes:
      axis: the mesh axis.
      num_ranks: R, its size.
      length: T.
      sequence_sharding: which tokens a rank holds.
      chunk_size: balanced: tokens of a chunk.
      peer_refusal: why the ranks can't read each other's memory; None: they can.
    """

    axis: str
    num_ranks: int
    length: int
    sequence_sharding: SequenceSharding
    chunk_size: int | None = None
    peer_refusal: str | None = UNKNOWN_DEVICES

    @staticmethod
    def of(
        axis: str,
        num_ranks: int,
        sequence_sharding: SequenceSharding,
        length: int,
        peer_refusal: str | None = UNKNOWN_DEVICES,
    ) -> Split:
        """The split of sequences of `length` tokens, `balanced` in chunks of the default size."""
        chunk_size = default_chunk_size(length, num_ranks) if sequence_sharding == "balanced" else None
        return Split(axis, num_ranks, length, sequence_sharding, chunk_size, peer_refusal)

    @property
    def num_runs(self) -> int | None:
        """The runs of consecutive tokens that every rank holds; None if each sequence decides."""
        return {"contiguous": 1, "zigzag": 2, "balanced": None}[self.sequence_sharding]

    @property
    def run_length(self) -> int:
        """The tokens of each aligned run of a rank's tokens that follow each other in the sequence."""
        if self.num_runs is None:
            assert self.chunk_size is not None, "balanced has chunks"
            return self.chunk_size
        return self.length // (self.num_ranks * self.num_runs)

    @property
    def run_chunk(self) -> int:
        """The tokens of chunks that runs are cut into, whatever the sharding."""
        return self.chunk_size or default_chunk_size(self.length, self.num_ranks * (self.num_runs or 1))

    def token_order(self, inputs: AttentionInputs) -> Int[Array, "B t"]:
        """The index in the sequence of each of this rank's tokens."""
        if inputs.token_order is not None:
            return inputs.token_order
        batch, length = inputs.query.shape[:2]
        arange = jnp.arange(length, dtype=jnp.int32)
        rank = lax.axis_index(self.axis).astype(jnp.int32)
        if self.sequence_sharding == "contiguous":
            token_order = rank * length + arange
        else:
            assert self.sequence_sharding == "zigzag", "balanced comes with a token order"
            half = length // 2
            late = (2 * self.num_ranks - 1 - rank) * half
            token_order = jnp.where(arange < half, rank * half + arange, late + arange - half)
        # libtpu 0.0.42 aborts where it fuses this with the lowest and highest position of each tile, at 128 tiles.
        return jnp.broadcast_to(lax.optimization_barrier(token_order), (batch, length))

    def spans(self, inputs: AttentionInputs) -> Spans:
        """The spans of consecutive tokens that this rank holds."""
        return Spans(self.token_order(inputs)[:, :: self.run_length], self.run_length)

    def gather(self, x: Shaped[Array, "B t ..."]) -> Shaped[Array, "B T ..."]:
        """All ranks' tokens, in the order of the ranks."""
        return lax.all_gather(x, self.axis, axis=1, tiled=True)

    def sum_to_owners(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B t ..."]:
        """Each rank's tokens of the sum over all ranks; the transpose of `gather`."""
        return lax.psum_scatter(x, self.axis, scatter_dimension=1, tiled=True)

    def chunks(self, order: SequenceOrder, batch: int) -> Int[Array | np.ndarray, "B C"]:
        """The chunk of the sequence, of `run_chunk` tokens, at each index of the ranks' order.

        NumPy's where it is known ahead of time.
        """
        if order.chunks is not None:
            return order.chunks
        chunks = (
            shard_sequence(self.sequence_sharding, self.length, self.num_ranks)[:: self.run_chunk] // self.run_chunk
        )
        return np.broadcast_to(chunks, (batch, len(chunks)))

    def sequence_order(self, inputs: AttentionInputs) -> SequenceOrder:
        """The order of the sequence, for tokens that lie in the order of the ranks."""
        if self.sequence_sharding != "balanced":
            return SequenceOrder(self, None)
        assert self.chunk_size is not None
        chunks = self.token_order(inputs)[:, :: self.chunk_size] // self.chunk_size
        return SequenceOrder(self, self.gather(chunks))


class SequenceOrder(NamedTuple):
    """Puts the tokens of all ranks into the sequence's order, and back.

    Attributes:
      split: of the sequences.
      chunks: balanced: the chunk of the sequence at each index of the ranks' order, `[B, C]`.
    """

    split: Split
    chunks: Int[Array, "B C"] | None

    def gather(self, x: Shaped[Array, "B t ..."]) -> Shaped[Array, "B T ..."]:
        """All ranks' tokens, in the order of the sequence."""
        return self.sort(self.split.gather(x))

    def sort(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
        """From the order of the ranks to the order of the sequence."""
        if self.split.sequence_sharding == "contiguous":
            return x
        if self.chunks is not None:
            return _take_chunks(x, jnp.argsort(self.chunks, axis=1))
        num_ranks = self.split.num_ranks
        by_rank = x.reshape(x.shape[0], num_ranks, 2, -1, *x.shape[2:])
        return jnp.concatenate([by_rank[:, :, 0], by_rank[:, ::-1, 1]], axis=1).reshape(x.shape)

    def unsort(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
        """From the order of the sequence to the order of the ranks."""
        if self.split.sequence_sharding == "contiguous":
            return x
        if self.chunks is not None:
            return _take_chunks(x, self.chunks)
        num_ranks = self.split.num_ranks
        by_half = x.reshape(x.shape[0], 2, num_ranks, -1, *x.shape[2:])
        return jnp.stack([by_half[:, 0], by_half[:, 1, ::-1]], axis=2).reshape(x.shape)


def _take_chunks(x: Shaped[Array, "B T ..."], order: Int[Array, "B C"]) -> Shaped[Array, "B T ..."]:
    cut = x.reshape(x.shape[0], order.shape[1], -1, *x.shape[2:])
    return take(cut, order, unique_indices=True).reshape(x.shape)


def take(
    chunks: Shaped[Array, "B C ..."], numbers: Int[Array, "B n"], *, unique_indices: bool = False
) -> Shaped[Array, "B n ..."]:
    """Chunks of each sequence, by their numbers in it."""
    take_row = functools.partial(jnp.take, axis=0, unique_indices=unique_indices, mode="clip")
    return jax.vmap(take_row)(chunks, numbers)
