"""Which GPUs can reach each other's memory, for kernels that read or write there.

XLA tells a kernel where the other GPUs' arrays lie if all are of one process. It starts the kernel on all at once, so
that what is read has been written, and what is written to is free. The kernels' programs wait for those of the other
GPUs. So no kernel may be in their way that waits for other GPUs as well.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping

import jax
from jax.sharding import AbstractMesh, Mesh

from kernels.tracing.mesh_axes import manual_axes

MOST_RANKS = 4
"""GPUs that the kernels serve. Two and four have run them; the buffers of chunks have no room for more."""
_HOPPER = 9.0
_OLDEST_JAX = (0, 11)
_OVERLAPPING_FLAG = r"--xla_gpu_enable_latency_hiding_scheduler(?!=(?:false|0))"


def sizes_unsupported_reason(sizes: Mapping[str, int], axis: str) -> str | None:
    """Why no devices of a mesh of these sizes can reach each other's memory along an axis, or None if some can.

    Args:
      sizes: of the mesh.
      axis: that the kernels' ranks lie along.
    """
    num_devices = math.prod(sizes.values())
    if not 2 <= num_devices <= MOST_RANKS or sizes[axis] != num_devices:
        return f"is for meshes of 2 to {MOST_RANKS} devices, all of them along {axis}, not for {dict(sizes)}"
    return None


def unsupported_reason(mesh: Mesh | AbstractMesh, axis: str) -> str | None:
    """Why the ranks of an axis can't reach each other's memory, or None if they can.

    Args:
      mesh: all of the devices.
      axis: that the kernels' ranks lie along.
    """
    if (reason := sizes_unsupported_reason(mesh.shape, axis)) is not None:
        return reason
    if isinstance(mesh, AbstractMesh):
        return "is for GPUs that are known, not for an abstract mesh"
    devices = mesh.devices.ravel()
    if (capability := getattr(devices[0], "compute_capability", None)) is None or float(capability) != _HOPPER:
        return f"is for Hopper GPUs (compute capability {_HOPPER}), not for {capability} ({devices[0].device_kind})"
    if jax.__version_info__ < _OLDEST_JAX:
        return f"needs JAX {'.'.join(map(str, _OLDEST_JAX))} or later, not {jax.__version__}"
    if (mapped := manual_axes()) and mapped != set(mesh.shape):
        # A nested map would be lowered for a mesh without device ids (JAX 0.11.2).
        return f"is for calls within a jax.shard_map of all axes, or of none, not of {', '.join(sorted(mapped))}"
    if re.search(_OVERLAPPING_FLAG, os.environ.get("XLA_FLAGS", "")):
        return "waits for other GPUs, as collectives do that XLA's latency-hiding scheduler would start beside it"
    if len({device.process_index for device in devices}) > 1:
        return "is for GPUs of one process, which can reach each other's memory"
    if (ids := [device.id for device in devices]) != [*range(len(devices))]:
        return f"is for the process's first {len(devices)} GPUs in their order, not for {ids}"
    return None
