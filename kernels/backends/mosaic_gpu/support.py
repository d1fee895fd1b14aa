"""The calls that the Mosaic GPU kernels refuse."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.backends.mosaic_gpu.tuning import MAX_EQUAL_HEAD_DIM, MosaicGpuTuning
from kernels.call import AttentionCall

_HOPPER = 9.0
_OLDEST_JAX = (0, 11)
_MAX_HEAD_DIM = 256
# Up to a head dim of 192 beside 128, one warpgroup's registers hold both gradients of 64 keys.
_MAX_HEAD_DIM_BESIDE_128 = 192
_MAX_PERSISTENT_HEAD_DIM = 128


def unsupported_reason(call: AttentionCall, tuning: MosaicGpuTuning | None = None) -> str | None:
    """Why the kernels can't serve the call, or None if they can."""
    if jax.__version_info__ < _OLDEST_JAX:
        return f"needs JAX {'.'.join(map(str, _OLDEST_JAX))} or later, not {jax.__version__}"
    interpreted = tuning is not None and tuning.interpret
    capability = call.target.compute_capability
    if not interpreted and capability != _HOPPER:
        return f"is for Hopper GPUs (compute capability {_HOPPER}), not for {capability} ({call.target.device_kind})"
    widest = max(call.head_dim, call.value_dim)
    if call.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, not {call.dtype}"
    if widest > _MAX_HEAD_DIM:
        return f"takes head dims up to {_MAX_HEAD_DIM}, not {widest}"
    if tuning is not None and (reason := _unsuited(tuning, call)) is not None:
        return reason
    if call.mask.needs_lookup:
        return f"evaluates masks in the kernel, which can't look up the arrays that {call.mask!r} holds"
    if call.scale <= 0:
        return f"takes positive scales, not {call.scale}"
    if interpreted or (tuning is None and not call.bounds):
        return None
    from kernels.backends.mosaic_gpu.shared_memory import shared_memory_excess

    return shared_memory_excess(call, tuning)


def _unsuited(tuning: MosaicGpuTuning, call: AttentionCall) -> str | None:
    """Why a tuning isn't one for heads so wide, or None if it is."""
    narrowest, widest = sorted((call.head_dim, call.value_dim))
    holds_both = narrowest <= MAX_EQUAL_HEAD_DIM and widest <= _MAX_HEAD_DIM_BESIDE_128
    up_to = f"head dims up to {MAX_EQUAL_HEAD_DIM}, or {_MAX_HEAD_DIM_BESIDE_128} beside {MAX_EQUAL_HEAD_DIM}"
    got = f"{call.head_dim}" if narrowest == widest else f"{call.head_dim} and {call.value_dim}"
    if tuning.backward == "fused" and not holds_both:
        return f"has a fused backward for {up_to}, not {got}; use backward='split'"
    tiles = tuning.backward_tiles
    if tiles is not None and not tiles.one_gradient_per_warpgroup:
        if not holds_both:
            return f"takes backward_tiles without one_gradient_per_warpgroup for {up_to}, not {got}"
        shape = (tiles.num_warpgroups, tiles.block_q)
        if widest > MAX_EQUAL_HEAD_DIM and shape != (2, 64):
            return (
                "takes backward_tiles of (num_warpgroups, block_q) = (2, 64) or with one_gradient_per_warpgroup above "
                f"a head dim of {MAX_EQUAL_HEAD_DIM}, not {shape}"
            )
        if widest > MAX_EQUAL_HEAD_DIM and tiles.persistent:
            return f"takes persistent backward_tiles for head dims up to {MAX_EQUAL_HEAD_DIM}, not {widest}"
    forward_tiles = tuning.forward_tiles
    if forward_tiles is not None and widest > _MAX_PERSISTENT_HEAD_DIM and forward_tiles.persistent:
        return f"takes persistent forward_tiles for head dims up to {_MAX_PERSISTENT_HEAD_DIM}, not {widest}"
    return None
