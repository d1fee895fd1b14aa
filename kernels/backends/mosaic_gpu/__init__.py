"""NVIDIA's Hopper GPUs: Pallas Mosaic GPU kernels that visit the tiles of the block plan.

Forward and backward skip what the mask and the documents exclude, and evaluate the mask in PARTIAL tiles only. 16-bit
inputs, head dims up to 256, everything in the attention contract but `NumpyMask` and functions that
capture arrays.
"""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.support import unsupported_reason
from kernels.backends.mosaic_gpu.tuning import MosaicGpuTuning, resolve
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients

__all__ = ["backward", "forward", "resolve", "unsupported_reason"]


# Of calls that are alike, such as those of a model's layers, a process traces one, and a program lowers one.
_jit_half = functools.partial(jax.jit, static_argnames=("call", "tuning"))


@_jit_half
def forward(
    inputs: AttentionInputs, call: AttentionCall, tuning: MosaicGpuTuning
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse. See `kernels.attention.core`."""
    from kernels.backends.mosaic_gpu.forward_pass import run_forward

    return run_forward(inputs, call, tuning)


@_jit_half
def backward(inputs: AttentionInputs, call: AttentionCall, tuning: MosaicGpuTuning, cotangent: Cotangent) -> Gradients:
    """The gradients of query, key and value. See `kernels.attention.core`."""
    from kernels.backends.mosaic_gpu.gradients import run_backward

    return run_backward(inputs, call, tuning, cotangent)
