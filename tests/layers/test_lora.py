"""Adapters of a GPT's matrices: what they compute, where they are, and which settings are refused."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers import GPT, GPTConfig, LayerOverride, LoRAConfig, MoEConfig
from layers.lora import add_adapters, merge_adapters
from tests.layers.decoder_oracle import decoder_logits

SIZES = {"vocab_size": 64, "num_layers": 3, "width": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
DENSE = GPTConfig(**SIZES, mlp_width=24, mlp="swiglu", implementation="reference")
EXPERTS = dataclasses.replace(DENSE, moe=MoEConfig(4, 2, 20))
MODELS = {
    "dense": DENSE,
    "gelu with biases": dataclasses.replace(
        DENSE, mlp="gelu", mlp_bias=True, attention_bias=True, output_bias=True, scan_layers=False
    ),
    "heads that differ": dataclasses.replace(DENSE, layer_overrides=(LayerOverride(), LayerOverride(num_kv_heads=1))),
    "experts": EXPERTS,
}


def adapted(config, lora, rng, *, trained):
    """A model with adapters, as they begin or with random ones, and a batch of tokens."""
    model = GPT(config, rngs=nnx.Rngs(int(rng.integers(2**31))))
    base = nnx.to_pure_dict(nnx.state(model))
    add_adapters(model, lora, nnx.Rngs(int(rng.integers(2**31))))
    if trained:
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            if "lora" in path:
                variable[...] = jnp.asarray(rng.normal(0, 0.3, variable.shape), variable.dtype)
    return model, base, jnp.asarray(rng.integers(0, config.vocab_size, (2, 24)), jnp.int32)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_at_first_a_model_computes_what_its_base_does_to_the_bit(name, rng):
    model, base, tokens = adapted(MODELS[name], LoRAConfig(rank=3), rng, trained=False)
    alone = GPT(MODELS[name], rngs=nnx.Rngs(0))
    nnx.update(alone, jax.tree.map(jnp.asarray, base))
    np.testing.assert_array_equal(model.logits(model(tokens)), alone.logits(alone(tokens)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_merged_model_computes_the_same(name, rng):
    """By an oracle in NumPy, which knows no adapters."""
    lora = LoRAConfig(rank=3, alpha=float(rng.uniform(1, 8)))
    with jax.enable_x64(True):
        config = dataclasses.replace(MODELS[name], compute_dtype="float64", param_dtype="float64")
        model, base, tokens = adapted(config, lora, rng, trained=True)
        logits = model.logits(model(tokens))
        params = nnx.to_pure_dict(nnx.state(model))
        merged = jax.tree.map(np.asarray, merge_adapters(lora, params))
    assert jax.tree.map(np.shape, merged) == jax.tree.map(np.shape, base)
    for row in range(2):
        expected = decoder_logits(config, merged, np.asarray(tokens[row]))
        np.testing.assert_allclose(logits[row], expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_targets_are_names_and_patterns():
    assert LoRAConfig(rank=2, targets=("mlp.*", "attention.output")).matrices(DENSE) == (
        "attention.output",
        "mlp.up",
        "mlp.gate",
        "mlp.down",
    )
    assert LoRAConfig(rank=2, targets=("*.up",)).matrices(EXPERTS) == ("mlp.experts.up",)
    assert LoRAConfig().matrices(DENSE) == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"targets": ("attention.q", "mlp.up")},
            r"lora\.targets names 'attention\.q', and no matrix.*attention\.query, ",
        ),
        ({"targets": ("mlp.experts.up",)}, r"names 'mlp\.experts\.up'.*mlp\.up, mlp\.gate, mlp\.down"),
        ({"targets": ()}, r"lora\.targets is empty"),
        (
            {"rank": 13},
            r"lora\.rank=13 is above a side of attention\.key, which maps 16 features to 12; use at most 12",
        ),
        ({"rank": 0}, r"lora\.rank=0 must be at least 1"),
        ({"alpha": 0.0}, r"lora\.alpha=0\.0 must be positive"),
    ],
)
def test_what_cannot_be_adapted_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LoRAConfig(**{"rank": 2, **settings}).matrices(DENSE)


def test_the_fewest_heads_bound_the_rank():
    with pytest.raises(ValueError, match=r"attention\.key, which maps 16 features to 6"):
        LoRAConfig(rank=7).matrices(MODELS["heads that differ"])
