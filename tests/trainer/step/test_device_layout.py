"""Meshes are laid out on the wires of TPUs and on hosts of GPUs, whatever their shape."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from trainer.compile.topology import parse_topology
from trainer.step.device_layout import lay_out

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: the `tpu` extra, on Linux x86-64"
)


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    slice_index: int | None = None
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"


def test_the_last_axes_lie_within_a_host(rng):
    devices = [Device(8 * host + gpu, process_index=host) for host, gpu in product(range(4), range(8))]
    rng.shuffle(devices)
    mesh = lay_out(devices, (2, 2, 2, 4))
    hosts = np.vectorize(lambda device: device.process_index)(mesh)
    assert (hosts == hosts[..., :1, :1]).all()
    assert len(set(hosts[..., 0, 0].flat)) == 4
    assert {device.id for device in mesh.flat} == set(range(32))


def test_one_process_for_each_gpu_leaves_hosts_together(rng):
    # Ranks that alternate between two hosts.
    devices = [Device(rank, process_index=rank, slice_index=rank % 2) for rank in range(8)]
    rng.shuffle(devices)
    hosts = np.vectorize(lambda device: device.slice_index)(lay_out(devices, (2, 1, 1, 4)))
    assert hosts.tolist() == [[[[0, 0, 0, 0]]], [[[1, 1, 1, 1]]]]


SCRIPT = """
import itertools, math, sys
from jax.experimental import topologies
from trainer.step.device_layout import lay_out

name, num_slices = sys.argv[1], int(sys.argv[2])
options = {"num_slices": num_slices} if num_slices > 1 else {}
devices = sorted(topologies.get_topology_desc(name, "tpu", **options).devices, key=lambda device: device.id)
num = len(devices)
for shape in itertools.product([2**i for i in range(num.bit_length())], repeat=4):
    if math.prod(shape) == num:
        mesh = lay_out(devices, shape)
        assert mesh.shape == shape and {device.id for device in mesh.flat} == {device.id for device in devices}, shape
        within = mesh.reshape(num_slices, -1) if shape[0] % num_slices == 0 else mesh.reshape(1, -1)
        slices = [{getattr(device, "slice_index", 0) or 0 for device in block} for block in within]
        assert len(slices) == 1 or all(len(block) == 1 for block in slices), (shape, slices)
        print(*shape)
for shape in sys.argv[3:]:
    try:
        lay_out(devices, tuple(map(int, shape.split("x"))))
    except (AssertionError, ValueError) as error:
        print("refused", error)
"""


def lay_out_all(name: str, num_slices: int, *refused: str) -> list[str]:
    """Every shape of powers of two, laid out on a topology that isn't there."""
    environment = os.environ | parse_topology(name).environment() | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", SCRIPT, name, str(num_slices), *refused]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_libtpu
@pytest.mark.parametrize("name", ["v6e:16x16", "v5p:4x4x4"])
def test_a_slice_of_tpus_holds_every_mesh_of_its_size(name):
    shapes = lay_out_all(name, 1)
    num = parse_topology(name).num_chips
    exponent = num.bit_length() - 1
    assert len(shapes) == (exponent + 1) * (exponent + 2) * (exponent + 3) // 6
    if name == "v6e:16x16":  # what JAX refuses unless it may split an axis of the torus
        assert {"1 64 1 4", "1 32 1 8", "1 128 1 2"} <= set(shapes)


@needs_libtpu
def test_slices_lie_along_the_axes_that_talk_least():
    *shapes, refusal = lay_out_all("v5e:2x2", 2, "1x1x3x3")
    assert len(shapes) == 20
    assert refusal == "refused 2 slices can't be shared out over the axes of (1, 1, 3, 3)"
