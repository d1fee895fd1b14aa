"""Configs as published models have them, in the words of several years, give models of the published sizes."""

from __future__ import annotations

import json

import pytest

from kernels import CausalMask, LocalMask
from layers import GPTConfig
from layers.pretrained import config_from_huggingface
from tests.layers.pretrained.published_configs import LLAMA3_SCALING, PUBLISHED, REFUSED, sizes


def read(folder, values) -> GPTConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return config_from_huggingface(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_a_model_of_the_published_size(name, tmp_path):
    values, num_parameters = PUBLISHED[name]
    assert read(tmp_path, values).num_parameters == num_parameters


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_config_of_another_kind_is_refused_in_one_line(name, tmp_path):
    values, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as refusal:
        read(tmp_path, values)
    assert "\n" not in str(refusal.value)


def test_what_layers_have_of_their_own_comes_from_old_words_too(tmp_path):
    windows = {name: read(tmp_path, values).masks for name, (values, _) in PUBLISHED.items()}
    assert windows["Qwen2.5-7B"] == windows["Llama-2-7b"] == (CausalMask(),)
    assert windows["Mistral-7B-v0.1"] == (CausalMask() & LocalMask(4095, 0),)
    assert windows["gemma-2-27b"] == (CausalMask() & LocalMask(4095, 0), CausalMask())
    smollm = read(tmp_path, PUBLISHED["SmolLM3-3B"][0])
    assert [smollm.layer(index).rope_base for index in range(5)] == [5e6, 5e6, 5e6, None, 5e6]
    scaling = read(tmp_path, PUBLISHED["Phi-3-mini-128k-instruct"][0]).rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_context_length) == ("longrope", 32.0, 4096)


def test_gemma_3_within_a_multimodal_config(tmp_path):
    # The published file of the 27B model leaves out what its class has by default.
    text = {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = read(tmp_path, {"model_type": "gemma3", "text_config": text})
    assert (config.vocab_size, config.num_layers, config.pattern_length) == (262_208, 62, 6)
    assert config.query_scale == 168**-0.5
    layers = [config.layer(index) for index in range(7)]
    assert [layer.rope_base for layer in layers] == [1e4] * 5 + [1e6, 1e4]
    assert [layer.rope_scaling.kind for layer in layers] == ["none"] * 5 + ["linear", "none"]
    assert [layer.mask.lookback for layer in layers] == [1023] * 5 + [None, 1023]


def test_olmo_3_has_yarn_in_full_layers_alone(tmp_path):
    config = read(tmp_path, PUBLISHED["Olmo-3-1025-7B"][0])
    layers = [config.layer(index) for index in range(4)]
    assert [layer.rope_scaling.kind for layer in layers] == ["none"] * 3 + ["yarn"]
    assert {layer.rope_base for layer in layers} == {5e5}


def test_old_rope_keys_take_the_new_ones_place_as_in_transformers_5(tmp_path):
    # 5.24's convert_rope_params_to_dict: `rope_scaling or rope_parameters`; the base of the latter is lost with it.
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": LLAMA3_SCALING}
    llama = {"model_type": "llama", "max_position_embeddings": 131_072} | sizes(4096, 11008, 32, 32, 32, 32000)
    config = read(tmp_path, llama | both)
    assert (config.rope_base, config.rope_scaling.kind) == (1e4, "llama3")
    config = read(tmp_path, llama | both | {"rope_scaling": {}})
    assert (config.rope_base, config.rope_scaling.kind) == (1e6, "none")
    # OLMo 3's and Gemma 3's own: the old keys are added to those of full layers.
    nested = {kind: {"rope_type": "default", "rope_theta": 1e6} for kind in ("full_attention", "sliding_attention")}
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    values = {"model_type": "olmo3", "rope_parameters": nested, "rope_scaling": yarn, "sliding_window": 4096}
    values |= sizes(4096, 11008, 32, 32, 32, 100278)
    with pytest.raises(
        ValueError, match=r"rope_theta as 10000\.0 to transformers 4 and as 1000000\.0 to transformers 5; "
    ):
        read(tmp_path, values)
    config = read(tmp_path, values | {"rope_theta": 1e6})
    layers = [config.layer(index) for index in range(4)]
    assert [layer.rope_scaling.kind for layer in layers] == ["none"] * 3 + ["yarn"]
    assert {layer.rope_base for layer in layers} == {1e6}
