"""Devices that aren't there, to compile for, found by their names.

topology.py     what every topology answers
tpu.py          slices of TPUs, compiled for by libtpu: v5p:2x2x1
gpu.py          hosts of NVIDIA GPUs, compiled for by JAX's GPU plugin: h100:8, h200:4x8
"""

from __future__ import annotations

from trainer.compile.topology.gpu import GPU_MODELS, GpuHosts
from trainer.compile.topology.topology import DeviceMemory, Topology
from trainer.compile.topology.tpu import GENERATIONS, TpuSlice
from trainer.config.suggestions import did_you_mean
from trainer.errors import UserMistake

__all__ = ["DeviceMemory", "Topology", "documented_memory", "parse_topology"]


def parse_topology(name: str) -> Topology:
    """Reads a topology's name.

    Args:
      name: a TPU generation and the shape of a slice in chips, or an NVIDIA GPU and the number on one host, or of hosts
        and on each.

    Raises:
      UserMistake: there are no such devices, or they don't come in this shape.

    >>> parse_topology("v5p:2x2x1").platform, parse_topology("h200:4x8").platform
    ('tpu', 'gpu')
    """
    topology = TpuSlice.parse(name) or GpuHosts.parse(name)
    if topology is None:
        slices = [example for generation in GENERATIONS for example in generation.examples]
        hosts = [example for model in GPU_MODELS for example in model.examples]
        raise UserMistake(
            f"unknown topology {name!r}; expected a TPU generation and the shape of a slice in chips, such as "
            f"{', '.join(slices)}, or an NVIDIA GPU and how many there are on one host, or hosts × GPUs on each, such "
            f"as {', '.join(hosts)}{did_you_mean(name, [*slices, *hosts])}"
        )
    return topology


def documented_memory(device_kind: str) -> DeviceMemory | None:
    """The memory that a program may take on a device that can't be asked; None: the kind isn't known.

    Args:
      device_kind: as JAX names the device.
    """
    for known in (*GENERATIONS, *GPU_MODELS):
        if known.device_kind == device_kind:
            return known.memory()
    return None
