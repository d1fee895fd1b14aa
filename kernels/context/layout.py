"""Which axes of a mesh split which dims of attention's arrays, and the map of a function over its devices.

A caller may be inside a `jax.shard_map` of its own, as the training step is: some axes are then "manual" already, and
arrays are one device's part along them.

Dimensions: B batch, T tokens, N query heads, K key/value heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from kernels.call import AttentionCall, AttentionInputs
from kernels.collectives import peer_memory
from kernels.context.sequence_sharding import SequenceSharding, check_sequence_sharding
from kernels.context.split import Split
from kernels.masks import Mask
from kernels.tracing.mesh_axes import manual_axes, spec_without


class MeshLayout(NamedTuple):
    """Which axes of a mesh split which dims of attention's arrays.

    Attributes:
      mesh: the devices.
      batch_axes: split B.
      sequence_axis: splits T.
      head_axis: splits N and K.
      sequence_sharding: which tokens of a sequence each rank of the sequence axis holds.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]
    sequence_axis: str
    head_axis: str
    sequence_sharding: SequenceSharding = "contiguous"

    @property
    def sizes(self) -> dict[str, int]:
        """How many parts each axis cuts the caller's arrays into: 1 where a caller's `jax.shard_map` has cut them."""
        manual = manual_axes()
        return {axis: 1 if axis in manual else size for axis, size in self.mesh.shape.items()}

    def split(self, length: int) -> Split:
        """The split of the sequences, of which the caller's arrays hold `length` tokens."""
        axis, num_ranks = self.sequence_axis, self.mesh.shape[self.sequence_axis]
        length = length // self.sizes[axis] * num_ranks
        peer_refusal = peer_memory.unsupported_reason(self.mesh, axis)
        return Split.of(axis, num_ranks, self.sequence_sharding, length, peer_refusal)

    def call_of_a_device(self, call: AttentionCall) -> AttentionCall:
        """A call's part on each device, before keys are exchanged."""
        sizes = self.sizes
        return call._replace(
            batch=call.batch // math.prod(sizes[axis] for axis in self.batch_axes),
            q_len=call.q_len // sizes[self.sequence_axis],
            kv_len=call.kv_len // sizes[self.sequence_axis],
            num_heads=call.num_heads // sizes[self.head_axis],
            num_kv_heads=call.num_kv_heads // sizes[self.head_axis],
        )

    @property
    def heads(self) -> P:
        """Of arrays `[B, T, N, …]`."""
        return P(self.batch_axes, self.sequence_axis, self.head_axis)

    @property
    def whole_sequences(self) -> P:
        """Of arrays `[B, T, N, …]` of which every rank of the sequence axis has whole sequences of some heads."""
        return P(self.batch_axes, None, (self.head_axis, self.sequence_axis))

    def specs(self, *, whole_sequences: bool = False) -> AttentionInputs:
        """The partition of each input, present or None.

        Args:
          whole_sequences: whether every rank of the sequence axis has whole sequences of some heads.
        """
        shards = P(self.batch_axes, self.sequence_axis)
        heads, tokens = (self.whole_sequences, P(self.batch_axes)) if whole_sequences else (self.heads, shards)
        sinks = P(heads[2])
        return AttentionInputs._make([heads, heads, heads, sinks, *[tokens] * 4, shards, shards, tokens])

    def map(self, function: Callable, arguments: tuple, in_specs: tuple, out_specs: Any) -> Any:
        """`jax.shard_map` over the mesh; inside a caller's own, over the axes that are left, if any are."""
        manual = manual_axes()
        axes = frozenset(self.mesh.axis_names) - manual
        if not axes:
            return function(*arguments)
        in_specs, out_specs = jax.tree.map(lambda spec: spec_without(spec, manual), (in_specs, out_specs))
        mapped = jax.shard_map(
            function,
            mesh=None if manual else self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axes,
            # The Pallas, Triton and cuDNN kernels don't say over which mesh axes their outputs vary.
            check_vma=False,
        )
        return mapped(*arguments)

    def check(self, query: Array, key: Array, mask: Mask | None) -> None:
        """Raises ValueError if the mesh doesn't divide a call's arrays, or can't give each head its own mask.

        It does so, too, if keys and queries aren't the same tokens.
        """
        if key.shape[1] != query.shape[1]:
            raise ValueError(
                f"attention over a mesh is of tokens to each other, got {query.shape[1]} queries and {key.shape[1]} "
                "keys; use kernels.dot_product_attention for these"
            )
        sizes = self.sizes
        num_batch_shards = math.prod(sizes[axis] for axis in self.batch_axes)
        for what, size, axes, num_shards in (
            ("batch size", query.shape[0], " × ".join(self.batch_axes), num_batch_shards),
            ("sequence length", query.shape[1], self.sequence_axis, sizes[self.sequence_axis]),
            ("number of query heads", query.shape[2], self.head_axis, sizes[self.head_axis]),
            ("number of key/value heads", key.shape[2], self.head_axis, sizes[self.head_axis]),
        ):
            if size % num_shards:
                raise ValueError(
                    f"{what} {size} is not a multiple of the mesh's {axes}={num_shards}; change one of them"
                )
        if mask is not None and mask.num_heads is not None and sizes[self.head_axis] > 1:
            raise ValueError(
                f"a MultiHeadMask gives each head its own static mask, but with the mesh's "
                f"{self.head_axis}={sizes[self.head_axis]} one program serves different heads; "
                f"set {self.head_axis} to 1 or use one mask for all heads"
            )
        split = self.split(query.shape[1])
        if split.num_ranks > 1:
            check_sequence_sharding(self.sequence_sharding, split.length, split.num_ranks, split.chunk_size)
