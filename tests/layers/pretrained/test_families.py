"""Models of every family compute what transformers computes, and leave as the bytes that they came as."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from layers.pretrained import config_from_huggingface, read_params, write_huggingface
from layers.pretrained.families import MODULES
from layers.pretrained.folder import open_tensors, read_config
from layers.pretrained.steps import read_whole
from tests.layers.pretrained.golden import CASES, GOLDEN, Expected, compute, unpack


def assert_same(ours: Expected, theirs: Expected) -> None:
    for name in ("logits", "document_logits"):
        scale = np.abs(getattr(theirs, name)).max()
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=0, atol=1e-10 * scale, err_msg=name)
    np.testing.assert_array_equal(ours.greedy, theirs.greedy)


@pytest.mark.sample(8)
@pytest.mark.parametrize("case", CASES)
def test_a_model_computes_what_transformers_computed(case, tmp_path):
    expected = unpack(case, tmp_path)
    with jax.enable_x64(True):
        assert_same(compute(tmp_path, expected.tokens), expected)


def test_every_family_has_a_case(tmp_path):
    # Gemma 3's multimodal folders have a test of their own.
    seen = {"gemma3"}
    for case in CASES:
        unpack(case, tmp_path)
        seen.add(read_config(tmp_path)["model_type"])
    assert seen == set(MODULES)
    assert sum(path.stat().st_size for path in GOLDEN.iterdir()) <= 200_000


@pytest.mark.parametrize("case", CASES)
def test_a_model_leaves_as_the_bytes_that_it_came_as(case, tmp_path, rng):
    (source := tmp_path / "source").mkdir()
    unpack(case, source)
    config, model_type = config_from_huggingface(source), read_config(source)["model_type"]
    # Wider types hold every bit of a narrower one's.
    for dtype in ("bfloat16", "float32"):
        params = read_params(source, config, dtype=dtype)
        write_huggingface(tmp_path / dtype, config, params, dtype="bfloat16", model_type=model_type)
        assert config_from_huggingface(tmp_path / dtype) == config
        with open_tensors(source) as before, open_tensors(tmp_path / dtype) as after:
            assert before.keys() == after.keys()
            for name, tensor in before.items():
                assert (after[name].dtype, after[name].shape) == (tensor.dtype, tensor.shape)
                assert read_whole(after[name]).tobytes() == read_whole(tensor).tobytes(), name
    # And in float32, in files of a few tensors each, with bits that bfloat16 has no place for.
    random = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), params)
    write_huggingface(tmp_path / "random", config, random, model_type=model_type, shard_size=3000)
    again = read_params(tmp_path / "random", config)
    jax.tree.map(np.testing.assert_array_equal, again, random)
