"""Where activations lie on the mesh.

Shapes: B batch, T tokens, W width, F MLP width, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from kernels.collectives import ChosenCollectives, Collectives, choose_collectives
from kernels.context import Exchange, MeshLayout, SequenceSharding
from kernels.tracing.mesh_axes import manual_axes, spec_without
from layers.checks import check_choice


@dataclass(frozen=True)
class ActivationSharding:
    """Lays activations out on a mesh: sequences over `batch_axes`, tokens over `sequence_axis`, heads over `head_axis`.

    Args:
      mesh: a mesh that has all of these axes, of any sizes; an axis of size 1 splits nothing.
      batch_axes: mesh axes that the batch is split over.
      sequence_axis: mesh axis that the tokens of each sequence are split over.
      head_axis: mesh axis that attention heads and the MLP's hidden features are split over.
      sequence_sharding: which tokens of a sequence each rank of `sequence_axis` holds.
      exchange: how ranks get at each other's keys and values; None: the choice of `kernels.context` for each mask.
      collectives: how tokens go over `head_axis`: "xla", or "mosaic_gpu", by kernels of GPUs that write to each other's
        memory; None: the kernels where two to four GPUs can run them.

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
    sequence_sharding: SequenceSharding = "contiguous"
    exchange: Exchange | None = None
    collectives: Collectives | None = None

    def __post_init__(self):
        wanted = (*self.batch_axes, self.sequence_axis, self.head_axis)
        if missing := [axis for axis in wanted if axis not in self.mesh.axis_names]:
            raise ValueError(
                f"the mesh has axes {self.mesh.axis_names} and lacks {', '.join(missing)}; "
                "add it, with size 1 if it is to split nothing"
            )
        if self.collectives is not None:
            check_choice("collectives", self.collectives, Collectives)
        if any(axis_type != AxisType.Auto for axis_type in self.mesh.axis_types):
            raise ValueError(
                f"expected a mesh whose axes are all of type Auto, got {self.mesh.axis_types}; "
                f"pass axis_types=(AxisType.Auto,) * {len(self.mesh.axis_names)} to jax.make_mesh"
            )

    @property
    def layout(self) -> MeshLayout:
        """The layout for functions that each device runs on its own part."""
        return MeshLayout(self.mesh, self.batch_axes, self.sequence_axis, self.head_axis, self.sequence_sharding)

    @property
    def exchanges_keys(self) -> bool:
        """True if a sequence's tokens lie on several devices."""
        return self.mesh.shape[self.sequence_axis] > 1

    def check_token_order(
        self, positions: Array | None, token_order: Array | None, *, has_bounds: bool = False
    ) -> None:
        """Raises ValueError if tokens lie in another order and neither positions nor token_order are given.

        With bounds it asks for token_order: positions may restart then, and don't tell the order.
        """
        if self.sequence_sharding == "contiguous" or not self.exchanges_keys or token_order is not None:
            return
        if positions is None or has_bounds:
            given = "neither positions nor token_order were" if positions is None else "bounds but no token_order were"
            raise ValueError(
                f"sequence_sharding={self.sequence_sharding!r} puts tokens into another order, and {given} given; pass "
                "token_order"
            )

    @property
    def residual_spec(self) -> PartitionSpec:
        """Spec of the residual stream with its tokens split over `head_axis`, too."""
        return PartitionSpec(self.batch_axes, (self.sequence_axis, self.head_axis), None)

    def shares_tokens_out(self, length: int) -> bool:
        """True if the residual stream's tokens are split over the ranks of `head_axis`: several ranks that divide them.

        All ranks would compute the same on them. Their sums over features become reduce-scatters (sequence parallelism,
        arXiv:2205.05198).

        Args:
          length: T, of the arrays that the caller has.
        """
        sizes = {axis: 1 if axis in manual_axes() else size for axis, size in self.mesh.shape.items()}
        return sizes[self.head_axis] > 1 and not length % (sizes[self.sequence_axis] * sizes[self.head_axis])

    def constrain_hidden(self, hidden: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        """The residual stream: split over batch and tokens, whole in its features."""
        if self.shares_tokens_out(hidden.shape[1]):
            return self._constrain(hidden, *self.residual_spec)
        return self._constrain(hidden, self.batch_axes, self.sequence_axis, None)

    def gather_tokens(self, hidden: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        """Makes tokens whole on each rank of `head_axis`, for matmuls that split features over it."""
        return _gather_tokens(self, hidden)

    def scatter_tokens(self, hidden: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        """Splits tokens over `head_axis` again, after matmuls that sum over its features."""
        return _scatter_tokens(self, hidden)

    def choose_collectives(
        self, shape: tuple[int, ...], features: Sequence[tuple[int, ...]], dtype: jnp.dtype
    ) -> ChosenCollectives | None:
        """Chooses how the ranks of `head_axis` exchange tokens, for matmuls whose features it splits.

        None: that is left to XLA's partitioner. It is where the ranks don't share tokens out, and where sequences or
        features don't divide into the mesh.

        Args:
          shape: of the residual stream, `[B, T, W]`, as the caller has it.
          features: dims of all ranks' features, for each matrix, such as (heads, head dim).
          dtype: of tokens and features.

        Raises:
          ValueError: `collectives` names the kernels, and they can't serve.
        """
        batch, length, width = shape
        sizes = {axis: 1 if axis in manual_axes() else size for axis, size in self.mesh.shape.items()}
        num_ranks, num_batch_parts = sizes[self.head_axis], math.prod(sizes[axis] for axis in self.batch_axes)
        if num_ranks == 1:
            return None
        is_divided = not batch % num_batch_parts and not any(first % num_ranks for first, *_ in features)
        if not self.shares_tokens_out(length) or not is_divided:
            if self.collectives == "mosaic_gpu":
                raise ValueError(
                    f"collectives='mosaic_gpu' can't serve: {batch} sequences of {length} tokens, or "
                    f"{' or '.join(str(first) for first, *_ in features)} heads or features, don't divide into the "
                    f"mesh {dict(self.mesh.shape)}; use 'xla', or None for the fastest"
                )
            return None
        part = batch // num_batch_parts, length // (num_ranks * sizes[self.sequence_axis]), width
        features_of_rank = [math.prod(dims) // num_ranks for dims in features]
        return choose_collectives(self.mesh, self.head_axis, part, features_of_rank, dtype, self.collectives)

    def constrain_features(self, features: Float[Array, "B T F *H"]) -> Float[Array, "B T F *H"]:
        """Heads of queries, keys or values, or the MLP's hidden features: split over batch, tokens and features."""
        whole = (None,) * (features.ndim - 3)
        return self._constrain(features, self.batch_axes, self.sequence_axis, self.head_axis, *whole)

    def constrain_embedding(self, table: Float[Array, "V W"]) -> Float[Array, "V W"]:
        """The embedding for a lookup: split over its tokens, whole in its features, as what is looked up."""
        return self._constrain(table, self.head_axis, None)

    def whole_length(self, length: int) -> int:
        """Tokens of the whole sequence of which `length` are here: all of them, or this device's part.

        Args:
          length: T, of the arrays that the caller has.
        """
        return length * self.mesh.shape[self.sequence_axis] if self.sequence_axis in manual_axes() else length

    def token_order(self, length: int) -> Int[Array, "1 T"]:
        """Indices in the sequence of `length` tokens: all of its tokens, or this device's part of them.

        Args:
          length: T, of the arrays that the caller has.
        """
        token_order = jnp.arange(length, dtype=jnp.int32)[None]
        if self.sequence_axis in manual_axes():
            token_order += jax.lax.axis_index(self.sequence_axis).astype(jnp.int32) * length
        return token_order

    def _constrain(self, array: Array, *spec: tuple[str, ...] | str | None) -> Array:
        manual = manual_axes()
        if manual.issuperset(self.mesh.axis_names):
            return array
        left = spec_without(PartitionSpec(*spec), manual)
        return jax.lax.with_sharding_constraint(array, left if manual else NamedSharding(self.mesh, left))


# JAX would constrain a gradient like its array. But the gradient of what was gathered is a sum that is wanted split,
# and that of what was split is read by two matmuls, for each of which XLA would gather it.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_tokens(sharding: ActivationSharding, hidden: Array) -> Array:
    return sharding._constrain(hidden, sharding.batch_axes, sharding.sequence_axis, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scatter_tokens(sharding: ActivationSharding, hidden: Array) -> Array:
    return sharding.constrain_hidden(hidden)


_gather_tokens.defvjp(
    lambda sharding, hidden: (_gather_tokens(sharding, hidden), None),
    lambda sharding, _, gradient: (_scatter_tokens(sharding, gradient),),
)
_scatter_tokens.defvjp(
    lambda sharding, hidden: (_scatter_tokens(sharding, hidden), None),
    lambda sharding, _, gradient: (_gather_tokens(sharding, gradient),),
)
