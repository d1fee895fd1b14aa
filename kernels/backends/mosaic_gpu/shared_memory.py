"""The shared memory that a call's kernels take, counted from what they allocate."""

from __future__ import annotations

from typing import Any

from kernels.backends.mosaic_gpu.forward_pass import forward_scratch
from kernels.backends.mosaic_gpu.key_value_memory import key_value_scratch
from kernels.backends.mosaic_gpu.query_pass import query_scratch
from kernels.backends.mosaic_gpu.tuning import MosaicGpuTuning
from kernels.backends.mosaic_gpu.wide_key_value_pass import wide_key_value_scratch
from kernels.call import AttentionCall
from kernels.hopper.machine import Hopper
from kernels.hopper.memory import num_bytes

MAX_BYTES = 227 * 1024
"""Of a program on a Hopper GPU."""


def shared_memory_bytes(call: AttentionCall, tuning: MosaicGpuTuning) -> dict[str, int]:
    """Shared memory of one program of each kernel that a tuning with nothing left open runs: forward, dK and dV, dQ."""
    forward, backward, machine = tuning.forward_tiles, tuning.backward_tiles, Hopper()
    assert forward is not None
    assert backward is not None
    fused = tuning.backward == "fused"
    scratch: dict[str, tuple[Any, Any]] = {"forward": forward_scratch(call, forward, machine)}
    if backward.one_gradient_per_warpgroup:
        scratch["key_value"] = wide_key_value_scratch(call, backward, machine)
    else:
        scratch["key_value"] = key_value_scratch(call, backward, machine, fused=fused)
    if not fused:
        scratch["query"] = query_scratch(call, backward, machine)
    return {kernel: num_bytes(each) for kernel, each in scratch.items()}


_SETTINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "forward": ("forward_tiles", ("num_stages", "block_kv", "num_warpgroups")),
    "key_value": ("backward_tiles", ("num_stages", "block_q", "num_warpgroups")),
    "query": ("backward_tiles", ("num_stages_dq", "block_kv_dq", "num_warpgroups")),
}
"""Kernel → field of the tuning, and the settings that its shared memory grows with."""


def shared_memory_excess(call: AttentionCall, tuning: MosaicGpuTuning) -> str | None:
    """Why a tuning with nothing left open doesn't fit into shared memory, or None if it does."""
    for kernel, size in shared_memory_bytes(call, tuning).items():
        if size > MAX_BYTES:
            field, names = _SETTINGS[kernel]
            tiles = getattr(tuning, field)
            settings = ", ".join(f"{name}={getattr(tiles, name)}" for name in names)
            return (
                f"{field} of {settings} at head dim {max(call.head_dim, call.value_dim)} need {size:,} bytes of shared "
                f"memory, of which a Hopper GPU has {MAX_BYTES:,}; lower {' or '.join(names)}"
            )
    return None
