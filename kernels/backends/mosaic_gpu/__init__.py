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

__all__ = ["backward", "forward", "resolve", "unsupported_reason"]


def _once_for_alike_calls(half: Callable[..., Any]) -> Callable[..., Any]:
    """Of calls that are alike, such as those of a model's layers, a process traces one, and a program lowers one."""

    def with_mask_state(inputs, call, tuning, *cotangent, mask_state):
        return half(inputs, call, tuning, *cotangent)

    with_mask_state.__name__ = half.__name__
    jitted = jax.jit(with_mask_state, static_argnames=("call", "tuning", "mask_state"))

    @functools.wraps(half)
    def run(inputs, call, tuning, *cotangent):
        # A mask's function may read what changes between calls. Then equal masks aren't alike.
        state = call.mask.state()
        if state is None:
            return half(inputs, call, tuning, *cotangent)
        return jitted(inputs, call, tuning, *cotangent, mask_state=state)

    return run


@_once_for_alike_calls
def forward(
    inputs: AttentionInputs, call: AttentionCall, tuning: MosaicGpuTuning
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse. See `kernels.attention.core`."""
    from kernels.backends.mosaic_gpu.forward_pass import run_forward

    return run_forward(inputs, call, tuning)


@_once_for_alike_calls
def backward(inputs: AttentionInputs, call: AttentionCall, tuning: MosaicGpuTuning, cotangent: Cotangent) -> Gradients:
    """The gradients of query, key and value. See `kernels.attention.core`."""
    from kernels.backends.mosaic_gpu.gradients import run_backward

    return run_backward(inputs, call, tuning, cotangent)
