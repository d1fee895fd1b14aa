"""Self-attention over a mesh: each device works on its own batch elements, heads and queries.

The kernel whose `fwd` and `bwd` the custom gradient calls is here an exchange's, over `jax.shard_map`, around a
backend's. So the backward pass begins with the output and the lse over all keys, and a remat policy keeps these two by
name.

Dimensions: B batch, T tokens, N query heads, K key/value heads, H and V head dims.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from kernels.attention.core import BackendKernel, Kernel, attend, attend_by, attend_by_distinct_mask
from kernels.attention.dispatch import choose_backend
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients, checked_positions, make_call
from kernels.context.choose_exchange import choose_exchange, exchange_module, kernel_call
from kernels.context.costs import Exchange
from kernels.context.exchanges import all_to_all
from kernels.context.layout import MeshLayout
from kernels.context.rank import Rank
from kernels.context.split import Split
from kernels.masks import Bounds, Mask

if TYPE_CHECKING:
    from kernels.backends.tuning import Tuning


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
    bounds: Bounds | None = None,
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
      positions: of the tokens, on which the mask is evaluated. They count up by one within each document, whose tokens
        follow one another in the sequence; with bounds they may be any. None: indices in the sequence.
      token_order: the index in the sequence of each token, in the order of the ranks, for
        `sequence_sharding="balanced"`, as `shard_sequence` returns it with its default chunk size: whole chunks, in any
        order; with bounds, in rising order on each rank. The order of the other shardings is known.
      bounds: as for `kernels.dot_product_attention`: indices in the whole sequence. They lie as the tokens do.
      exchange: how ranks get at the keys that their queries attend to; None for the choice of `choose_exchange`.

    Returns:
      The output, laid out as the query.

    Raises:
      ValueError: arguments that don't fit together, the layout, or the exchange.
      CantServe: a named backend that can't serve the call of one device.
    """
    layout.check(query, key, mask)
    split = layout.split(query.shape[1])
    if layout.sequence_sharding == "balanced" and token_order is None and split.num_ranks > 1:
        raise ValueError(
            "sequence_sharding='balanced' needs the order of the tokens, which each sequence decides; pass token_order="
        )
    if token_order is not None:
        _check_chunks(token_order, split, has_bounds=bounds is not None)
    inputs, call = make_call(
        query,
        key,
        value,
        mask,
        query_segment_ids=segment_ids,
        key_value_segment_ids=segment_ids,
        query_positions=positions,
        key_value_positions=positions,
        bounds=bounds,
        sequence_length=split.length,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        device=layout.mesh.devices.flat[0],
    )
    if token_order is not None:
        token_order = checked_positions("token_order", token_order, call.batch, call.q_len)

    inputs = inputs._replace(token_order=token_order)
    return _attend(inputs, call, layout=layout, exchange=exchange, implementation=implementation)[0]


