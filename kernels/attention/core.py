"""The custom gradient of all our kernels: delta = rowsum(dO∘O), the sinks' gradient, per-head masks, names for remat.

A kernel has the two functions of a gradient. `fwd(inputs, call)` returns output and lse. `bwd(inputs, call, cotangent)`
returns the gradients of query, key and value. `bwd` is given the lse and delta of each query over all of its keys. So
it can be called for a part of the keys at a time. JAX itself differentiates the attention of `cudnn` and `reference`.

A query that attends to nothing has output 0, lse −inf and no gradient.

Source: FlashAttention (arXiv:2205.14135, arXiv:2307.08691); sinks: arXiv:2309.17453.

Dimensions: B batch, T and S query and key/value length, N query heads, K key/value heads, H and V head dims.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from kernels.backends import Backend
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients

if TYPE_CHECKING:
    from kernels.backends.tuning import Tuning


class Kernel(ABC):
    """The two functions of a gradient. Hashable."""

    @abstractmethod
    def fwd(self, inputs: AttentionInputs, call: AttentionCall) -> tuple[Array, Array]:
        """Output and lse."""

    @abstractmethod
    def bwd(self, inputs: AttentionInputs, call: AttentionCall, cotangent: Cotangent) -> Gradients:
        """The gradients of query, key and value."""

    def cotangent(self, inputs: AttentionInputs, output: Array, lse: Array, d_output: Array, d_lse: Array) -> Cotangent:
        """The last argument of `bwd`."""
        return Cotangent.of(output, lse, d_output, d_lse)


@dataclass(frozen=True)
class BackendKernel(Kernel):
    """A backend's kernel.

    Attributes:
      backend: that serves the call.
      tuning: with nothing left open; None for a backend that JAX differentiates.
    """

    backend: Backend
    tuning: Tuning | None

    @staticmethod
    def of(backend: Backend, tuning: Tuning | None, call: AttentionCall) -> BackendKernel:
        """The kernel of a backend that serves the call; fills what the tuning leaves open."""
        if backend.differentiable is not None:
            return BackendKernel(backend, None)
        return BackendKernel(backend, backend.load().resolve(tuning, call))

    def fwd(self, inputs: AttentionInputs, call: AttentionCall) -> tuple[Array, Array]:
        if self.backend.differentiable is not None:
            return self.backend.function()(inputs, call)
        return self.backend.load().fwd(inputs, call, self.tuning)

    def bwd(self, inputs: AttentionInputs, call: AttentionCall, cotangent: Cotangent) -> Gradients:
        if self.backend.differentiable is not None:
            return differentiate(self.backend.function(), inputs, call, cotangent)
        return self.backend.load().bwd(inputs, call, self.tuning, cotangent)


def attend(
    backend: Backend, inputs: AttentionInputs, call: AttentionCall, tuning: Tuning | None
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse of a call that the backend serves, differentiable."""
    if backend.differentiable is not None:
        return backend.function()(inputs, call)
    if backend.takes_masks_of_heads or call.mask.num_heads is None:
        return attend_by(BackendKernel.of(backend, tuning, call), inputs, call)
    return attend_by_distinct_mask(functools.partial(attend, backend, tuning=tuning), inputs, call)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def attend_by(kernel: Kernel, inputs: AttentionInputs, call: AttentionCall):
    """Output and lse by a kernel's two functions."""
    return kernel.fwd(inputs, call)


def _attend_fwd(kernel: Kernel, inputs: AttentionInputs, call: AttentionCall):
    output, lse = kernel.fwd(inputs, call)
    # The names let a remat policy keep these two, all that the backward needs besides the inputs.
    output, lse = checkpoint_name(output, "attention_output"), checkpoint_name(lse, "attention_lse")
    return (output, lse), (inputs, output, lse)


def _attend_bwd(kernel: Kernel, call: AttentionCall, residuals, cotangents) -> tuple[AttentionInputs]:
    inputs, output, lse = residuals
    cotangent = kernel.cotangent(inputs, output, lse, *cotangents)
    d_sinks = None if inputs.sinks is None else sinks_gradient(inputs.sinks, cotangent)
    return (AttentionInputs(*kernel.bwd(inputs, call, cotangent), d_sinks),)


