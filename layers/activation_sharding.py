"""Where activations lie on the mesh, and attention over sequences that are split across it.

Shapes: B batch, T tokens, W width, F MLP width, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from kernels import Mask, dot_product_attention
from kernels.token_integers import checked_tokens, int32_positions, int32_segment_ids


@dataclass(frozen=True)
class ActivationSharding:
    """Lays activations out on a mesh: sequences over `batch_axes`, tokens over `sequence_axis`, heads over `head_axis`.

    Args:
      mesh: a mesh that has all of these axes, of any sizes; an axis of size 1 splits nothing.
      batch_axes: mesh axes that the batch is split over.
      sequence_axis: mesh axis that the tokens of each sequence are split over.
      head_axis: mesh axis that attention heads and the MLP's hidden features are split over.

    Raises:
      ValueError: if the mesh lacks one of the axes, or has axes of type Explicit or Manual.

    Example:
      >>> from flax import nnx
      >>> from layers import Attention
      >>> axes, types = ("data", "fsdp", "tensor", "context"), (AxisType.Auto,) * 4
      >>> mesh = jax.make_mesh((1, 1, 1, 1), axes, types, devices=jax.devices()[:1])
      >>> layer = Attention(64, 4, activation_sharding=ActivationSharding(mesh), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 128, 64))).shape
      (2, 128, 64)
    """

    mesh: Mesh
    batch_axes: tuple[str, ...] = ("data", "fsdp")
    sequence_axis: str = "context"
    head_axis: str = "tensor"

    def __post_init__(self):
        wanted = (*self.batch_axes, self.sequence_axis, self.head_axis)
        if missing := [axis for axis in wanted if axis not in self.mesh.axis_names]:
            raise ValueError(
                f"the mesh has axes {self.mesh.axis_names} and lacks {', '.join(missing)}; "
                "add it, with size 1 if it is to split nothing"
            )
        if any(axis_type != AxisType.Auto for axis_type in self.mesh.axis_types):
            raise ValueError(
                f"expected a mesh whose axes are all of type Auto, got {self.mesh.axis_types}; "
                f"pass axis_types=(AxisType.Auto,) * {len(self.mesh.axis_names)} to jax.make_mesh"
            )

    def constrain_hidden(self, hidden: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        """The residual stream: split over batch and tokens, whole in its features."""
        return self._constrain(hidden, self.batch_axes, self.sequence_axis, None)

    def constrain_embedding(self, table: Float[Array, "V W"]) -> Float[Array, "V W"]:
        """The embedding for a lookup: split over its tokens, whole in its features, as what is looked up."""
        return self._constrain(table, self.head_axis, None)

    def constrain_mlp(self, hidden: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
        """The MLP's hidden features: split over batch, tokens and features."""
        return self._constrain(hidden, self.batch_axes, self.sequence_axis, self.head_axis)

    def dot_product_attention(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K H"],
        mask: Mask,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        sinks: Float[Array, " N"] | None = None,
        **options: Any,
    ) -> Float[Array, "B T N H"]:
        """Self-attention with each device working on its own batch, heads and queries.

        Keys and values are gathered over `sequence_axis`; queries stay where they are and know their positions, so the
        result is that of one device.

        Args:
          query, key, value: as for `kernels.dot_product_attention`, of one length T.
          mask: the kernels mask.
          segment_ids: document of each token.
          positions: what the mask is evaluated on; None: each token's place in the sequence.
          sinks: one logit per query head.
          options: `implementation`, `logits_soft_cap`, `scale`.

        Returns:
          Laid out as the query.

        Raises:
          ValueError: if B, T, N or K don't divide into the mesh, or for a `MultiHeadMask` with heads split.
        """
        self._check_divides(query, key, mask)
        splits_sequence = self.mesh.shape[self.sequence_axis] > 1
        key_positions_count_from_zero = positions is None
        if positions is None and splits_sequence:
            positions = jnp.broadcast_to(self.places(query.shape[1]), query.shape[:2])

        # Before `shard_map`, which would cut 64 bits to 32 without a word.
        if segment_ids is not None:
            ids = checked_tokens("segment_ids", segment_ids, *query.shape[:2])
            segment_ids, _ = int32_segment_ids(ids, ids)
        if positions is not None:
            positions = int32_positions("positions", checked_tokens("positions", positions, *query.shape[:2]))

        def attend(query, key, value, segment_ids, positions, sinks):
            of_keys = (key, value, segment_ids, None if key_positions_count_from_zero else positions)
            if splits_sequence:
                of_keys = jax.tree.map(lambda x: jax.lax.all_gather(x, self.sequence_axis, axis=1, tiled=True), of_keys)
            key, value, key_segment_ids, key_positions = of_keys
            return dot_product_attention(
                query,
                key,
                value,
                mask,
                query_segment_ids=segment_ids,
                key_value_segment_ids=key_segment_ids,
                query_positions=positions,
                key_value_positions=key_positions,
                sinks=sinks,
                device=self.mesh.devices.flat[0],
                **options,
            )

        tokens = PartitionSpec(self.batch_axes, self.sequence_axis)
        heads = PartitionSpec(self.batch_axes, self.sequence_axis, self.head_axis, None)
        sharded = self._on_each_device(
            attend,
            in_specs=(heads, heads, heads, tokens, tokens, PartitionSpec(self.head_axis)),
            out_specs=heads,
        )
        return sharded(query, key, value, segment_ids, positions, sinks)

    def places(self, length: int) -> Int[Array, "1 T"]:
        """Where in the sequence `length` tokens stand: all of its tokens, or this device's part of them.

        Args:
          length: T, of the arrays that the caller has.
        """
        places = jnp.arange(length, dtype=jnp.int32)[None]
        if self.sequence_axis in _manual_axes():
            places += jax.lax.axis_index(self.sequence_axis).astype(jnp.int32) * length
        return places

    def _on_each_device(self, function: Callable[..., Array], *, in_specs: Any, out_specs: Any) -> Callable[..., Array]:
        """`jax.shard_map` over the axes that no caller has mapped over already."""
        manual = _manual_axes()
        axes = frozenset(self.mesh.axis_names) - manual
        if not axes:
            return function
        in_specs, out_specs = jax.tree.map(lambda spec: _without(spec, manual), (in_specs, out_specs))
        return jax.shard_map(
            function,
            mesh=None if manual else self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axes,
            # The Pallas, Triton and cuDNN kernels don't say over which mesh axes their outputs vary.
            check_vma=False,
        )

    def _constrain(self, array: Array, *spec: tuple[str, ...] | str | None) -> Array:
        manual = _manual_axes()
        if manual.issuperset(self.mesh.axis_names):
            return array
        rest = _without(PartitionSpec(*spec), manual)
        return jax.lax.with_sharding_constraint(array, rest if manual else NamedSharding(self.mesh, rest))

    def _check_divides(self, query: Array, key: Array, mask: Mask) -> None:
        manual = _manual_axes()  # which have divided the arrays already
        sizes = {axis: 1 if axis in manual else size for axis, size in self.mesh.shape.items()}
        num_batch_shards = 1
        for axis in self.batch_axes:
            num_batch_shards *= sizes[axis]
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


def _manual_axes() -> frozenset[str]:
    """The mesh axes that a `jax.shard_map` around this call maps over: arrays here are one device's part along them."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def _without(spec: PartitionSpec, axes: frozenset[str]) -> PartitionSpec:
    """The spec of what is left of an array that is split over some axes already."""

    def keep(entry: tuple[str, ...] | str | None) -> tuple[str, ...] | None:
        named = () if entry is None else (entry,) if isinstance(entry, str) else entry
        return tuple(axis for axis in named if axis not in axes) or None

    return PartitionSpec(*map(keep, spec))
