"""Keys of config.json that are easily misread: each is read as transformers 4 and 5 read it, or refused in one line."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kernels import CausalMask, LocalMask
from layers import GPTConfig, RopeScaling
from layers.pretrained import config_from_huggingface
from layers.pretrained.families import MODULES, find_family
from layers.pretrained.save import family_of
from tests.layers.pretrained.golden import unpack
from tests.layers.pretrained.published_configs import sizes

SIZES = sizes(64, 96, 4, 32, 4, 40) | {"head_dim": 8, "max_position_embeddings": 512, "moe_intermediate_size": 8}
TABLES = {"short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [1.0, 3.0, 7.5, 9.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}
LANGUAGE_MODELS = [name for name in MODULES if name != "gemma3"]


def read(model_type, **keys) -> GPTConfig:
    """The config of a small model; a key whose value is ... is left out."""
    values = {"model_type": model_type, "rope_theta": 500_000.0, **SIZES, **keys}
    values = {name: value for name, value in values.items() if value is not ...}
    return find_family(model_type, "config.json").read_config(json.loads(json.dumps(values)), "config.json")


def assert_refused(message, model_type, **keys):
    with pytest.raises(ValueError, match=message) as refusal:
        read(model_type, **keys)
    assert "\n" not in str(refusal.value)


def windows(config):
    return [config.layer(index).mask.lookback for index in range(config.num_layers)]


@pytest.mark.parametrize(
    ("model_type", "number"),
    [
        *dict.fromkeys(("llama", "olmo2", "olmo3", "phi3"), 64).items(),  # as many as of queries
        *dict.fromkeys(("mistral", "mixtral", "gpt_oss"), 8).items(),
        *dict.fromkeys(("gemma2", "gemma3_text", "smollm3", "qwen3_moe"), 4).items(),
        *dict.fromkeys(("qwen2", "qwen3"), 32).items(),
    ],
)
def test_heads_of_keys_and_values_are_each_familys_own_number_where_the_key_is_absent(model_type, number):
    assert read(model_type, num_attention_heads=64, num_key_value_heads=...).num_kv_heads == number
    assert read(model_type, num_attention_heads=64, num_key_value_heads=None).num_kv_heads == 64


def test_a_key_that_is_null_is_not_an_absent_one():
    assert read("llama", head_dim=None).head_dim == read("llama", head_dim=...).head_dim == 2
    assert read("qwen3", head_dim=...).head_dim == 128
    for name in ("head_dim", "rms_norm_eps", "tie_word_embeddings", "rope_theta"):
        assert_refused(f"{name}=None; expected", "qwen3", **{name: None})


@pytest.mark.parametrize("model_type", LANGUAGE_MODELS)
def test_attention_that_is_not_causal_is_refused(model_type):
    assert windows(read(model_type, is_causal=True)) == windows(read(model_type))
    assert_refused(f"is_causal=False; expected True, as no {model_type} here", model_type, is_causal=False)
    assert_refused("is_causal=None; expected True", model_type, is_causal=None)
    assert_refused("per_layer_config=.*; expected None", model_type, per_layer_config={"0": {"head_dim": 4}})


def test_a_mistral_has_windows_in_the_layers_of_that_type_where_they_are_listed(tmp_path):
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    config = read("mistral", sliding_window=8, layer_types=types)
    assert windows(config) == [7, None, None, 7]
    written = family_of(config)[1]
    assert (written["model_type"], written["layer_types"], written["sliding_window"]) == ("mistral", types, 8)
    assert windows(read("mistral", sliding_window=8, layer_types=None)) == [7] * 4
    assert "layer_types" not in family_of(read("mistral", sliding_window=8))[1]
    assert_refused("sliding_window=None; expected an integer", "mistral", sliding_window=None, layer_types=types)
    # These families don't look at it.
    assert windows(read("phi3", sliding_window=8, layer_types=types)) == [7] * 4
    assert windows(read("llama", sliding_window=8, layer_types=types)) == [None] * 4


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "smollm3"])
def test_windows_that_are_switched_on_without_a_width_are_none(model_type):
    assert windows(read(model_type, use_sliding_window=True, sliding_window=None, max_window_layers=0)) == [None] * 4


def test_gemma_3_caps_no_logits_of_attention_and_gemma_2_does():
    assert read("gemma3_text", attn_logit_softcapping=50.0).logits_soft_cap is None
    config = read("gemma2", attn_logit_softcapping=5.0)
    assert (config.logits_soft_cap, family_of(config)[0].model_type) == (5.0, "gemma2")
    capped = dataclasses.replace(read("gemma3_text"), logits_soft_cap=5.0)
    with pytest.raises(ValueError, match=r"gemma3_text has model\.logits_soft_cap=None \(here 5\.0\)"):
        family_of(capped)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_tables_of_phi_3_are_longropes_under_any_name(name, key):
    config = read("phi3", rope_scaling={key: name, **TABLES}, original_max_position_embeddings=256)
    expected = RopeScaling("longrope", 2.0, original_context_length=256, **{
        f"{which}_factors": tuple(TABLES[f"{which}_factor"]) for which in ("short", "long")
    })  # fmt: skip
    assert config.rope_scaling == expected
    if name == "su":
        assert_refused("rope_type='su'; expected one of default", "llama", rope_scaling={key: name, **TABLES})


def test_a_phi_3_was_trained_on_4096_tokens_unless_it_says_otherwise():
    long = {"rope_scaling": {"type": "longrope", **TABLES}, "max_position_embeddings": 131_072}
    scaling = read("phi3", **long).rope_scaling
    assert (scaling.original_context_length, scaling.factor) == (4096, 32.0)
    assert_refused(
        "original_max_position_embeddings=None; expected", "phi3", original_max_position_embeddings=None, **long
    )
    assert read("llama", **long).rope_scaling.original_context_length == 131_072


CONTRADICTIONS = {
    "a base within": ("llama", {"rope_scaling": {**YARN, "rope_theta": 1000.0}}, "rope_theta as 500000.0 .* as 1000.0"),
    "an old base beside": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        "rope_theta as 500000.0 .* as 1000.0",
    ),
    "two types": (
        "llama",
        {"rope_scaling": {**YARN, "type": "linear"}},
        "has type='linear'; expected rope_type='yarn'",
    ),
    "two lengths": (
        "qwen2",
        {"rope_scaling": YARN, "original_max_position_embeddings": 32},
        "original_max_position_embeddings as 16 .* as 32",
    ),
    "a length that longrope finds outside alone": (
        "llama",
        {"rope_scaling": {**YARN, "rope_type": "longrope", **TABLES}},
        "original_max_position_embeddings as 512 .* as 16",
    ),
    "a factor that is no ratio": (
        "phi3",
        {"rope_scaling": {"type": "longrope", "factor": 3.0, **TABLES}, "original_max_position_embeddings": 256},
        "longrope's factor as 2.0 .* as 3.0",
    ),
    "half of a head": (
        "phi3",
        {"rope_scaling": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor as 1.0 .* as 0.5",
    ),
    "a base that windows have lost": ("olmo3", {"rope_theta": 1e6}, "rope_theta as 1000000.0 .* as 500000.0"),
    "another default": ("olmo3", {"rope_theta": ...}, "rope_theta as 10000.0 .* as 500000.0"),
    "a type that layers have hidden": (
        "olmo3",
        {"rope_scaling": {**YARN, "rope_type": ..., "type": "yarn"}},
        "has type='yarn'; expected rope_type='default'",
    ),
    "an end that isn't rounded": (
        "olmo3",
        {"rope_scaling": {**YARN, "truncate": False}},
        "truncate=False; expected true",
    ),
    "nothing or YaRN": ("gpt_oss", {"rope_scaling": None}, "rope_scaling=None; expected an object: transformers 4"),
    "two numbers of experts": ("mixtral", {"num_local_experts": 4, "num_experts": 8}, "num_experts=8; expected 4, as"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_transformers_4_and_5_read_otherwise_is_refused(name):
    model_type, keys, message = CONTRADICTIONS[name]
    if isinstance(scaling := keys.get("rope_scaling"), dict):
        keys = keys | {"rope_scaling": {key: value for key, value in scaling.items() if value is not ...}}
    assert_refused(message, model_type, **keys)


@pytest.mark.parametrize(
    ("keys", "missing"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({**YARN, "factor": None}, "factor"),
        (LLAMA3, "low_freq_factor"),
        ({**LLAMA3, "low_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "longrope"}, "short_factor"),
    ],
)
def test_a_scaling_without_what_transformers_needs_is_refused(keys, missing):
    assert_refused(f"rope_scaling has {missing}=None; expected", "llama", rope_scaling=keys)


def test_rotary_parameters_by_type_are_refused_where_all_layers_share_them():
    by_type = {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}
    assert_refused("expected one object for all layers", "qwen2", rope_parameters=by_type)


def test_a_gpt_oss_without_rotary_parameters_has_yarn():
    for keys in ({}, {"rope_parameters": None}, {"rope_scaling": {}}):
        assert read("gpt_oss", **keys).rope_scaling.kind == "yarn"
    assert read("gpt_oss", rope_scaling={"rope_type": "default"}).rope_scaling.kind == "none"


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "bitsandbytes", "compressed-tensors", "mxfp4", None])
def test_quantized_weights_are_refused_before_any_tensor_is_read(method):
    message = f"quantization_config.quant_method={method!r}; expected weights that aren't quantized"
    keys = {"quantization_config": {"quant_method": method} if method else {}}
    assert_refused(f"{message}; take the folder", "llama", **keys)
    if method == "mxfp4":
        assert read("gpt_oss", **keys) == read("gpt_oss", quantization_config=None)
    else:
        assert_refused(f"{message}, or by mxfp4; take the folder", "gpt_oss", **keys)


def test_of_a_multimodal_file_both_parts_are_asked():
    text = SIZES | {"model_type": "gemma3_text"}
    family = find_family("gemma3", "config.json")
    for part in (
        {"quantization_config": {"quant_method": "fp8"}},
        {"is_causal": False},
        {"tie_word_embeddings": False},
    ):
        for values in ({"text_config": text, **part}, {"text_config": text | part}):
            with pytest.raises(ValueError, match=f"{next(iter(part))}.*; expected"):
                family.read_config(values, "config.json")
    untied = {"tie_word_embeddings": False}
    assert not family.read_config({"text_config": text | untied, **untied}, "config.json").tie_embeddings


def test_the_number_of_experts_has_two_names():
    for name in ("num_experts", "num_local_experts"):
        assert read("qwen3_moe", **{name: 16}).moe.num_experts == 16


def test_an_export_says_to_both_what_a_longrope_multiplies_by(tmp_path):
    unpack("llama", tmp_path)
    scaling = RopeScaling(
        "longrope", 1.7, original_context_length=27, short_factors=(1.0,) * 4, long_factors=(2.0,) * 4
    )
    config = dataclasses.replace(config_from_huggingface(tmp_path), rope_scaling=scaling)
    written = family_of(config, "llama")[1]
    assert written["rope_scaling"]["attention_factor"] == pytest.approx((1 + 0.5306282510621704 / 3.295836866) ** 0.5)


def test_masks_of_a_mistral_that_no_list_of_types_tells_are_refused():
    config = dataclasses.replace(
        read("mistral"), masks=(CausalMask() & LocalMask(7, 0), CausalMask() & LocalMask(3, 0))
    )
    with pytest.raises(ValueError, match=r"mistral has model\.masks=.*right=0\) in layer 1"):
        family_of(config, "mistral")