attend_by.defvjp(_attend_fwd, _attend_bwd)


def differentiate(
    function: Callable[[AttentionInputs, AttentionCall], tuple[Array, Array]],
    inputs: AttentionInputs,
    call: AttentionCall,
    cotangent: Cotangent,
) -> Gradients:
    """The `bwd` of a function that JAX differentiates.

    The function divides by the softmax's sum over the keys of this call. `bwd` has to divide by the sum over all keys
    of a query. So dO is scaled by the ratio of the two sums, and the gradient of lse makes up for the difference of the
    two deltas.
    """

    def attend(query, key, value):
        return function(inputs._replace(query=query, key=key, value=value), call)

    (output, lse), pull_back = jax.vjp(attend, *inputs[:3])
    attends = lse != -jnp.inf
    ratio = jnp.where(attends, jnp.exp(lse - jnp.where(attends, cotangent.lse, 0)), 0)
    d_output = (cotangent.d_output * ratio[..., None]).astype(call.dtype)
    own_delta = (output.astype(lse.dtype) * d_output.astype(lse.dtype)).sum(-1)
    return pull_back((d_output, jnp.where(attends, own_delta - ratio * cotangent.delta, 0)))


def sinks_gradient(sinks: Float[Array, " N"], cotangent: Cotangent) -> Float[Array, " N"]:
    """A sink's probability is exp(sink − lse) for each query, and it adds no value: its gradient is −Σ p·delta."""
    attends = cotangent.lse != -jnp.inf
    logits = sinks.astype(cotangent.lse.dtype)
    p = jnp.where(attends, jnp.exp(logits - jnp.where(attends, cotangent.lse, 0)), 0)
    return -(p * cotangent.delta).sum((0, 1)).astype(sinks.dtype)


def attend_by_distinct_mask(attend: Callable, inputs: AttentionInputs, call: AttentionCall):
    """Output and lse of all heads, by one `attend(inputs, call)` for each distinct mask on the heads that share it.

    Key/value heads are picked, not repeated, as long as each serves equally many of the query heads.
    """
    if call.mask.num_heads is None:
        return attend(inputs, call)
    outputs, order = [], []
    for mask, sharing in call.mask.distinct_heads(call.num_heads).items():
        heads = np.array(sharing)
        order.append(heads)
        kv_heads, counts = np.unique(heads // call.group_size, return_counts=True)
        if len(set(counts)) > 1:
            kv_heads = heads // call.group_size
        part = inputs._replace(
            query=take_heads(inputs.query, heads),
            key=take_heads(inputs.key, kv_heads),
            value=take_heads(inputs.value, kv_heads),
            sinks=None if inputs.sinks is None else inputs.sinks[heads],
        )
        outputs.append(attend(part, call._replace(mask=mask, num_heads=len(heads), num_kv_heads=len(kv_heads))))
    original_order = np.argsort(np.concatenate(order))
    return tuple(take_heads(jnp.concatenate(parts, axis=2), original_order) for parts in zip(*outputs, strict=True))


def take_heads(x: Float[Array, "B L N ..."], heads: Int[np.ndarray, " n"]) -> Float[Array, "B L n ..."]:
    """`x[:, :, heads]` by slices: an indexed read's gradient is a scatter, slow to compile for TPUs and to run."""
    spans, begin = [], 0
    while begin < len(heads):
        end, step = begin + 1, 1
        if end < len(heads) and heads[end] > heads[begin]:
            step = int(heads[end] - heads[begin])
            while end < len(heads) and heads[end] - heads[end - 1] == step:
                end += 1
        spans.append(jax.lax.slice_in_dim(x, int(heads[begin]), int(heads[end - 1]) + 1, step, axis=2))
        begin = end
    return spans[0] if len(spans) == 1 else jnp.concatenate(spans, axis=2)
