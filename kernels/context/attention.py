"""Self-attention over a mesh: each device works on its own batch elements, heads and queries.

The two halves that `kernels.attention.core` differentiates are here an exchange's, over `jax.shard_map`, around a
backend's. So the merged output and lse are what the backward pass starts from, and what a remat policy keeps by name.

Dimensions: B batch, T tokens, N query heads, K key/value heads, H and V head dims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from kernels.attention.core import Halves, attend, attend_by_distinct_mask, attend_by_halves
from kernels.attention.dispatch import choose_backend
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients, checked_positions, make_call
from kernels.context.costs import Exchange
from kernels.context.exchange import choose_exchange, exchange_module, kernel_call
from kernels.context.exchanges.brought import Brought
from kernels.context.layout import MeshLayout
from kernels.context.split import Split
from kernels.masks import Mask

if TYPE_CHECKING:
    from kernels.backends.tuning import Tuning


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
        return exchange_module(self.exchange).part_class(self.call, self.split)(inputs, self.call, self.split)

    @property
    def by_heads(self) -> bool:
        """Whether the halves' inputs, lse and cotangent are whole rows of some heads."""
        return self.exchange == "all_to_all"

    @property
    def brings(self) -> bool:
        """Whether the exchange brings the halves' inputs before the custom gradient begins."""
        if self.exchange is None:
            return False
        return issubclass(exchange_module(self.exchange).part_class(self.call, self.split), Brought)

    @property
    def of_lse(self) -> P:
        """The partition of the lse."""
        return self.layout.whole_rows if self.by_heads else self.layout.heads

    @property
    def of_cotangent(self) -> Cotangent:
        """The partition of what the backward half starts from."""
        return Cotangent._make([self.of_lse] * 3)

    @property
    def of_inputs(self) -> AttentionInputs:
        """The partition of the halves' inputs."""
        return self.layout.specs(by_heads=self.by_heads)


def attend_over_mesh(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    mask: Mask | None,
    layout: MeshLayout,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    token_order: Int[Array, "B T"] | None = None,
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
      positions: what the mask is evaluated on, counting up by one within each document, whose tokens follow one another
        in the row; None: places in the row.
      token_order: the index in the sequence of each token, in the order of the ranks, for
        `sequence_sharding="balanced"`, as `shard_sequence` returns it with its default chunk size: whole chunks, in any
        order. The order of the other shardings is known.
      exchange: how ranks get at the keys that their queries attend to; None for the fastest by the cost model.

    Returns:
      The output, laid out as the query.

    Raises:
      ValueError: arguments that don't fit together, the layout, or the exchange.
      CantServe: a named backend that can't serve the call of one device.
    """
    layout.check(query, key, mask)
    if layout.sequence_sharding == "balanced" and token_order is None and layout.mesh.shape[layout.sequence_axis] > 1:
        raise ValueError(
            "sequence_sharding='balanced' needs the order of the tokens, which each sequence decides; pass token_order="
        )
    if token_order is not None:
        _check_chunks(token_order, layout.split(query.shape[1]).chunk_size)
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
    if token_order is not None:
        token_order = checked_positions("token_order", token_order, call.batch, call.q_len)

    def attend_one(inputs: AttentionInputs, call: AttentionCall):
        return _attend_one(layout, inputs._replace(token_order=token_order), call, exchange, implementation)

    if call.mask.num_heads is None or _takes_masks_of_heads(layout, call, exchange, implementation):
        return attend_one(inputs, call)[0]
    return attend_by_distinct_mask(attend_one, inputs, call)[0]


def _check_chunks(token_order: Int[Array, "B T"], chunk_size: int | None) -> None:
    """Raises ValueError if the ranks don't hold whole chunks, as far as the host knows the order of the tokens."""
    is_known = not isinstance(token_order, jax.core.Tracer) and getattr(token_order, "is_fully_addressable", True)
    if chunk_size is None or not is_known or np.size(token_order) % chunk_size:  # the latter is refused by its shape
        return
    chunks = np.asarray(token_order).reshape(-1, chunk_size)
    if (chunks[:, :1] % chunk_size).any() or (np.diff(chunks, axis=1) != 1).any():
        raise ValueError(
            f"token_order isn't of chunks of {chunk_size} tokens that follow one another and begin at a multiple of "
            f"{chunk_size}; make it by kernels.context.shard_sequence, with its default chunk_size"
        )


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
    if exchange in ("halo", "all_to_all") and layout.mesh.shape[layout.sequence_axis] > 1:
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

        return layout.map(attend_on_device, (inputs,), (layout.specs(),), layout.heads), None
    on_mesh = _OnMesh(layout, split, name, of_device, local, Halves.of(backend, tuning, local))
    if on_mesh.brings:
        inputs = layout.map(
            lambda inputs: on_mesh.part(inputs).bring(inputs, on_mesh.halves),
            (inputs,),
            (layout.specs(),),
            on_mesh.of_inputs,
        )
    return attend_by_halves(Halves(_forward, _backward, on_mesh, _cotangent), inputs, call)


def _forward(inputs: AttentionInputs, call: AttentionCall, on_mesh: _OnMesh) -> tuple[Array, Array]:
    def forward(inputs: AttentionInputs):
        if on_mesh.exchange is None:
            return on_mesh.halves.forward(inputs, on_mesh.local_call, on_mesh.halves.tuning)
        return on_mesh.part(inputs).forward(inputs, on_mesh.local_call, on_mesh.halves)

    out_specs = on_mesh.layout.heads, on_mesh.of_lse
    return on_mesh.layout.map(forward, (inputs,), (on_mesh.of_inputs,), out_specs)


def _cotangent(inputs: AttentionInputs, call: AttentionCall, on_mesh: _OnMesh, *of_output: Array) -> Cotangent:
    if not on_mesh.by_heads:
        return Cotangent.of(*of_output)

    def bring(inputs: AttentionInputs, *of_output: Array) -> Cotangent:
        return on_mesh.part(inputs).cotangent(*of_output)

    of_tokens, of_lse = on_mesh.layout.heads, on_mesh.of_lse
    in_specs = on_mesh.of_inputs, of_tokens, of_lse, of_tokens, of_lse
    return on_mesh.layout.map(bring, (inputs, *of_output), in_specs, on_mesh.of_cotangent)


def _backward(inputs: AttentionInputs, call: AttentionCall, on_mesh: _OnMesh, cotangent: Cotangent) -> Gradients:
    def backward(inputs: AttentionInputs, cotangent: Cotangent):
        if on_mesh.exchange is None:
            return on_mesh.halves.backward(inputs, on_mesh.local_call, on_mesh.halves.tuning, cotangent)
        return on_mesh.part(inputs).backward(inputs, on_mesh.local_call, on_mesh.halves, cotangent)

    of_inputs = on_mesh.of_inputs
    return on_mesh.layout.map(backward, (inputs, cotangent), (of_inputs, on_mesh.of_cotangent), of_inputs[:3])
