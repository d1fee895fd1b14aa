"""Every field of GPTConfig against an oracle written anew: in one call, token by token, packed, and without fields."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels import CausalMask, ChunkedCausalMask, LocalMask, MultiHeadMask
from layers import GPT, GPTConfig, LayerOverride, MoEConfig, RopeScaling, init_caches, unroll_params, unrolled_config
from tests.layers.decoder_oracle import decoder_logits

LENGTH = 40
WINDOW = CausalMask() & LocalMask(5, 0)
CONFIG = GPTConfig(
    vocab_size=48,
    num_layers=3,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=24,
    implementation="reference",
    decode_implementation="dense",
    remat="none",
)
"""3 layers, so that a pattern of 2 makes stacks of different heights."""
LONGROPE = RopeScaling(
    "longrope", 3.0, original_context_length=24, short_factors=(1.0, 1.1, 1.5, 2.0), long_factors=(1.0, 1.7, 2.5, 6.0)
)
SCALINGS = (
    RopeScaling("linear", 2.5),
    RopeScaling("ntk", 4.0),
    RopeScaling("llama3", 8.0, original_context_length=24),
    RopeScaling("yarn", 4.0, original_context_length=24, beta_fast=4.0),
    RopeScaling("yarn", 4.0, original_context_length=30, beta_fast=3.0, beta_slow=0.5, truncate=False),
    RopeScaling("yarn", 2.0, original_context_length=16, attention_factor=1.3),
    LONGROPE,
)
# In the words of the families that have them, each with what it tests that the others don't.
FAMILIES = {
    "Gemma": {
        "masks": (WINDOW, CausalMask()),
        "layer_overrides": (LayerOverride(rope_base=1000.0, rope_scaling=RopeScaling()), LayerOverride()),
        "rope_scaling": RopeScaling("linear", 8.0),
        "norm_placement": "both",
        "norm_scale_offset": 1.0,
        "qk_norm": "per_head",
        "query_scale": 0.2,
        "embedding_scale": 4.0,
        "mlp": "geglu",
        "logits_soft_cap": 5.0,
        "final_logits_soft_cap": 3.0,
    },
    "OLMo": {
        "masks": (WINDOW, CausalMask()),
        "layer_overrides": (LayerOverride(), LayerOverride(rope_base=100.0, rope_scaling=SCALINGS[3])),
        "norm_placement": "post",
        "qk_norm": "whole",
        "mlp": "swiglu",
        "tie_embeddings": False,
    },
    "gpt-oss": {
        "masks": (WINDOW, CausalMask()),
        "rope_base": 100.0,
        "rope_scaling": SCALINGS[4],
        "attention_bias": True,
        "output_bias": True,
        "sinks": True,
        "mlp": "clamped_swiglu",
        "moe": MoEConfig(4, 2, 12, router_bias=True, expert_bias=True),
    },
    "NoPE and heads that differ": {
        "layer_overrides": (
            LayerOverride(head_dim=16, num_kv_heads=4, rope_fraction=0.5),
            LayerOverride(rope_base=None, num_kv_heads=1),
        ),
        "attention_bias": True,
        "qk_norm": "per_head",
        "qk_norm_after_rope": True,
        "mlp_bias": True,
    },
    "longrope": {"rope_scaling": LONGROPE, "mlp": "swiglu"},
}


def random_config(rng) -> dict:
    """Any values of the fields together."""

    def pick(*values):
        return values[rng.integers(len(values))]

    kv_heads, pattern = pick(1, 2, 4), pick(1, 2, 3)
    masks = [pick(CausalMask(), WINDOW, ChunkedCausalMask(7)) for _ in range(pattern)]
    if rng.integers(2):
        masks[0] = MultiHeadMask([CausalMask(), WINDOW, CausalMask(), ChunkedCausalMask(9)])
    overrides = tuple(
        LayerOverride(
            rope_base=pick("model", None, 500.0),
            rope_scaling=pick("model", *SCALINGS[:-1]),
            rope_fraction=pick("model", 0.5, 0.75),
            num_kv_heads=pick("model", 1, 4),
            head_dim=pick("model", 8, 16),
        )
        for _ in range(pattern)
    )
    moe = MoEConfig(5, pick(1, 3), 8, bool(rng.integers(2)), bool(rng.integers(2)), bool(rng.integers(2)))
    qk_norm = pick("none", "per_head", "whole")
    return {
        "num_kv_heads": kv_heads,
        "masks": tuple(masks),
        "layer_overrides": pick((), overrides, overrides[:1]),
        "rope_base": pick(10_000.0, 100.0),
        "rope_scaling": pick(RopeScaling(), *SCALINGS[:-1]),
        "rope_fraction": pick(1.0, 0.5),
        "attention_bias": bool(rng.integers(2)),
        "output_bias": bool(rng.integers(2)),
        "qk_norm": qk_norm,
        "qk_norm_after_rope": qk_norm != "none" and bool(rng.integers(2)),
        "query_scale": pick(None, 0.3),
        "logits_soft_cap": pick(None, 4.0),
        "sinks": bool(rng.integers(2)),
        "norm_placement": pick("pre", "post", "both"),
        "norm_scale_offset": pick(0.0, 1.0, 0.25),
        "norm_epsilon": pick(1e-6, 1e-5),
        "embedding_scale": pick(None, 4.0),
        "final_logits_soft_cap": pick(None, 6.0),
        "mlp": pick("gelu", "swiglu", "geglu", "clamped_swiglu"),
        "tie_embeddings": bool(rng.integers(2)),
        **pick({"mlp_bias": bool(rng.integers(2))}, {"moe": moe}),
    }


def make_model(config, rng, scale=0.5):
    """A GPT whose parameters are large enough for every one of them to show."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(rng.normal(0, scale, x.shape), x.dtype), state))


