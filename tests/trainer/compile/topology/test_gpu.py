"""Hosts of GPUs by name: the refusals, what there is of memory, and what XLA's plugin makes of our descriptions."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental import topologies

from tests.gpu_compiler import needs_gpu_compiler
from trainer.compile.topology import documented_memory, parse_topology
from trainer.compile.topology.gpu import GPU_MODELS
from trainer.errors import UserMistake
from trainer.step.flops import PEAK_BF16_FLOPS

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "hosts"),
    [("h100:8", (1, 8)), ("h200:1", (1, 1)), ("h200:4x8", (4, 8)), ("h100:16x2", (16, 2))],
)
def test_a_name_says_how_many_hosts_of_how_many_gpus(name, hosts):
    topology = parse_topology(name)
    assert (topology.platform, topology.num_hosts, topology.gpus_per_host) == ("gpu", *hosts)
    assert topology.name == name


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("h100:16", r"'h100:16': a host has at most 8 GPUs, got 16; .*: h100:2x8$"),
        ("h200:3x12", r"'h200:3x12': a host has at most 8 GPUs, got 12; .*: h200:5x8$"),
        ("h100:0x8", r"unknown topology 'h100:0x8'; .*or an NVIDIA GPU and how many .* such as h100:8, h100:4x8, h2"),
        ("h100:2x2x2", r"unknown topology 'h100:2x2x2'"),
        ("h100", r"unknown topology 'h100'.*; did you mean h100:8\?$"),
        ("H200:8", r"; did you mean h200:8\?$"),
    ],
)
def test_a_wrong_name_is_told_with_those_that_exist(name, told):
    with pytest.raises(UserMistake, match=told) as caught:
        parse_topology(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [NotImplementedError, jax.errors.JaxRuntimeError])
def test_a_jax_that_cannot_is_one_line(error, monkeypatch):
    def refuse(*_, **options):
        assert options["topology"] == "2x1x4"
        raise error("topology not implemented for cuda\nand a stack")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    told = (
        rf"^topology 'h100:2x4': JAX {re.escape(jax.__version__)} can't compile for .*\(topology not impl[^\n]*\); "
        rf"install it with: pip install jax-cuda13-plugin=={importlib.metadata.version('jaxlib')} nvidia-cuda-nvcc"
    )
    with pytest.raises(UserMistake, match=told) as caught:
        parse_topology("h100:2x4").devices()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", GPU_MODELS, ids=lambda model: model.name)
def test_memory_is_the_share_that_jax_would_take(model, monkeypatch):
    for variable in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(variable, raising=False)
    memory = documented_memory(model.device_kind)
    assert memory.size == round(0.75 * model.memory_gib * GIB)
    default = "JAX's default share; XLA_PYTHON_CLIENT_MEM_FRACTION sets another"
    assert memory.source == f"0.75 of {model.memory_gib} GiB, {default}"
    for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(variable, "0.9")
        memory = documented_memory(model.device_kind)
        assert memory.size == round(0.9 * model.memory_gib * GIB)
        assert memory.source.endswith(f"the share that {variable} sets")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "most")
    with pytest.raises(UserMistake, match=r"XLA_PYTHON_CLIENT_MEM_FRACTION='most' is not a number; expected a share"):
        documented_memory(model.device_kind)
    assert any(re.fullmatch(pattern, model.device_kind) for pattern, _ in PEAK_BF16_FLOPS)


def test_the_memory_of_another_gpu_is_unknown():
    assert documented_memory("NVIDIA X") is None


SCRIPT = """
import sys
from kernels import Target
from trainer.compile.topology import parse_topology
from trainer.step.device_layout import lay_out
for name in sys.argv[1:]:
    devices = parse_topology(name).devices()
    target = Target.of(devices[-1])
    mesh = lay_out(devices[::-1], (1, 2, 1, len(devices) // 2))
    hosts = [sorted({device.process_index for device in row}) for row in mesh[0, :, 0]]
    print(len(devices), target.platform, target.device_kind, target.compute_capability, hosts, sep="|")
"""


@needs_gpu_compiler
def test_xla_takes_our_descriptions_and_keeps_hosts_together():
    environment = os.environ | parse_topology("h100:8").environment() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, "h100:8", "h200:2x4"]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[4], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "8|gpu|NVIDIA H100 80GB HBM3|9.0|[[0], [0]]",
        "8|gpu|NVIDIA H200|9.0|[[0], [1]]",
    ]
