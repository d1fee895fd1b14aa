"""A pretrained model's parameters in shards; tests/round_trips holds those of eight devices to every bit."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from layers.pretrained import config_from_huggingface, load, read_params
from layers.pretrained.table import parameter_shapes
from tests.layers.pretrained.golden import unpack


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
