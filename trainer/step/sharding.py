"""The device mesh, and which dim of which parameter lies on which of its axes.

"Axis" means an axis of the mesh, "dim" a dimension of an array. Parameters are partitioned by one literal
table over their paths; the optimizer's moments end in the same paths, so the same table serves them. XLA's
partitioner (GSPMD, arXiv:2105.04663) derives every other array's sharding from these.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from layers.remat import HOST_MEMORY
from trainer.config import MeshConfig
from trainer.errors import TrainingFailed, UserMistake
from trainer.step.device_layout import lay_out

_PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # in GiB, whatever its name says
# The rest is for the process itself, the page cache of its data and files, and the system.
_PINNED_SHARE = 0.8

AXES = ("data", "fsdp", "tensor", "context")
BATCH_AXES = ("data", "fsdp")
TOKEN_AXES = ("data", "fsdp", "context")
"""The axes over which devices hold different tokens, so that gradients are summed over them."""
STATE_AXES = ("fsdp", "context")
"""The axes that a matrix and its moments are split over together, along one dim: no two devices of them keep the same
shard, whatever they do with the tokens."""

# The rule whose pattern matches the end of a path names the mesh axes of each dim. Block parameters are stacked over
# layers: the scan over layers goes along their leading dim, which is never split. Attention kernels are
# [layers, width, heads, head_dim] and, for the output, [layers, heads, head_dim, width]. Experts' kernels are
# [layers, experts, in, out] and lie as the MLP's do. A router's is small, and it computes in float32: whole everywhere,
# it is gathered in no other dtype. An adapter's A and B lie as its kernel's inputs and outputs do, their rank whole.
PARTITION_RULES: tuple[tuple[str, P], ...] = (
    (r"embedding\.embedding", P("tensor", STATE_AXES)),
    (r"head\.kernel", P(STATE_AXES, "tensor")),
    (r"final_norm\.scale", P(None)),
    (r"blocks\.\d+\.attention\.(query|key|value)\.kernel", P(None, STATE_AXES, "tensor", None)),
    (r"blocks\.\d+\.attention\.(query|key|value)\.bias", P(None, "tensor", None)),
    (r"blocks\.\d+\.attention\.(query|key|value)\.lora\.b", P(None, None, "tensor", None)),
    (r"blocks\.\d+\.attention\.output\.kernel", P(None, "tensor", None, STATE_AXES)),
    (r"blocks\.\d+\.attention\.output\.lora\.a", P(None, "tensor", None, None)),
    (r"blocks\.\d+\.attention\.output\.bias", P(None, None)),
    (r"blocks\.\d+\.attention\.(query_norm|key_norm)\.scale", P(None, None)),
    (r"blocks\.\d+\.attention\.sinks", P(None, "tensor")),
    (r"blocks\.\d+\.(attention|mlp)_(post_)?norm\.scale", P(None, None)),
    (r"blocks\.\d+\.mlp\.(up|gate)\.kernel", P(None, STATE_AXES, "tensor")),
    (r"blocks\.\d+\.mlp\.(up|gate)\.bias", P(None, "tensor")),
    (r"blocks\.\d+\.mlp\.(up|gate)\.lora\.b", P(None, None, "tensor")),
    (r"blocks\.\d+\.mlp\.down\.kernel", P(None, "tensor", STATE_AXES)),
    (r"blocks\.\d+\.mlp\.down\.bias", P(None, None)),
    (r"blocks\.\d+\.mlp\.down\.lora\.a", P(None, "tensor", None)),
    (r"blocks\.\d+\.mlp\.router\.kernel", P(None, None, None)),
    (r"blocks\.\d+\.mlp\.router\.bias", P(None, None)),
    (r"blocks\.\d+\.mlp\.experts\.(up|gate)\.kernel", P(None, None, STATE_AXES, "tensor")),
    (r"blocks\.\d+\.mlp\.experts\.(up|gate)\.bias", P(None, None, "tensor")),
    (r"blocks\.\d+\.mlp\.experts\.down\.kernel", P(None, None, "tensor", STATE_AXES)),
    (r"blocks\.\d+\.mlp\.experts\.down\.bias", P(None, None, None)),
    (r"blocks\.\d+\.mlp\.experts\.(up|gate)\.lora\.a", P(None, None, STATE_AXES, None)),
    (r"blocks\.\d+\.mlp\.experts\.(up|gate)\.lora\.b", P(None, None, None, "tensor")),
    (r"blocks\.\d+\.mlp\.experts\.down\.lora\.a", P(None, None, "tensor", None)),
    (r"blocks\.\d+\.mlp\.experts\.down\.lora\.b", P(None, None, None, STATE_AXES)),
    (r"blocks\.\d+\.(attention|mlp)\.\w+\.lora\.a", P(None, STATE_AXES, None)),
    (r"blocks\.\d+\.(attention|mlp)\.\w+\.lora\.b", P(None, None, STATE_AXES)),
)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of axes data, fsdp, tensor and context.

    Args:
      config: the size of each axis.
      devices: exactly the devices to use. None: the first of `jax.devices()`, as many as the mesh needs;
        where several processes train together, all of them.

    Raises:
      UserMistake: the product of the sizes doesn't fit the devices.
      TrainingFailed: the devices can't be started.

    >>> make_mesh(MeshConfig()).axis_names
    ('data', 'fsdp', 'tensor', 'context')
    """
    sizes = asdict(config)
    needed = math.prod(sizes.values())
    available = list(_start_devices() if devices is None else devices)
    may_leave_some = devices is None and jax.process_count() == 1
    product = " × ".join(f"{name}={size}" for name, size in sizes.items())
    if needed > len(available) or (needed < len(available) and not may_leave_some):
        raise UserMistake(
            f"the mesh {product} needs {needed} device(s), got {len(available)} ({available[0].platform}); "
            f"set the sizes under mesh so that their product is {len(available)}"
        )
    axis_types = (AxisType.Auto,) * len(AXES)
    try:
        return Mesh(lay_out(available[:needed], [sizes[axis] for axis in AXES]), AXES, axis_types=axis_types)
    except (AssertionError, NotImplementedError, ValueError) as error:  # as JAX refuses what a TPU's wiring can't hold
        raise UserMistake(
            f"the mesh {product} needs {needed} devices, and {needed} × {available[0].device_kind} don't form a block "
            "that it can be laid out on; set the sizes under mesh so that their product is a power of two"
        ) from error


