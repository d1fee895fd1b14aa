"""Folders that anybody may have written: each is refused in one readable message, and nothing in it runs."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from layers.pretrained import config_from_huggingface, load_gpt, read_params
from tests.layers.pretrained.golden import unpack
from tests.layers.pretrained.hostile import ABSENT, booby_trap, change_config, change_header, read_header, split
from tests.layers.pretrained.samples import entry, file_bytes


@pytest.fixture
def folder(tmp_path):
    (path := tmp_path / "folder").mkdir()
    unpack("llama", path)
    return path


CONFIGS = {
    "code to run": (
        {"model_type": "evil", "auto_map": {"AutoModel": "evil.Model"}},
        "model_type='evil'; expected one of llama, .*; code of the folder's own, .* is never run",
    ),
    "an unknown family": ({"model_type": "llamba"}, "model_type='llamba'; expected one of llama, mistral"),
    "no family": ({"model_type": ABSENT}, "model_type=None; expected one of"),
    "a family that is a list": ({"model_type": ["llama"]}, "expected one of llama"),
    "a missing size": ({"hidden_size": ABSENT}, "hidden_size=None; expected an integer"),
    "a size that is text": ({"hidden_size": "32"}, "hidden_size='32'; expected an integer"),
    "a size that is true": ({"num_hidden_layers": True}, "num_hidden_layers=True; expected an integer"),
    "a negative size": ({"vocab_size": -1}, "vocab_size=-1; expected an integer"),
    "billions of tokens": ({"vocab_size": 2**31 - 1}, "vocab_size=2147483647; expected at most 16,777,216"),
    "billions of heads": ({"num_attention_heads": 2**30}, "num_attention_heads=1073741824; expected at most 4,096"),
    "billions of layers": ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers=2147483647; expected at most 4,096"),
    "a size of a thousand digits": ({"vocab_size": 10**1000}, "vocab_size=1000.*; expected an integer"),
    "an epsilon that is text": ({"rms_norm_eps": "small"}, "rms_norm_eps='small'; expected a finite number"),
    "an infinite epsilon": ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf; expected a finite number"),
    "another activation": ({"hidden_act": "relu"}, "hidden_act='relu'; expected 'silu' or 'swish'"),
    "a flag that is a number": ({"tie_word_embeddings": 0}, "tie_word_embeddings=0; expected true or false"),
    "heads that don't divide": ({"num_key_value_heads": 3}, "can't be: num_heads=2 is not a multiple"),
    "rotary scaling by surprise": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type='dynamic'; expected one of default, linear, llama3, yarn, longrope",
    ),
    "rotary scaling that is a list": ({"rope_parameters": [1]}, r"rope_parameters=\[1\]; expected an object"),
    "half a rotary scaling": (
        {"rope_parameters": {"rope_type": "linear", "factor": 0.5}},
        "can't be used: rope_scaling.factor=0.5",
    ),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5; expected 1"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_makes_no_model_is_refused(name, folder):
    changes, message = CONFIGS[name]
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=message) as refusal:
        config_from_huggingface(folder)
    assert "config.json" in str(refusal.value)
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "isn't JSON"),
        ("[]", "isn't a JSON object"),
        ("[" * 100_000, "isn't JSON"),
        (None, "has no file config.json"),
    ],
)
def test_a_config_that_is_none_is_refused(text, message, folder):
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        config_from_huggingface(folder)


def test_a_folder_that_is_none_is_refused(folder):
    for path in (folder / "absent", folder / "config.json"):
        with pytest.raises(ValueError, match="is not a folder"):
            config_from_huggingface(path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_out_of_the_folder_is_refused(name, folder, tmp_path):
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(ValueError, match=r"is a link to .*, out of the folder; copy the folder"):
        load_gpt(folder)
    # Within the folder, a link is as good as a file.
    (folder / name).unlink()
    (tmp_path / name).rename(folder / "target")
    (folder / name).symlink_to("target")
    load_gpt(folder)


@pytest.mark.parametrize("name", ["../one.safetensors", "/etc/passwd", "a/b", "..", "", "a\\b", "a\0b", "a\x1b[2J"])
def test_an_index_that_names_files_outside_of_the_folder_is_refused(name, folder):
    config = config_from_huggingface(folder)
    split(folder, lambda file_of: file_of | {"lm_head.weight": name})
    with pytest.raises(ValueError, match="which is not a plain file name within it"):
        read_params(folder, config)


def test_an_index_that_disagrees_with_its_files_is_refused(folder):
    config = config_from_huggingface(folder)
    split(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    read_params(folder, config)
    cases = (
        ({"weight_map": index["weight_map"] | {"more": "one.safetensors"}}, "disagree on 1 tensors, 'more'"),
        ({"weight_map": index["weight_map"] | {"more": "two.safetensors"}}, "has no file two.safetensors"),
        ({"weight_map": ["one.safetensors"]}, "has no weight_map"),
        ({"weight_map": {"lm_head.weight": 1}}, "has no weight_map"),
        ({}, "has no weight_map"),
    )
    for changed, message in cases:
        (folder / "model.safetensors.index.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            read_params(folder, config)


def test_a_folder_without_weights_is_refused(folder):
    config = config_from_huggingface(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor .* save them once with transformers"):
        read_params(folder, config)


def test_a_truncated_folder_is_refused(folder):
    config, data = config_from_huggingface(folder), (folder / "model.safetensors").read_bytes()
    for length in (0, 7, 100, len(data) - 1):
        (folder / "model.safetensors").write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors .* download it again"):
            read_params(folder, config)


def test_all_tensors_that_are_wrong_are_in_one_message(folder):
    def change(header):
        layer = "model.layers.{}.self_attn."
        for number in range(2):
            name = layer.format(number) + "q_proj.weight"
            header[name.replace("q_proj", "q_porj")] = header.pop(name)
        norm = header["model.norm.weight"]
        norm["shape"] = [1, *norm["shape"]]

    config = config_from_huggingface(folder)
    change_header(folder, change)
    with pytest.raises(ValueError, match="aren't those of this llama model") as refusal:
        read_params(folder, config)
    message = str(refusal.value)
    assert "2 missing: model.layers.0.self_attn.q_proj.weight (and 1 more like it)" in message
    assert "2 unknown: model.layers.0.self_attn.q_porj.weight (and 1 more like it)" in message
    assert "1 misshapen: model.norm.weight[1, 16] instead of [16]" in message


def test_names_that_a_terminal_would_obey_are_escaped(folder):
    def change(header):
        header["\x1b[2J" + "x" * 10_000] = header.pop("lm_head.weight")
        for number in range(3000):  # names without numbers, so that no two are alike
            name = "".join(chr(ord("a") + int(digit)) for digit in str(number))
            header[name] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}

    config = config_from_huggingface(folder)
    change_header(folder, change)
    with pytest.raises(ValueError, match="3001 unknown: ") as refusal:
        read_params(folder, config)
    assert str(refusal.value).isprintable()
    assert "kinds more" in str(refusal.value)
    assert len(str(refusal.value)) < 5000


def test_weights_of_a_wrong_type_are_refused(folder):
    def change(header):
        head = header["lm_head.weight"]
        head["dtype"], head["shape"] = "U8", [head["shape"][0], head["shape"][1] * 2]

    config = config_from_huggingface(folder)
    change_header(folder, change)
    with pytest.raises(ValueError, match=r"1 of integers: lm_head\.weight"):
        read_params(folder, config)


def test_a_config_that_changes_parameters_is_refused(folder):
    config = dataclasses.replace(config_from_huggingface(folder), sinks=True)
    with pytest.raises(ValueError, match=r"llama has no tensor for the model's blocks\.0\.attention\.sinks"):
        read_params(folder, config)
    with pytest.raises(ValueError, match=r"missing: .*bias"):
        load_gpt(folder, attention_bias=True)


def test_a_tied_head_that_is_stored_has_to_be_the_embedding(tmp_path):
    (folder := tmp_path / "folder").mkdir()
    unpack("qwen3", folder)
    expected = read_params(folder, config_from_huggingface(folder))
    header, data = read_header(folder / "model.safetensors")
    start, stop = header["model.embed_tokens.weight"]["data_offsets"]
    header["lm_head.weight"] = header["model.embed_tokens.weight"] | {
        "data_offsets": [len(data), len(data) + stop - start]
    }
    copied = file_bytes(header, data + data[start:stop])
    (folder / "model.safetensors").write_bytes(copied)
    params = read_params(folder, config_from_huggingface(folder))
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    (folder / "model.safetensors").write_bytes(copied[:-1] + bytes([copied[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"ties the head to the embedding, but lm_head.weight isn't"):
        load_gpt(folder)
    head = load_gpt(folder, tie_embeddings=False).head.kernel[...]
    assert head.shape == (16, 40)


def test_nothing_in_a_folder_runs(folder):
    mark = booby_trap(folder)
    change_config(folder, auto_map={"AutoConfig": "configuration_llama.C", "AutoModelForCausalLM": "modeling_llama.M"})
    load_gpt(folder)
    assert not mark.exists()


def test_a_file_that_is_both_damaged_and_large_costs_no_memory(folder):
    config = config_from_huggingface(folder)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(file_bytes({"a": entry(0, 2**40)}))
        file.truncate(2**33)  # sparse
    with pytest.raises(ValueError, match="its header describes 1,099,511,627,776"):
        read_params(folder, config)
