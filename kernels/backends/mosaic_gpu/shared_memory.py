"""The shared memory that a call's kernels take, counted from what they allocate."""

from __future__ import annotations

from typing import Any

from kernels.backends.mosaic_gpu.backward_dkv_by_gradient import dkv_by_gradient_scratch
from kernels.backends.mosaic_gpu.backward_dq import dq_scratch
from kernels.backends.mosaic_gpu.dkv_steps import step_class
from kernels.backends.mosaic_gpu.forward_pass import forward_scratch
from kernels.backends.mosaic_gpu.tuning import MosaicGpuTuning, backward_form, resolve
from kernels.call import AttentionCall
from kernels.hopper.machine import Hopper
from kernels.hopper.memory import num_bytes

MAX_BYTES = 227 * 1024
"""Of a program on a Hopper GPU."""


def shared_memory_bytes(call: AttentionCall, tuning: MosaicGpuTuning) -> dict[str, int]:
    """Shared memory of one program of each kernel whose tiles a tuning gives: forward, dK and dV, dQ."""
    forward, backward, machine = tuning.forward_tiles, tuning.backward_tiles, Hopper()
    scratch: dict[str, tuple[Any, Any]] = {}
    if forward is not None:
        scratch["forward"] = forward_scratch(call, forward, machine)
    if backward is not None:
        fused = backward_form(tuning, call) == "fused"
        if backward.one_gradient_per_warpgroup:
            scratch["key_value"] = dkv_by_gradient_scratch(call, backward, machine)
        else:
            scratch["key_value"] = step_class(call, fused=fused).scratch(call, backward, machine)
        if not fused:
            scratch["query"] = dq_scratch(call, backward, machine)
    return {kernel: num_bytes(each) for kernel, each in scratch.items()}


_SETTINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "forward": ("forward_tiles", ("num_stages", "block_kv", "num_warpgroups")),
    "key_value": ("backward_tiles", ("num_stages", "block_q", "num_warpgroups")),
    "query": ("backward_tiles", ("num_stages_dq", "block_kv_dq", "num_warpgroups")),
}
"""Kernel → field of the tuning, and the settings that its shared memory grows with."""


def shared_memory_excess(call: AttentionCall, given: MosaicGpuTuning | None) -> str | None:
    """Why a program of one of the kernels doesn't fit into shared memory, or None if all do.

    Args:
      call: of the kernels.
      given: the caller's tuning. Tiles that it leaves open always fit, but for several bounds beside wide heads.
    """
    tuning = resolve(given, call) if call.bounds else given
    for kernel, size in {} if tuning is None else shared_memory_bytes(call, tuning).items():
        if size > MAX_BYTES:
            field, names = _SETTINGS[kernel]
            tiles = getattr(tuning, field)
            settings = ", ".join(f"{name}={getattr(tiles, name)}" for name in names)
            reason = (
                f"{field} of {settings} at head dim {max(call.head_dim, call.value_dim)} need {size:,} bytes of shared "
                f"memory, of which a Hopper GPU has {MAX_BYTES:,}"
            )
            if given is None or getattr(given, field) is None:
                return f"has no room for {' and '.join(call.bounds)}, since {reason}"
            return f"{reason}; lower {' or '.join(names)}"
    return None
