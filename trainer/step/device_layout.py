"""Which device takes which place of the mesh, so that the axes that talk most lie on the fastest wires.

The mesh's axes stand in the order of what they send: those of the batch first, which talk once or twice a step, and
last those that talk within a layer. So the last axes are laid out within a host, or along a TPU's own links, as far as
they fit there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils


def lay_out(devices: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """Places devices on a mesh.

    Args:
      devices: as many as the shape holds; a topology's count as well.
      shape: the size of each axis, the axis that talks least first.

    Returns:
      The devices, as an array of that shape. TPUs are laid out on the wires of their slice, several slices along the
      first axes that they divide. All others stand in the order of their hosts.

    Raises:
      ValueError: a TPU's wires hold no such mesh: the devices form no block, or the slices divide no axes.

    Source: `jax.experimental.mesh_utils`, which refuses an axis of 4 on a torus of 16×16 unless it may split a
    physical axis between two of the mesh, and several slices or GPU hosts in `jax.make_mesh`.
    """
    if devices[0].platform != "tpu":
        return np.asarray(sorted(devices, key=_host_order)).reshape(shape)
    devices_of = Counter(getattr(device, "slice_index", None) or 0 for device in devices)
    outer = _share_out(len(devices_of), shape)
    inner = [size // along_slices for size, along_slices in zip(shape, outer, strict=True)]
    if len(devices_of) == 1:
        return _lay_out_slice(devices, inner)
    if len(set(devices_of.values())) > 1:
        raise ValueError(f"the slices have different numbers of devices: {sorted(devices_of.values())}")
    blocks = np.empty(outer, dtype=object)
    for place, index in zip(np.ndindex(*outer), sorted(devices_of), strict=True):
        blocks[place] = _lay_out_slice([device for device in devices if device.slice_index == index], inner)
    return np.block(blocks.tolist())


def _host_order(device: Any) -> tuple[int, int, int]:
    """JAX numbers GPU hosts as slices; several processes may share a host."""
    return getattr(device, "slice_index", None) or 0, device.process_index, device.id


def _share_out(num_slices: int, shape: Sequence[int]) -> tuple[int, ...]:
    """How many of the slices lie along each axis: the first axes take as many as divide them."""
    along, left = [], num_slices
    for size in shape:
        along.append(math.gcd(size, left))
        left //= along[-1]
    if left > 1:
        raise ValueError(f"{num_slices} slices can't be shared out over the axes of {tuple(shape)}")
    return tuple(along)


def _lay_out_slice(devices: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """One slice: an axis of the mesh on whole axes of the torus where that is possible, which is fastest."""
    try:
        return mesh_utils.create_device_mesh(shape, devices)
    except NotImplementedError:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
