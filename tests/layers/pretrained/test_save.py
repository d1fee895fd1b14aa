"""A saved folder is whole or absent, and models that transformers can't express are refused."""

from __future__ import annotations

import dataclasses
import json
import os
import stat

import jax
import numpy as np
import pytest

from kernels import CausalMask, ChunkedCausalMask, LocalMask, ScheduledWindow
from layers import GPTConfig, LayerOverride, MoEConfig, RopeScaling
from layers.pretrained import config_from_huggingface, read_params, save, write_huggingface
from layers.pretrained.folder import read_config
from layers.pretrained.save import family_of
from layers.pretrained.table import parameter_shapes
from tests.layers.pretrained.golden import CASES, unpack

LLAMA = GPTConfig(
    vocab_size=64, num_layers=2, width=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_width=32, mlp="swiglu"
)


def random_params(config, rng):
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), parameter_shapes(config))


FAMILIES = {
    "llama": {},
    "mistral": {"masks": (CausalMask() & LocalMask(7, 0),)},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": "per_head"},
    "smollm3": {"rope_base": None},
    "olmo2": {"qk_norm": "whole", "norm_placement": "post", "norm_epsilon": 1e-5},
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_family_is_found_by_what_the_model_computes(model_type):
    family, written = family_of(dataclasses.replace(LLAMA, **FAMILIES[model_type]))
    assert family.model_type == written["model_type"] == model_type


def test_equal_masks_are_equal_however_they_are_written():
    widest = ScheduledWindow(2, 8, 10)
    for mask in (LocalMask(7, 0), LocalMask(7, 0) & CausalMask(), CausalMask() & LocalMask(7, None), widest):
        assert family_of(dataclasses.replace(LLAMA, masks=(mask,)))[1]["sliding_window"] == 8


NO_CHUNKS = "CausalMask() or CausalMask() & LocalMask(…, 0) in model.masks (here ChunkedCausalMask(chunk_size=8))"
NO_HEADS = "no num_kv_heads and head_dim in model.layer_overrides (here in layer 0)"
# What a model has, and what the two nearest families have in its place.
REFUSALS = {
    "sinks": (
        {"sinks": True},
        ["llama has model.sinks=False (here True)", "mistral has model.sinks=False (here True)"],
    ),
    "two matrices": (
        {"mlp": "gelu", "masks": (LocalMask(7, 0), CausalMask())},
        [
            "mistral has model.mlp=swiglu (here gelu)",
            "smollm3 has model.mlp=swiglu (here gelu)",
        ],
    ),
    "chunks": (
        {"masks": (ChunkedCausalMask(8),), "qk_norm": "per_head"},
        [f"qwen3 has {NO_CHUNKS}", f"llama has {NO_CHUNKS}, model.qk_norm=none (here per_head)"],
    ),
    "ntk": (
        {"rope_scaling": RopeScaling("ntk", 2.0)},
        ["llama has no model.rope_scaling.kind=ntk", "mistral has no model.rope_scaling.kind=ntk"],
    ),
    "heads": (
        {"layer_overrides": (LayerOverride(head_dim=4),)},
        [f"llama has {NO_HEADS}", f"mistral has {NO_HEADS}"],
    ),
    "bases": (
        {"layer_overrides": (LayerOverride(), LayerOverride(rope_base=1e6))},
        [f"{name} has model.rope_base=10000.0 (here 1000000.0 in layer 1)" for name in ("llama", "mistral")],
    ),
    "a mixture with sinks": (
        {"moe": MoEConfig(4, 2, 8), "sinks": True, "qk_norm": "per_head"},
        [
            "qwen3_moe has model.sinks=False (here True)",
            "mixtral has model.qk_norm=none (here per_head), model.sinks=False (here True)",
        ],
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_no_family_computes_is_refused_by_the_two_nearest(name, tmp_path):
    changes, nearest = REFUSALS[name]
    config = dataclasses.replace(LLAMA, **changes)
    with pytest.raises(ValueError, match="no family of transformers") as refusal:
        write_huggingface(tmp_path / "export", config, parameter_shapes(config))
    first = "no family of transformers that is known here computes what this model does; the nearest:"
    assert str(refusal.value).split("\n  ") == [first, *nearest]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["uint8", "int8", "float8_e4m3fn", "int32"])
def test_a_type_that_is_none_of_the_floating_ones_is_refused(dtype, tmp_path, rng):
    with pytest.raises(ValueError, match=f"tensors are written in float16, bfloat16, float32, float64, not {dtype}"):
        write_huggingface(tmp_path / "export", LLAMA, random_params(LLAMA, rng), dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_gpt_oss_without_scaling_says_so_since_transformers_4_takes_yarn_where_nothing_is_said(tmp_path):
    unpack("gpt_oss", tmp_path)
    config = dataclasses.replace(config_from_huggingface(tmp_path), rope_scaling=RopeScaling())
    written = family_of(config, "gpt_oss")[1]
    assert written["rope_scaling"] == {"rope_type": "default"}
    by_default = RopeScaling("yarn", 32.0, original_context_length=4096, truncate=False)
    for keys, expected in (
        (("rope_scaling", "rope_parameters"), by_default),
        (("rope_scaling",), RopeScaling()),
        (("rope_parameters",), RopeScaling()),
    ):
        left = {name: value for name, value in written.items() if name not in keys}
        (tmp_path / "config.json").write_text(json.dumps(left | {"max_position_embeddings": 512}))
        assert config_from_huggingface(tmp_path).rope_scaling == expected


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_a_phi3_has_no_scaling_but_longrope(kind, tmp_path):
    unpack("phi3", tmp_path)
    config = dataclasses.replace(config_from_huggingface(tmp_path), rope_scaling=RopeScaling(kind, 4.0))
    message = rf"^phi3 has model\.rope_scaling\.kind=none \(here {kind}\)"
    with pytest.raises(ValueError, match=message):
        family_of(config, "phi3")


def test_a_dense_model_is_no_mixture():
    for model_type in ("mixtral", "gpt_oss", "qwen3_moe"):
        with pytest.raises(ValueError, match=rf"{model_type} has a mixture of experts in model\.moe"):
            family_of(LLAMA, model_type)


def test_a_family_of_its_own_choice_has_to_express_the_model():
    with pytest.raises(ValueError, match=r"^gemma2 has model\.mlp=geglu \(here swiglu\), model\.query_scale="):
        family_of(LLAMA, "gemma2")
    with pytest.raises(ValueError, match="the argument model_type has model_type='gpt2'; expected one of"):
        family_of(LLAMA, "gpt2")


def test_what_is_there_already_is_left_alone(tmp_path, rng):
    (tmp_path / "export").mkdir()
    params = random_params(LLAMA, rng)
    with pytest.raises(ValueError, match="exists already"):
        write_huggingface(tmp_path / "export", LLAMA, params)
    with pytest.raises(ValueError, match="is not a folder"):
        write_huggingface(tmp_path / "absent" / "export", LLAMA, params)
    del params["final_norm"]
    with pytest.raises(ValueError, match=r"final_norm\.scale, for example, is misshapen or missing"):
        write_huggingface(tmp_path / "other", LLAMA, params)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_failure_on_the_way_leaves_nothing(tmp_path, rng, monkeypatch):
    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(save, "_header", fail)
    with pytest.raises(OSError, match="no space left"):
        write_huggingface(tmp_path / "export", LLAMA, random_params(LLAMA, rng))
    assert list(tmp_path.iterdir()) == []


def test_files_are_as_small_as_is_asked_for(tmp_path, rng):
    params = random_params(LLAMA, rng)
    write_huggingface(tmp_path / "export", LLAMA, params, shard_size=5000)
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 3
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    for name in files:
        data = (tmp_path / "export" / name).read_bytes()
        assert len(data) - 8 - int.from_bytes(data[:8], "little") <= 5000
    jax.tree.map(np.testing.assert_array_equal, read_params(tmp_path / "export", LLAMA), params)


def test_tokenizer_and_generation_config_come_along(tmp_path, rng):
    (source := tmp_path / "source").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "other.py"):
        (source / name).write_text(f"{name}")
    (source / "generation_config.json").write_text('{"eos_token_id": [3, 4], "temperature": 0.5}')
    params = random_params(LLAMA, rng)
    write_huggingface(tmp_path / "export", LLAMA, params, tokenizer_dir=source, context_length=99)
    assert {path.name for path in (tmp_path / "export").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (tmp_path / "export" / "tokenizer.json").read_text() == "tokenizer.json"
    assert json.loads((tmp_path / "export" / "generation_config.json").read_text())["temperature"] == 0.5
    config = read_config(tmp_path / "export")
    assert (config["eos_token_id"], config["bos_token_id"]) == ([3, 4], None)
    assert (config["max_position_embeddings"], config["torch_dtype"]) == (99, "float32")
    write_huggingface(tmp_path / "other", LLAMA, params, generation_config={"eos_token_id": 7}, dtype="bfloat16")
    config = read_config(tmp_path / "other")
    assert (config["eos_token_id"], config["torch_dtype"]) == (7, "bfloat16")


@pytest.mark.parametrize(
    ("case", "lengths"),
    # Some versions of transformers compute YaRN's factor from the length.
    [("gpt_oss", (64, 64, 64)), ("olmo3", (64, 64, 64)), ("qwen3", (40, 40, 40)), ("llama", (256, 999, 256))],
)
def test_config_json_tells_the_length_that_rotary_embeddings_are_scaled_to(case, lengths, tmp_path, rng):
    unpack(case, tmp_path)
    config = config_from_huggingface(tmp_path)
    params = random_params(config, rng)
    for trained_on, length in zip((8, 999, None), lengths, strict=True):
        folder = tmp_path / str(trained_on)
        write_huggingface(folder, config, params, context_length=trained_on)
        assert read_config(folder)["max_position_embeddings"] == length
        assert config_from_huggingface(folder) == config


@pytest.mark.parametrize("case", CASES)
def test_files_from_before_rope_parameters_say_the_same(case, tmp_path):
    unpack(case, tmp_path)
    config, model_type = config_from_huggingface(tmp_path), read_config(tmp_path)["model_type"]
    written = family_of(config, model_type)[1]
    del written["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(written | {"max_position_embeddings": 512}))
    if case == "olmo3":  # transformers 5 has lost the key when it comes to layers with windows
        with pytest.raises(
            ValueError, match=r"rope_theta as 1000\.0 to transformers 4 and as 500000\.0 to transformers 5"
        ):
            config_from_huggingface(tmp_path)
    else:
        assert config_from_huggingface(tmp_path) == config


@pytest.mark.parametrize(
    ("changes", "length", "keys"),
    [
        ({}, 512, {"type", "short_factor", "long_factor"}),
        ({"attention_factor": 1.25}, 512, {"rope_type", "attention_factor", "factor"}),
        ({"factor": 1.7}, 27, {"rope_type", "attention_factor", "factor"}),
    ],
)
def test_longrope_is_written_as_transformers_4_reads_it_where_that_can(changes, length, keys, tmp_path, rng):
    # It takes the ratio of the lengths for the factor, and refuses a Phi-3 whose rope_scaling has more than three keys.
    unpack("phi3", tmp_path)
    config = config_from_huggingface(tmp_path)
    config = dataclasses.replace(config, rope_scaling=dataclasses.replace(config.rope_scaling, **changes))
    write_huggingface(tmp_path / "export", config, random_params(config, rng), context_length=100)
    written = read_config(tmp_path / "export")
    assert (written["max_position_embeddings"], written["original_max_position_embeddings"]) == (length, 16)
    assert keys <= written["rope_scaling"].keys()
    assert (len(written["rope_scaling"]) == 3) == (not changes)
    assert config_from_huggingface(tmp_path / "export") == config


@pytest.mark.parametrize("mask", [0o002, 0o027, 0o077])
def test_a_folder_has_the_permissions_that_the_umask_leaves(tmp_path, rng, mask):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    before = os.umask(mask)
    try:
        params = random_params(LLAMA, rng)
        write_huggingface(tmp_path / "model", LLAMA, params, shard_size=2_000, tokenizer_dir=tmp_path / "tokenizer")
    finally:
        os.umask(before)
    written = tmp_path / "model"
    assert stat.S_IMODE(written.stat().st_mode) == 0o777 & ~mask
    assert {stat.S_IMODE(path.stat().st_mode) for path in written.iterdir()} == {0o666 & ~mask}
    assert len(list(written.iterdir())) > 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "tokenizer"]
