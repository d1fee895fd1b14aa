"""Which GPUs can write to each other's memory, for kernels that do so.

XLA tells a kernel where the other GPU's arrays lie if both are of one process. It starts the kernel on both at once, so
that what is written to is free. The kernels' programs wait for those of the other GPU. So all of them must run at the
same time, one on each multiprocessor, and no kernel may be in their way that waits for the other GPU as well.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from kernels.context import manual_axes

_HOPPER = 9.0
_OLDEST_JAX = (0, 11)
_OVERLAPPING_FLAG = r"--xla_gpu_enable_latency_hiding_scheduler(?!=(?:false|0))"
# Of the kernels' tiles.
_TOKENS, _FEATURES = 128, 64


def unsupported_reason(
    mesh: Mesh | AbstractMesh,
    axis: str,
    part: tuple[int, ...],
    features: Sequence[int],
    dtype: jax.typing.DTypeLike,
) -> str | None:
    """Why the kernels can't send such tokens between the ranks of an axis, or None if they can.

    Args:
      mesh: all of the devices.
      axis: whose ranks hold different tokens, and different features.
      part: shape of one rank's tokens, `[B, t, W]`.
      features: of one rank, for each matrix.
      dtype: of the operands.
    """
    if mesh.size != 2 or mesh.shape[axis] != 2:
        return f"is for meshes of two devices, both of them along {axis}, not for {dict(mesh.shape)}"
    if isinstance(mesh, AbstractMesh):
        return "is for GPUs that are known, not for an abstract mesh"
    devices = mesh.devices.ravel()
    if (capability := getattr(devices[0], "compute_capability", None)) is None or float(capability) != _HOPPER:
        return f"is for Hopper GPUs (compute capability {_HOPPER}), not for {capability} ({devices[0].device_kind})"
    if jax.__version_info__ < _OLDEST_JAX:
        return f"needs JAX {'.'.join(map(str, _OLDEST_JAX))} or later, not {jax.__version__}"
    if mapped := manual_axes():
        # Mosaic would be given a mesh without device ids there (JAX 0.11.2).
        return f"is for calls without a jax.shard_map around them, not for one that maps {', '.join(sorted(mapped))}"
    if re.search(_OVERLAPPING_FLAG, os.environ.get("XLA_FLAGS", "")):
        return "waits for the other GPU, as collectives do that XLA's latency-hiding scheduler would start beside it"
    if len({device.process_index for device in devices}) > 1:
        return "is for GPUs of one process, which can reach each other's memory"
    if (ids := [device.id for device in devices]) != [0, 1]:
        return f"is for the process's first two GPUs in their order, not for {ids}"
    if jnp.dtype(dtype) not in map(jnp.dtype, (jnp.bfloat16, jnp.float16)):
        return f"takes bfloat16 and float16, not {jnp.dtype(dtype)}"
    _, length, width = part
    if length % _TOKENS:
        return f"takes a GPU's tokens in multiples of {_TOKENS}, not {length}"
    for size in (width, *features):
        if size % _FEATURES:
            return f"takes a GPU's features in multiples of {_FEATURES}, not {size}"
    return None
