"""A mixture of experts on meshes of eight fake CPU devices is that on one."""

import json
from pathlib import Path

import pytest

from tests.fresh_inputs import run_on_fresh_inputs
from tests.host_cpus import environment_of_cpus

SCRIPT = Path(__file__).parent / "sharded_moe.py"


@pytest.fixture(scope="module")
def report():
    environment = environment_of_cpus(8) | {"JAX_ENABLE_X64": "1"}
    return json.loads(run_on_fresh_inputs(SCRIPT, environment=environment).stdout)


def test_losses_and_gradients_are_those_of_one_device(report):
    sums = report["sums"]
    for name, one in (
        ("fsdp, tensor and context", "one device"),
        ("data, fsdp and tensor, micro-batches", "one device, micro-batches"),
    ):
        assert sums[name] == pytest.approx(sums[one], rel=1e-12)
        assert report["gradients"][name] < 1e-12
    # Loads are counted in each micro-batch, and all else is a plain sum over tokens.
    whole, split = sums["one device"], sums["one device, micro-batches"]
    assert {name for name in whole if whole[name] != pytest.approx(split[name], rel=1e-12)} == {"total", "load_balance"}


def test_a_layer_counts_all_tokens_of_its_mesh(report):
    assert report["layer"] < 1e-9


def test_muon_orthogonalizes_each_expert_wherever_it_lies(report):
    assert report["muon"] < 1e-5