def _check_chunks(token_order: Int[Array, "B T"], split: Split, *, has_bounds: bool) -> None:
    """Raises ValueError if the ranks don't hold whole chunks, as far as the host knows the order of the tokens.

    Bounds ask for chunks in the order of the sequence, on each rank.
    """
    chunk_size = split.chunk_size
    is_known = not isinstance(token_order, jax.core.Tracer) and getattr(token_order, "is_fully_addressable", True)
    if chunk_size is None or not is_known or np.size(token_order) % split.length:  # the latter is refused by its shape
        return
    chunks = np.asarray(token_order).reshape(-1, chunk_size)
    if (chunks[:, :1] % chunk_size).any() or (np.diff(chunks, axis=1) != 1).any():
        raise ValueError(
            f"token_order isn't of chunks of {chunk_size} tokens that follow one another and begin at a multiple of "
            f"{chunk_size}; make it by kernels.context.shard_sequence, with its default chunk_size"
        )
    if has_bounds and (np.diff(chunks[:, 0].reshape(-1, split.length // split.num_ranks // chunk_size)) < 0).any():
        raise ValueError(
            "token_order doesn't rise within each rank, which bounds need; make it by kernels.context.shard_sequence"
        )


def local_call(
    layout: MeshLayout, call: AttentionCall, exchange: Exchange | None, implementation: str | Tuning | None
) -> tuple[Exchange | None, AttentionCall]:
    """The exchange that a call over a mesh gets (None: the sequence axis is 1), and the call of one device's kernel.

    Raises:
      ValueError: the exchange can't serve the call.
    """
    split, device_call = layout.split(call.q_len), layout.call_of_a_device(call)
    if split.num_ranks == 1:
        return None, device_call
    name = choose_exchange(device_call, split, exchange, implementation).name
    return name, kernel_call(name, device_call, split)


def _attend(
    inputs: AttentionInputs,
    call: AttentionCall,
    *,
    layout: MeshLayout,
    exchange: Exchange | None,
    implementation: str | Tuning | None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"] | None]:
    """Output and lse of a call, by one kernel for each distinct mask, unless the backend takes masks of heads."""
    attend_one_mask = functools.partial(_attend, layout=layout, exchange=exchange, implementation=implementation)
    has_masks_of_heads, split = call.mask.num_heads is not None, layout.split(call.q_len)
    if has_masks_of_heads and split.num_ranks > 1 and exchange in ("halo", "all_to_all"):
        return attend_by_distinct_mask(attend_one_mask, inputs, call)  # these exchanges are for one mask at a time
    name, local = local_call(layout, call, exchange, implementation)
    backend, tuning = choose_backend(local, implementation)
    if name is None and backend.differentiable is not None:
        # Such a backend may have no lse to give. JAX differentiates it, and the map over the mesh.
        def attend_on_device(inputs: AttentionInputs):
            return attend(backend, inputs, local, tuning)[0]

        return layout.map(attend_on_device, (inputs,), (layout.specs(),), layout.heads), None
    if has_masks_of_heads and not backend.takes_masks_of_heads:
        return attend_by_distinct_mask(attend_one_mask, inputs, call)
    rank = Rank(layout.call_of_a_device(call), split, BackendKernel.of(backend, tuning, local), local)
    kernel = _MeshKernel(layout, name, rank)
    bring = None if name is None else exchange_module(name).bring(rank)
    if bring is not None:
        inputs = layout.map(bring, (inputs,), (layout.specs(),), kernel.input_specs)
    return attend_by(kernel, inputs, call)


@dataclass(frozen=True)
class _MeshKernel(Kernel):
    """An exchange's two functions, over `jax.shard_map`, around those of a backend.

    Attributes:
      layout: of the arrays.
      exchange: how ranks get at their keys; None: the sequence axis splits nothing.
      rank: the attention of one rank.
    """

    layout: MeshLayout
    exchange: Exchange | None
    rank: Rank

    @property
    def has_whole_sequences(self) -> bool:
        """True if the inputs, the lse and the cotangent are whole sequences of some heads."""
        return self.exchange == "all_to_all"

    @property
    def input_specs(self) -> AttentionInputs:
        """The partition of the inputs."""
        return self.layout.specs(whole_sequences=self.has_whole_sequences)

    @property
    def lse_spec(self) -> P:
        """The partition of the lse."""
        return self.layout.whole_sequences if self.has_whole_sequences else self.layout.heads

    def fwd(self, inputs: AttentionInputs, call: AttentionCall) -> tuple[Array, Array]:
        def fwd(inputs: AttentionInputs):
            return self.rank.fwd(inputs) if self.exchange is None else self._module.fwd(inputs, self.rank)

        return self.layout.map(fwd, (inputs,), (self.input_specs,), (self.layout.heads, self.lse_spec))

    def cotangent(self, inputs: AttentionInputs, output: Array, lse: Array, d_output: Array, d_lse: Array) -> Cotangent:
        if not self.has_whole_sequences:
            return Cotangent.of(output, lse, d_output, d_lse)

        def cotangent(inputs: AttentionInputs, *arrays: Array) -> Cotangent:
            return all_to_all.cotangent(inputs, self.rank, *arrays)

        output_spec, lse_spec = self.layout.heads, self.lse_spec
        in_specs = self.input_specs, output_spec, lse_spec, output_spec, lse_spec
        return self.layout.map(cotangent, (inputs, output, lse, d_output, d_lse), in_specs, self._cotangent_specs)

    def bwd(self, inputs: AttentionInputs, call: AttentionCall, cotangent: Cotangent) -> Gradients:
        def bwd(inputs: AttentionInputs, cotangent: Cotangent):
            if self.exchange is None:
                return self.rank.bwd(inputs, cotangent)
            return self._module.bwd(inputs, self.rank, cotangent)

        in_specs = self.input_specs, self._cotangent_specs
        return self.layout.map(bwd, (inputs, cotangent), in_specs, self.input_specs[:3])

    @property
    def _cotangent_specs(self) -> Cotangent:
        return Cotangent._make([self.lse_spec] * 3)

    @property
    def _module(self) -> ModuleType:
        assert self.exchange is not None
        return exchange_module(self.exchange)
