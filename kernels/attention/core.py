"""The custom gradient of all our kernels, with delta = rowsum(dO∘O), the sinks' gradient, per-head masks, remat names.

A backend gives two halves. `forward(inputs, call, tuning)` returns output and lse. `backward(inputs, call, tuning,
cotangent)` returns the gradients of query, key and value. It is given each query's lse and delta over all of its keys,
so that it can be called for a part of the keys at a time. JAX itself differentiates cuDNN's attention, `reference` and
JAX's own splash attention.

A row that attends to nothing has output 0, lse −inf and no gradient.

Source: FlashAttention (arXiv:2205.14135, arXiv:2307.08691); sinks: arXiv:2309.17453.

Dimensions: B batch, T and S query and key/value length, N query heads, K key/value heads, H and V head dims.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from kernels.backends import Backend
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients

if TYPE_CHECKING:
    from kernels.backends.tuning import Tuning


class Halves(NamedTuple):
    """A backend's two halves, hashable.

    Attributes:
      forward: `(inputs, call, tuning)` to output and lse.
      backward: `(inputs, call, tuning, cotangent)` to the gradients of query, key and value.
      tuning: with nothing left open.
      cotangent: `(inputs, call, tuning, output, lse, d_output, d_lse)` to what `backward` starts from.
      longest_tile: as `Backend` has it.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., Gradients]
    tuning: Any
    cotangent: Callable[..., Cotangent] = lambda inputs, call, tuning, *of_output: Cotangent.of(*of_output)
    longest_tile: int | None = None

    @staticmethod
    def of(backend: Backend, tuning: Tuning | None, call: AttentionCall) -> Halves:
        """Those of a backend that serves the call."""
        module: ModuleType = backend.load()
        if backend.differentiable is not None:
            function = getattr(module, backend.differentiable)
            return Halves(_function_forward, _function_backward, function)
        tuning = module.resolve(tuning, call)
        return Halves(module.forward, module.backward, tuning, longest_tile=backend.longest_tile)


def attend(
    backend: Backend, inputs: AttentionInputs, call: AttentionCall, tuning: Tuning | None
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse of a call that the backend serves, differentiable."""
    module: ModuleType = backend.load()
    if backend.differentiable is not None:
        return getattr(module, backend.differentiable)(inputs, call)

    def attend_one_mask(inputs: AttentionInputs, call: AttentionCall):
        return attend_by_halves(Halves.of(backend, tuning, call), inputs, call)

    if backend.takes_masks_of_heads:
        return attend_one_mask(inputs, call)
    return attend_by_distinct_mask(attend_one_mask, inputs, call)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def attend_by_halves(halves: Halves, inputs: AttentionInputs, call: AttentionCall):
    """Output and lse by two halves."""
    return halves.forward(inputs, call, halves.tuning)


def _attend_forward(halves: Halves, inputs: AttentionInputs, call: AttentionCall):
    output, lse = halves.forward(inputs, call, halves.tuning)
    # The names let a remat policy keep these two, all that the backward needs besides the inputs.
    output, lse = checkpoint_name(output, "attention_output"), checkpoint_name(lse, "attention_lse")
    return (output, lse), (inputs, output, lse)


def _attend_backward(halves: Halves, call: AttentionCall, residuals, cotangents) -> tuple[AttentionInputs]:
    inputs, output, lse = residuals
    cotangent = halves.cotangent(inputs, call, halves.tuning, output, lse, *cotangents)
    d_sinks = None if inputs.sinks is None else sinks_gradient(inputs.sinks, cotangent)
    return (AttentionInputs(*halves.backward(inputs, call, halves.tuning, cotangent), d_sinks),)


attend_by_halves.defvjp(_attend_forward, _attend_backward)


def _function_forward(inputs: AttentionInputs, call: AttentionCall, function: Callable):
    return function(inputs, call)


def _function_backward(
    inputs: AttentionInputs, call: AttentionCall, function: Callable, cotangent: Cotangent
) -> Gradients:
    """The backward half that JAX's derivative of a function of (inputs, call) makes.

    The function divides by the softmax's sum over the keys of this call, and a half by the sum over the whole row's. So
    dO is scaled by the ratio of the two, and the gradient of lse makes up for the two deltas' difference.
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
    """A sink's probability is exp(sink − lse) in each row, and it adds no value: its gradient is −Σ p·delta."""
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
    pieces, begin = [], 0
    while begin < len(heads):
        end, step = begin + 1, 1
        if end < len(heads) and heads[end] > heads[begin]:
            step = int(heads[end] - heads[begin])
            while end < len(heads) and heads[end] - heads[end - 1] == step:
                end += 1
        pieces.append(jax.lax.slice_in_dim(x, int(heads[begin]), int(heads[end - 1]) + 1, step, axis=2))
        begin = end
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=2)
