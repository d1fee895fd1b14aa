"""Eight devices hold a pretrained model's parameters in shards, and give every byte of it back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from layers.pretrained import config_from_huggingface, load, read_params
from layers.pretrained.table import parameter_shapes
from tests.host_cpus import environment_of_cpus
from tests.layers.pretrained.golden import unpack


def test_eight_devices_give_every_byte_back():
    seed = int(np.random.default_rng().integers(2**31))
    print(f"Inputs: eight_devices.py {seed}")
    program = [sys.executable, Path(__file__).parent / "eight_devices.py", str(seed)]
    finished = subprocess.run(program, env=environment_of_cpus(8), capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout.splitlines()[-1])
    assert len(found["folders"]) == 5
    assert min(folder["compared"] for folder in found["folders"].values()) > 10
    assert {name: folder["differing"] for name, folder in found["folders"].items() if folder["differing"]} == {}
    assert found["logits"] < 1e-5
    assert found["devices"] == [8]


@pytest.mark.parametrize(("case", "dtype"), [("gemma2", "bfloat16"), ("qwen3_moe", "float32")])
def test_a_stack_that_grows_on_its_device_has_the_same_bits(case, dtype, tmp_path, monkeypatch):
    unpack(case, tmp_path)
    config = config_from_huggingface(tmp_path)
    expected = read_params(tmp_path, config, dtype=dtype)
    monkeypatch.setattr(load, "_SMALL_BYTES", 0)
    monkeypatch.setattr(load, "_CHUNK_BYTES", 1)
    params = read_params(tmp_path, config, dtype=dtype)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype}


def test_shardings_of_another_model_are_refused(tmp_path):
    unpack("llama", tmp_path)
    config = config_from_huggingface(tmp_path)
    device = SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda leaf: device, parameter_shapes(config))
    del shardings["head"]
    with pytest.raises(ValueError, match=r"differ in 1 paths, head\.kernel among them"):
        read_params(tmp_path, config, shardings)
