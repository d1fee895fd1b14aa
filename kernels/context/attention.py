"""Self-attention over a mesh: each device works on its own batch elements, heads and queries.

The two halves that `kernels.attention.core` differentiates are here an exchange's, over `jax.shard_map`, around a
backend's. So the merged output and lse are what the backward pass starts from, and what a remat policy keeps by name.

Dimensions: B batch, T tokens, N query heads, K key/value heads, H and V head dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from kernels.attention.core import Halves, attend, attend_by_distinct_mask, attend_by_halves
from kernels.attention.dispatch import choose_backend
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients, checked_positions, make_call
from kernels.context.costs import Exchange
from kernels.context.deal import Deal, check_deal
from kernels.context.exchange import choose_exchange, exchange_module, kernel_call
from kernels.context.split import Split
from kernels.masks import Mask

if TYPE_CHECKING:
    from kernels.tuning import Tuning


def manual_axes() -> frozenset[str]:
    """The mesh axes that a `jax.shard_map` around this call maps over: arrays here are one device's part along them."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def spec_without(spec: P, axes: frozenset[str]) -> P:
    """The partition of what is left of an array that is split over some axes already."""

    def keep(entry: tuple[str, ...] | str | None) -> tuple[str, ...] | None:
        named = () if entry is None else (entry,) if isinstance(entry, str) else entry
        return tuple(axis for axis in named if axis not in axes) or None

    return P(*map(keep, spec))


