"""NVIDIA's Hopper GPUs: Pallas Mosaic GPU kernels that visit the tiles of the block plan.

Forward and backward skip what the mask and the documents exclude, and evaluate the mask in PARTIAL tiles only. 16-bit
inputs, head dims up to 256, everything in the attention contract but `NumpyMask` and functions that
capture arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.support import unsupported_reason
from kernels.backends.mosaic_gpu.tuning import MosaicGpuTuning, resolve
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients
from kernels.tracing.slice_fusion import without_slice_fusion

__all__ = ["bwd", "fwd", "resolve", "unsupported_reason"]


def _jit_by_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Jits with the call and the tuning static, so that equal calls, as of a model's layers, share a lowering."""

    def as_one(inputs, call, tuning, *cotangent):
        return _as_one_operation(lambda inputs, *cotangent: function(inputs, call, tuning, *cotangent))(
            inputs, *cotangent
        )

    def run_function(inputs, call, tuning, *cotangent, mask_state):
        return as_one(inputs, call, tuning, *cotangent)

    run_function.__name__ = function.__name__
    jitted = jax.jit(run_function, static_argnames=("call", "tuning", "mask_state"))

    @functools.wraps(function)
    def run(inputs, call, tuning, *cotangent):
        # A mask's function may read what changes between calls. Then equal masks aren't alike.
        state = call.mask.state()
        if state is None:
            return as_one(inputs, call, tuning, *cotangent)
        return jitted(inputs, call, tuning, *cotangent, mask_state=state)

    run.cache_clear = jitted.clear_cache  # type: ignore[attr-defined]  # as `functools.lru_cache` has it
    return run


def _as_one_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one operation to `jax.checkpoint`, which would look into it otherwise.

    It would find the tile scheduler's counter there. What comes of a mutable array it keeps, whatever the policy; in a
    `while` loop, where nothing can be kept, it ends with an AssertionError (JAX 0.11.2).
    """
    operation = jax.custom_batching.custom_vmap(function)

    @operation.def_vmap
    def vmap(axis_size, is_batched, *arguments):
        in_axes = jax.tree.map(lambda each: 0 if each else None, tuple(is_batched))
        outputs = _as_one_operation(jax.vmap(function, in_axes, axis_size=axis_size))(*arguments)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return operation


@_jit_by_call
def fwd(
    inputs: AttentionInputs, call: AttentionCall, tuning: MosaicGpuTuning
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse. See `kernels.attention.core`."""
    from kernels.backends.mosaic_gpu.forward_pass import run_forward

    output, lse = without_slice_fusion(*run_forward(inputs, call, tuning))
    return output, lse


@_jit_by_call
def bwd(inputs: AttentionInputs, call: AttentionCall, tuning: MosaicGpuTuning, cotangent: Cotangent) -> Gradients:
    """The gradients of query, key and value. See `kernels.attention.core`."""
    from kernels.backends.mosaic_gpu.gradients import run_backward

    return run_backward(inputs, call, tuning, cotangent)
