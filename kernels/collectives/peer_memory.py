"""Which GPUs can read and write each other's memory, for kernels that do so.

XLA tells a kernel where the other GPU's arrays lie if both are of one process. It starts the kernel on both at once, so
that what is read is complete and what is written to is free.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

_HOPPER = 9.0
_OLDEST_JAX = (0, 11)
# Of the kernels' tiles.
_TOKENS, _FEATURES = 128, 64


def unsupported_reason(
    mesh: Mesh, axis: str, part: tuple[int, ...], features: Sequence[int], dtype: jax.typing.DTypeLike
) -> str | None:
    """Why the kernels can't send such tokens between the ranks of an axis, or None if they can.

    Args:
      mesh: all of the devices.
      axis: whose ranks hold different tokens, and different features.
      part: shape of one rank's tokens, `[B, t, W]`.
      features: of one rank, for each matrix.
      dtype: of the operands.
    """
    if jax.__version_info__ < _OLDEST_JAX:
        return f"needs JAX {'.'.join(map(str, _OLDEST_JAX))} or later, not {jax.__version__}"
    if mesh.size != 2 or mesh.shape[axis] != 2:
        return f"is for meshes of two devices, both of them along {axis}, not for {dict(mesh.shape)}"
    devices = mesh.devices.ravel()
    if (capability := getattr(devices[0], "compute_capability", None)) is None or float(capability) != _HOPPER:
        return f"is for Hopper GPUs (compute capability {_HOPPER}), not for {capability} ({devices[0].device_kind})"
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