def params_of(model):
    return jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def same(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def greedy(model, prompts, num_tokens, context_length):
    """Each prompt's logits from its last token on, and the tokens that they choose, from caches."""
    config = unrolled_config(model.config)
    params = unroll_params(model.config, params_of(model))
    model = nnx.merge(nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))[0], params)

    @nnx.jit
    def begin(model, tokens, caches):
        hidden, caches = model.prefill(tokens, caches, context_length=context_length)
        return model.logits(hidden[:, -1]), caches

    @nnx.jit
    def step(model, tokens, caches):
        hidden, caches = model.decode(tokens[:, None], caches, context_length=context_length)
        return model.logits(hidden[:, 0]), caches

    logits, caches = begin(model, prompts, init_caches(config, len(prompts), context_length))
    all_logits, tokens = [logits], [jnp.argmax(logits, -1)]
    for _ in range(num_tokens - 1):
        logits, caches = step(model, tokens[-1], caches)
        all_logits.append(logits)
        tokens.append(jnp.argmax(logits, -1))
    return np.stack(all_logits, 1), np.stack(tokens, 1)


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", [*FAMILIES, "any fields", "any fields, again"])
def test_logits_are_the_oracles_in_one_call_and_token_by_token(rng, float64, family):
    changes = FAMILIES.get(family) or random_config(rng)
    config = dataclasses.replace(CONFIG, compute_dtype="float64", **changes)
    print(config)
    model = make_model(config, rng)
    params = params_of(model)
    num_prompt_tokens = int(rng.integers(8, LENGTH - 2))  # past the windows
    prompts = rng.integers(0, config.vocab_size, (2, num_prompt_tokens))
    logits, chosen = greedy(model, prompts, LENGTH - num_prompt_tokens, LENGTH)
    texts = np.concatenate([prompts, chosen], 1)
    whole = nnx.jit(lambda model, tokens: model.logits(model(tokens)))(model, texts[:, :LENGTH])
    for row, text in enumerate(texts):
        expected = decoder_logits(config, params, text[:LENGTH])
        same(whole[row], expected)
        same(logits[row], expected[num_prompt_tokens - 1 : LENGTH - 1])
        np.testing.assert_array_equal(chosen[row], expected[num_prompt_tokens - 1 : LENGTH - 1].argmax(-1))


