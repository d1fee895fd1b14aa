"""The comparisons of test_families.py on fresh random models, and exports that transformers loads."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.layers.pretrained.golden import compute
from tests.layers.pretrained.test_families import assert_same

pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from layers.pretrained import config_from_huggingface, load_gpt, read_params, write_huggingface  # noqa: E402
from tests.layers.pretrained.make_golden import make_case  # noqa: E402
from tests.layers.pretrained.reference import (  # noqa: E402
    CASES,
    SIZES,
    float64_everywhere,
    load_reference,
    logits_of,
    save_random_model,
    torch,
)


@pytest.mark.parametrize("case", CASES)
def test_a_fresh_model_computes_what_transformers_computes(case, tmp_path, rng):
    expected = make_case(case, tmp_path / "source", seed=int(rng.integers(2**31)))
    with jax.enable_x64(True):
        assert_same(compute(tmp_path / "source", expected.tokens), expected)


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_what_is_exported(case, tmp_path, rng):
    source = tmp_path / "source"
    save_random_model(case, source, seed=int(rng.integers(2**31)))
    config = config_from_huggingface(source)
    params = read_params(source, config)
    # A run's own length, which mustn't change what is computed.
    write_huggingface(tmp_path / "export", config, params, dtype="bfloat16", context_length=100)
    tokens = rng.integers(0, SIZES["vocab_size"], (2, 30))
    with float64_everywhere():
        one, other = (logits_of(load_reference(folder), tokens) for folder in (source, tmp_path / "export"))
    np.testing.assert_allclose(other, one, rtol=0, atol=1e-12 * np.abs(one).max())


def test_the_language_model_of_a_multimodal_one(tmp_path, rng):
    text = {name: value for name, value in SIZES.items() if value is not None}
    config = transformers.Gemma3Config(
        text_config=text | {"head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2},
        vision_config={
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
    )
    torch.manual_seed(int(rng.integers(2**31)))
    transformers.Gemma3ForConditionalGeneration(config).bfloat16().save_pretrained(tmp_path)
    tokens = rng.integers(0, SIZES["vocab_size"], (1, 30)).astype(np.int32)
    with float64_everywhere():
        reference = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float64)
        expected = logits_of(reference, tokens)
    with jax.enable_x64(True):
        model = load_gpt(tmp_path, compute_dtype="float64", param_dtype="float64")
        logits = model.logits(model(tokens))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def test_mxfp4_blocks_are_unpacked_as_transformers_does(tmp_path, rng):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from layers.pretrained.mxfp4 import UnpackedTensor
    from layers.pretrained.steps import read_whole
    from tests.layers.pretrained.samples import ArrayTensor

    blocks = rng.integers(0, 256, (2, 6, 3, 16)).astype(np.uint8)
    scales = rng.integers(100, 150, (2, 6, 3)).astype(np.uint8)
    expected = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales)).float().numpy()
    unpacked = read_whole(UnpackedTensor(ArrayTensor(blocks), ArrayTensor(scales)))
    np.testing.assert_array_equal(unpacked.astype(np.float32), expected)