class MeshLayout(NamedTuple):
    """Which axes of a mesh split which dims of attention's arrays.

    Attributes:
      mesh: the devices.
      batch_axes: split B.
      sequence_axis: splits T.
      head_axis: splits N and K.
      deal: which tokens of a row each rank of the sequence axis holds.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]
    sequence_axis: str
    head_axis: str
    deal: Deal = "in_order"

    @property
    def sizes(self) -> dict[str, int]:
        """How many parts each axis cuts the caller's arrays into: 1 where a caller's `jax.shard_map` has cut them."""
        manual = manual_axes()
        return {axis: 1 if axis in manual else size for axis, size in self.mesh.shape.items()}

    def split(self, length: int) -> Split:
        """The split of the rows that the caller's arrays hold `length` tokens of."""
        num_ranks = self.mesh.shape[self.sequence_axis]
        return Split.of(self.sequence_axis, num_ranks, self.deal, length // self.sizes[self.sequence_axis] * num_ranks)

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

    def specs(self, inputs: AttentionInputs, *, by_heads: bool = False) -> AttentionInputs:
        """The partition of each input that there is; `by_heads`: where every rank has whole rows of some heads."""
        batch, tokens = self.batch_axes, P(self.batch_axes, self.sequence_axis)
        heads, of_rows = self.heads, tokens
        if by_heads:
            heads, of_rows = P(batch, None, (self.head_axis, self.sequence_axis)), P(batch)
        specs = [heads, heads, heads, P(self.head_axis), *[of_rows] * 4, tokens]
        return AttentionInputs._make(None if x is None else spec for x, spec in zip(inputs, specs, strict=True))

    def map(
        self,
        function: Callable,
        arguments: tuple[AttentionInputs] | tuple[AttentionInputs, Cotangent],
        out_specs: Any,
        *,
        by_heads: bool = False,
    ) -> Any:
        """Calls a function on every device with its part of the arguments, whose missing arrays stay None.

        Inside a caller's `jax.shard_map` it maps over the axes that are left, if any are.
        """
        manual = manual_axes()
        axes = frozenset(self.mesh.axis_names) - manual
        if not axes:
            return function(*arguments)
        specs = self.specs(arguments[0], by_heads=by_heads), *[Cotangent._make([self.heads] * 3)] * (len(arguments) - 1)
        specs, out_specs = jax.tree.map(lambda spec: spec_without(spec, manual), (specs, out_specs))
        mapped = jax.shard_map(
            function,
            mesh=None if manual else self.mesh,
            in_specs=specs,
            out_specs=out_specs,
            axis_names=axes,
            # The Pallas, Triton and cuDNN kernels don't say over which mesh axes their outputs vary.
            check_vma=False,
        )
        return mapped(*arguments)

    def check(self, query: Array, key: Array, mask: Mask | None) -> None:
        """Raises ValueError if the mesh doesn't divide a call's arrays, or can't give each head its own mask."""
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
            check_deal(self.deal, split.length, split.num_ranks, split.chunk_size)


class _OnMesh(NamedTuple):
    """What is static about a call's halves over a mesh.

    Attributes:
      layout: of the arrays.
      split: of the rows.
      exchange: how ranks get at their keys; None: the sequence axis splits nothing.
      call: of one device, before keys are exchanged.
      local_call: what its kernel is called for.
      halves: the kernel's.
    """

    layout: MeshLayout
    split: Split
    exchange: Exchange | None
    call: AttentionCall
    local_call: AttentionCall
    halves: Halves

    def part(self, inputs: AttentionInputs) -> Any:
        """This device's part of the exchange."""
        assert self.exchange is not None
        return exchange_module(self.exchange).part(inputs, self.call, self.split)


def attend_over_mesh(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    mask: Mask | None,
    layout: MeshLayout,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    places: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: str | Tuning | None = None,
    exchange: Exchange | None = None,
) -> Float[Array, "B T N V"]:
    """Self-attention over a mesh, the same function as on one device.

    Args:
      query, key, value, mask, scale, logits_soft_cap, sinks, implementation: as for `kernels.dot_product_attention`.
      layout: of the arrays on the mesh.
      segment_ids: document of each token; only equal ids attend.
      positions: what the mask is evaluated on, counting up by one within each document; None: places in the row.
      places: where in its row each token stands, for `deal="by_cost"`; those of the other deals are known.
      exchange: how ranks get at the keys that their queries attend to; None for the fastest by the cost model.

    Returns:
      The output, laid out as the query.

    Raises:
      ValueError: arguments that don't fit together, the layout, or the exchange.
      CantServe: a named backend that can't serve the call of one device.
    """
    layout.check(query, key, mask)
    if layout.deal == "by_cost" and places is None and layout.mesh.shape[layout.sequence_axis] > 1:
        raise ValueError("deal='by_cost' needs the places of the tokens, since each row decides; pass places=")
    inputs, call = make_call(
        query,
        key,
        value,
        mask,
        query_segment_ids=segment_ids,
        key_value_segment_ids=segment_ids,
        query_positions=positions,
        key_value_positions=positions,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        device=layout.mesh.devices.flat[0],
    )
    if places is not None:
        places = checked_positions("places", places, call.batch, call.q_len)

    def attend_one(inputs: AttentionInputs, call: AttentionCall):
        return _attend_one(layout, inputs._replace(places=places), call, exchange, implementation)

    if call.mask.num_heads is None or _takes_masks_of_heads(layout, call, exchange, implementation):
        return attend_one(inputs, call)[0]
    return attend_by_distinct_mask(attend_one, inputs, call)[0]


def local_call(
    layout: MeshLayout, call: AttentionCall, exchange: Exchange | None, implementation: str | Tuning | None
) -> tuple[Exchange | None, AttentionCall]:
    """The exchange that a call over a mesh gets (None: the sequence axis is 1), and the call of one device's kernel.

    Raises:
      ValueError: the exchange can't serve the call.
    """
    split, of_device = layout.split(call.q_len), layout.call_of_a_device(call)
    if split.num_ranks == 1:
        return None, of_device
    name = choose_exchange(of_device, split, exchange, implementation).name
    return name, kernel_call(name, of_device, split)


def _takes_masks_of_heads(
    layout: MeshLayout, call: AttentionCall, exchange: Exchange | None, implementation: str | Tuning | None
) -> bool:
    """Whether one call of the backend serves heads with different masks."""
    if exchange in ("halo", "heads") and layout.mesh.shape[layout.sequence_axis] > 1:
        return False  # these are for one mask at a time
    name, local = local_call(layout, call, exchange, implementation)
    backend, _ = choose_backend(local, implementation)
    # A backend that JAX differentiates is called as it is where no keys are exchanged.
    return backend.takes_masks_of_heads or (name is None and backend.differentiable is not None)


def _attend_one(
    layout: MeshLayout,
    inputs: AttentionInputs,
    call: AttentionCall,
    exchange: Exchange | None,
    implementation: str | Tuning | None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"] | None]:
    """Output and lse of one kernel's call."""
    split, of_device = layout.split(call.q_len), layout.call_of_a_device(call)
    name, local = local_call(layout, call, exchange, implementation)
    backend, tuning = choose_backend(local, implementation)
    if name is None and backend.differentiable is not None:
        # Such a backend may have no lse to give. JAX differentiates it, and the map over the mesh.
        def attend_on_device(inputs: AttentionInputs):
            return attend(backend, inputs, local, tuning)[0]

        return layout.map(attend_on_device, (inputs,), layout.heads), None
    on_mesh = _OnMesh(layout, split, name, of_device, local, Halves.of(backend, tuning, local))
    if name == "heads":
        inputs = layout.map(
            lambda inputs: on_mesh.part(inputs).bring(inputs), (inputs,), layout.specs(inputs, by_heads=True)
        )
    return attend_by_halves(_forward, _backward, on_mesh, inputs, call)


def _forward(inputs: AttentionInputs, call: AttentionCall, on_mesh: _OnMesh) -> tuple[Array, Array]:
    by_heads = on_mesh.exchange == "heads"

    def forward(inputs: AttentionInputs):
        if on_mesh.exchange is None:
            return on_mesh.halves.forward(inputs, on_mesh.local_call, on_mesh.halves.tuning)
        return on_mesh.part(inputs).forward(inputs, on_mesh.local_call, on_mesh.halves)

    heads = on_mesh.layout.heads
    return on_mesh.layout.map(forward, (inputs,), (heads, heads), by_heads=by_heads)


def _backward(inputs: AttentionInputs, call: AttentionCall, on_mesh: _OnMesh, cotangent: Cotangent) -> Gradients:
    def backward(inputs: AttentionInputs, cotangent: Cotangent):
        if on_mesh.exchange is None:
            return on_mesh.halves.backward(inputs, on_mesh.local_call, on_mesh.halves.tuning, cotangent)
        return on_mesh.part(inputs).backward(inputs, on_mesh.local_call, on_mesh.halves, cotangent)

    by_heads = on_mesh.exchange == "heads"
    out_specs = on_mesh.layout.specs(inputs, by_heads=by_heads)[:3]
    return on_mesh.layout.map(backward, (inputs, cotangent), out_specs, by_heads=by_heads)
