"""The calls that the splash kernel refuses."""

from __future__ import annotations

import jax.numpy as jnp

from kernels.backends.splash.tuning import LARGEST, SplashTuning, grid_excess
from kernels.call import AttentionCall


def unsupported_reason(call: AttentionCall, tuning: SplashTuning | None = None) -> str | None:
    """Why the splash kernel can't serve the call, or None if it can."""
    if call.dtype not in (jnp.bfloat16, jnp.float32):
        return f"takes bfloat16 and float32, not {call.dtype}"
    if call.has_positions and call.mask.needs_lookup:
        return f"can't look {call.mask!r} up at positions that are known on the device only"
    if call.bounds and call.mask.needs_lookup:
        return f"can't look {call.mask!r} up beside bounds"
    return grid_excess(call, tuning or LARGEST)
