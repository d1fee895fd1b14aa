"""Folders of adapters: what is written is read back, `peft` computes the same from it, and others are refused."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from layers import GPTConfig, LoRAConfig, MoEConfig
from layers.lora import adapted_shapes, merge_adapters
from layers.pretrained import read_params, write_huggingface
from layers.pretrained.peft import ADAPTER_CONFIG_NAME, base_of, read_peft, write_peft
from layers.pretrained.table import flat, parameter_shapes
from tests.layers.decoder_oracle import decoder_logits

LLAMA = GPTConfig(
    vocab_size=64,
    num_layers=2,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_width=24,
    mlp="swiglu",
    tie_embeddings=False,
)
MODELS = {
    "llama": LLAMA,
    "qwen3": dataclasses.replace(LLAMA, qk_norm="per_head"),
    "mixtral": dataclasses.replace(LLAMA, moe=MoEConfig(3, 2, 20), mlp="swiglu"),
}
LORA = LoRAConfig(rank=3, alpha=4.5)


def write(folder, model, lora, rng, model_type=None):
    """A base, the parameters that train, and both together."""
    base = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), parameter_shapes(model))
    write_huggingface(folder / "base", model, base, dtype="bfloat16", model_type=model_type)
    base = jax.tree.map(np.asarray, read_params(folder / "base", model))
    shapes = adapted_shapes(model, lora)
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)
    drawn, held = flat(params), flat(base)
    whole = jax.tree.unflatten(
        jax.tree.structure(shapes), [drawn[path] if lora.trains(path) else held[path] for path in flat(shapes)]
    )
    write_peft(folder / "adapters", model, lora, whole, base=folder / "base")
    return whole


@pytest.mark.sample(1)
@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("lora", [LORA, dataclasses.replace(LORA, targets=("*.value", "*.down"), embeddings=True)])
def test_what_is_written_is_read_back(model_type, lora, tmp_path, rng):
    model = MODELS[model_type]
    params = write(tmp_path, model, lora, rng, model_type)
    assert base_of(tmp_path / "adapters") == tmp_path / "base"
    read, written = flat(read_peft(tmp_path / "adapters", model, lora)), flat(params)
    assert read.keys() == {path for path in written if lora.trains(path)}
    for path, array in read.items():
        np.testing.assert_array_equal(array, written[path], err_msg=path)


@pytest.mark.parametrize(
    ("changes", "lora", "message"),
    [
        ({}, {"rank": 4}, r"has r=3; expected 4; set lora\.rank to that"),
        ({}, {"alpha": 3.0}, r"has lora_alpha=4\.5; expected 3\.0; set lora\.alpha to that"),
        ({}, {"targets": ("mlp.*",)}, r"tensors that lora\.targets leaves out: .*self_attn\.\w_proj\.lora_A\.weight"),
        ({"use_dora": True}, {}, r"has use_dora=True; expected False"),
        ({"rank_pattern": {"q_proj": 4}}, {}, r"has rank_pattern=.*; expected \{\}"),
        ({"base_model_name_or_path": "somebody/model"}, {}, r"'somebody/model'; expected a folder on this machine"),
    ],
)
def test_other_adapters_are_refused(changes, lora, message, tmp_path, rng):
    write(tmp_path, LLAMA, LORA, rng)
    path = tmp_path / "adapters" / ADAPTER_CONFIG_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        read_peft(tmp_path / "adapters", LLAMA, dataclasses.replace(LORA, **lora))


def test_what_peft_cannot_hold_is_refused(tmp_path, rng):
    tied = dataclasses.replace(LLAMA, tie_embeddings=True)
    with pytest.raises(ValueError, match=r"the embedding trains and is the head, too"):
        write(tmp_path, tied, dataclasses.replace(LORA, embeddings=True), rng)
    (tmp_path / "phi3").mkdir()
    with pytest.raises(ValueError, match=r"phi3 keeps .*query.*value.* in a tensor to which peft would give another"):
        write(tmp_path / "phi3", LLAMA, LORA, rng, "phi3")


@pytest.mark.parametrize("model_type", MODELS)
def test_peft_computes_the_same(model_type, tmp_path, rng):
    peft = pytest.importorskip("peft", reason="needs peft")
    from tests.layers.pretrained.reference import float64_everywhere, load_reference, logits_of

    model = MODELS[model_type]
    params = write(tmp_path, model, LORA, rng, model_type)
    tokens = rng.integers(0, model.vocab_size, (2, 20))
    with float64_everywhere():
        base = load_reference(tmp_path / "base")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").double()
    with float64_everywhere():
        found = logits_of(adapted, tokens)
    with jax.enable_x64(True):
        merged = merge_adapters(LORA, jax.tree.map(lambda x: np.asarray(x, np.float64), params))
    for row, logits in zip(tokens, found, strict=True):
        expected = decoder_logits(model, merged, row)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-12 * np.abs(expected).max())
