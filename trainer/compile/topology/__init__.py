"""Devices that aren't there, to compile for.

topology.py     what every topology answers
tpu.py          slices of TPUs, compiled for by libtpu: v5p:2x2x1
gpu.py          hosts of NVIDIA GPUs, compiled for by JAX's GPU plugin: h100:8, h200:4x8
names.py        finds a topology by its name, and a device's memory by its kind
"""

from trainer.compile.topology.names import documented_memory, parse_topology
from trainer.compile.topology.topology import DeviceMemory, Topology

__all__ = ["DeviceMemory", "Topology", "documented_memory", "parse_topology"]