def test_longrope_takes_the_short_factors_where_the_context_is_short(rng, float64):
    config = dataclasses.replace(CONFIG, compute_dtype="float64", num_layers=1, rope_scaling=LONGROPE)
    model = make_model(config, rng)
    params, tokens = params_of(model), rng.integers(0, config.vocab_size, 20)
    short, long = (decoder_logits(config, params, tokens, length) for length in (24, 25))
    assert np.abs(short - long).max() > 1e-3
    same(model.logits(model(tokens[None]))[0], short)
    for context_length, expected in ((24, short), (25, long)):
        same(greedy(model, tokens[None], 1, context_length)[0][0], expected[-1:])
    caches = init_caches(config, 1, 25)
    for call in (model.prefill, model.decode):
        with pytest.raises(ValueError, match=r"kind='longrope' takes its short or its long factors .*; give context_l"):
            call(tokens[None, :1], caches)


def test_packed_documents_are_rows_of_their_own(rng, float64, packed):
    changes = FAMILIES["Gemma"] | {"qk_norm": "whole", "sinks": True, "attention_bias": True, "output_bias": True}
    config = dataclasses.replace(CONFIG, vocab_size=64, compute_dtype="float64", **changes)
    model = make_model(config, rng)
    run = nnx.jit(lambda model, *inputs: model.logits(model(*inputs)))
    logits = run(model, packed.tokens, packed.segment_ids, packed.positions)
    params = params_of(model)
    for row, lengths in enumerate(packed.lengths):
        for document in range(len(lengths)):
            where = packed.segment_ids[row] == document + 1
            same(logits[row][where], decoder_logits(config, params, packed.tokens[row][where]))


def test_no_remat_policy_changes_the_gradient(rng, float64):
    changes = FAMILIES["gpt-oss"] | {"moe": None, "mlp_bias": True, "norm_placement": "both", "qk_norm": "whole"}
    config = dataclasses.replace(CONFIG, num_layers=2, compute_dtype="float64", **changes)
    tokens = rng.integers(0, config.vocab_size, (1, 16))
    state = nnx.state(make_model(config, rng))

    def gradient(remat):
        of_policy = dataclasses.replace(config, remat=remat)
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: GPT(of_policy, rngs=nnx.Rngs(0))))
        return jax.jit(jax.grad(lambda state: jnp.square(nnx.merge(graphdef, state)(tokens)).mean()))(state)

    expected = gradient("none")
    by_names = "save(attention_lse) & offload(layer_input, projection)"
    for remat in ("full", "save_matmuls", "save_attention", "offload_attention", by_names):
        jax.tree.map(same, gradient(remat), expected)


@pytest.mark.parametrize("family", [*FAMILIES, "any fields"])
def test_num_parameters_counts_them_all(rng, family):
    config = dataclasses.replace(CONFIG, **(FAMILIES.get(family) or random_config(rng)))
    state = nnx.state(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))), nnx.Param)
    assert config.num_parameters == sum(leaf.size for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("offset", [0.0, 1.0, 0.25])
def test_norms_begin_by_changing_nothing(offset):
    model = GPT(dataclasses.replace(CONFIG, norm_scale_offset=offset, norm_placement="both"), rngs=nnx.Rngs(0))
    for norm in (model.final_norm, model.blocks[0].mlp_post_norm):
        assert np.unique(norm.scale[...] + offset) == 1.0


def test_layers_of_the_same_rotary_settings_share_a_rotation():
    overrides = (LayerOverride(), LayerOverride(rope_base=500.0), LayerOverride(), LayerOverride(rope_base=None))
    config = dataclasses.replace(CONFIG, num_layers=4, layer_overrides=overrides)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    jaxpr = str(jax.make_jaxpr(lambda state, tokens: nnx.merge(graphdef, state)(tokens))(state, tokens))
    assert jaxpr.count(" cos ") == jaxpr.count(" sin ") == 2
