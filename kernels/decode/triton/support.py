"""What the Triton kernel can't do."""

from __future__ import annotations

import importlib.util

import jax.numpy as jnp

from kernels.decode.call import DecodeCall
from kernels.varying import CHECK_VMA_REASON

_OLDEST_CAPABILITY = 8.0
_MAX_HEAD_DIM = 256
_SMALLEST_TILE = 16


def unsupported_reason(call: DecodeCall) -> str | None:
    """Why the kernel can't serve the call, or None if it can."""
    if call.varying_axes:
        return CHECK_VMA_REASON
    capability = call.target.compute_capability
    if capability is None:
        return f"needs an NVIDIA GPU, not {call.target.device_kind}"
    if capability < _OLDEST_CAPABILITY:
        return f"needs an NVIDIA GPU of compute capability {_OLDEST_CAPABILITY}, this one has {capability}"
    for package in ("triton", "jax_triton"):
        if importlib.util.find_spec(package) is None:
            return f"needs {package}, which isn't installed; install flax-longcontext[cuda13]"
    if call.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, not {call.dtype}"
    widest = max(call.head_dim, call.value_dim)
    if widest > _MAX_HEAD_DIM:
        return f"takes head dims up to {_MAX_HEAD_DIM}, not {widest}"
    if call.block_size % _SMALLEST_TILE:
        return f"takes a block_size that is a multiple of {_SMALLEST_TILE}, not {call.block_size}"
    if call.scale <= 0:
        return f"takes positive scales, not {call.scale}"
    for mask in call.mask.distinct_heads(call.num_heads):
        if not mask.has_row_intervals:
            return f"needs masks that allow each query one interval of keys, not {mask!r}"
    return None