def bytes_per_device(abstract: Any, *, on_host: bool = False) -> int:
    """Bytes for each device of a tree of `jax.ShapeDtypeStruct`s with shardings.

    Args:
      abstract: the tree.
      on_host: count what lies in the host's memory instead of what lies on the device.
    """
    leaves = [leaf for leaf in jax.tree.leaves(abstract) if is_on_host(leaf.sharding) == on_host]
    return sum(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)


def _start_devices() -> list[jax.Device]:
    limit_pinned_memory()
    try:
        return jax.devices()
    except RuntimeError as error:
        raise TrainingFailed(
            f"JAX can't start its devices: {error}; mend the driver or JAX's plugin for it, "
            "or choose another platform with JAX_PLATFORMS (JAX_PLATFORMS=cpu always works)"
        ) from error


def limit_pinned_memory(nvidia_gpus: Path = Path("/proc/driver/nvidia/gpus")) -> None:
    """Shares most of the host's memory out to its GPUs evenly, unless the environment has a limit already.

    Call it before JAX starts its devices. XLA's own limit is 64 GiB for each GPU. Up to the limit its pool grows by
    regions of 1, 2, 4, … GiB: without one, two GPUs that offload 97 GiB each pin 128 GiB each, and a host of 251 GiB
    kills the run.

    Args:
      nvidia_gpus: the driver's folder with an entry for each GPU of the host.
    """
    num_gpus = len(list(nvidia_gpus.iterdir())) if nvidia_gpus.is_dir() else 0
    if num_gpus:
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        os.environ.setdefault(_PINNED_LIMIT, str(max(1, int(_PINNED_SHARE * host_bytes / num_gpus) // 2**30)))


def path_name(path: Sequence[Any]) -> str:
    """A pytree path as the rules see it: `params.blocks.0.mlp.up.kernel`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".")


def partition_spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The partition of one array, found by the end of its path.

    Args:
      name: its path, dotted: a parameter's own, or one that ends in a parameter's (an optimizer moment).
      shape: its global shape. A scalar is replicated, whatever its name.
      mesh: supplies the axis sizes.

    Raises:
      ValueError: no rule matches, the rule is for another rank, or an axis doesn't divide its dim.
    """
    if not shape:
        return P()
    matching = [(pattern, spec) for pattern, spec in PARTITION_RULES if re.search(rf"(?:^|\.){pattern}$", name)]
    if not matching:
        raise ValueError(
            f"no partition rule matches the parameter {name!r} of shape {shape}; "
            "add one to PARTITION_RULES in trainer/step/sharding.py"
        )
    pattern, spec = matching[0]
    if len(spec) != len(shape):
        raise ValueError(
            f"the partition rule {pattern!r} is for {len(spec)} dims, but {name!r} has shape {shape}; "
            "correct the rule in trainer/step/sharding.py"
        )
    for dim, (length, entry) in enumerate(zip(shape, spec, strict=True)):
        axes = axes_of(entry)
        if length % (size := math.prod(mesh.shape[axis] for axis in axes)):
            product = " × ".join(f"mesh.{axis}" for axis in axes)
            raise ValueError(
                f"dim {dim} of {name!r} has length {length}, which {product} = {size} does not divide; "
                f"make it {-(-length // size) * size}, or {product} a divisor of {length}"
            )
    return spec


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that one entry of a PartitionSpec names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def parameter_shardings(tree: Any, mesh: Mesh) -> Any:
    """A NamedSharding for every array of a tree of parameters, or of a whole training state.

    Args:
      tree: arrays or `jax.ShapeDtypeStruct`s; every leaf that isn't a scalar has a path that ends in a
        parameter's.
      mesh: from `make_mesh`.

    Returns:
      The tree with a sharding in each leaf's place.

    Raises:
      ValueError: as `partition_spec`.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, partition_spec(path_name(path), leaf.shape, mesh)), tree
    )


def is_on_host(sharding: Sharding) -> bool:
    """True if arrays of a sharding lie in the host's memory."""
    return sharding.memory_kind == HOST_MEMORY


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays [batch, sequence]: sequences over data and fsdp, tokens over context."""
    return NamedSharding(mesh, P(BATCH_AXES, "context"))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that is whole on every device."""
    return NamedSharding(mesh, P())


def on_one_device(tree: Any, mesh: Mesh) -> Any:
    """Gathers arrays on every device of the mesh, and returns one device's copies, not bound to the other devices.

    Args:
      tree: arrays on the mesh.
      mesh: from `make_mesh`.
    """
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), jax.device_put(tree, replicated(mesh)))
