"""Writing a text token by token gives what training sees of the same tokens, whatever the masks and features."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels import CausalMask, ChunkedCausalMask, FullMask, LocalMask, MaskFn, MultiHeadMask, PrefixMask
from layers import GPT, GPTConfig, RopeScaling, init_caches, unroll_params, unrolled_config

WINDOW = CausalMask() & LocalMask(5, 0)
CHUNK = ChunkedCausalMask(7)
FIRST_TOKENS_KEPT = WINDOW | CausalMask() & PrefixMask(2)
# 3 layers over a pattern of 2: stacks of different heights.
CONFIG = GPTConfig(
    vocab_size=64,
    num_layers=3,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_width=24,
    masks=(WINDOW, CausalMask()),
    implementation="reference",
    compute_dtype="float32",
)
LENGTH = 16


def make_model(config, rng):
    """A GPT whose parameters are large enough for every one of them to show."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), state))


def unrolled(model):
    params = unroll_params(model.config, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    config = unrolled_config(model.config)
    return nnx.merge(nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))[0], params)


@nnx.jit
def prefill(model, tokens, caches, **rows):
    return model.prefill(tokens, caches, **rows)


@nnx.jit
def decode(model, tokens, caches, **rows):
    return model.decode(tokens, caches, **rows)


def write(model, tokens, prompt_lengths, step):
    """Hidden states of every token: of the prompts at once, then of up to `step` tokens of each row at a time."""
    num_rows, length = tokens.shape
    outputs = np.full((*tokens.shape, model.config.width), np.nan, np.float32)
    # Others were here before.
    caches = jax.tree.map(lambda x: x + 3, init_caches(model.config, num_rows, length, tokens_per_step=step))
    # Behind a prompt's end stands what isn't its own.
    padded = np.where(np.arange(length) < np.array(prompt_lengths)[:, None], tokens, (tokens + 1) % 64)
    hidden, caches = prefill(model, padded, caches, num_tokens=np.array(prompt_lengths))
    for row, count in enumerate(prompt_lengths):
        outputs[row, :count] = hidden[row, :count]
    lengths = list(prompt_lengths)
    while min(lengths) < length:
        counts = [min(step, length - done) for done in lengths]
        new = np.zeros((num_rows, step), np.int32)
        for row, (done, count) in enumerate(zip(lengths, counts, strict=True)):
            new[row, :count] = tokens[row, done : done + count]
        hidden, caches = decode(model, new, caches, num_tokens=np.array(counts))
        for row, (done, count) in enumerate(zip(lengths, counts, strict=True)):
            outputs[row, done : done + count] = hidden[row, :count]
            lengths[row] += count
    return outputs


@pytest.mark.parametrize(
    ("lay_out", "step", "changes"),
    [
        pytest.param(unrolled, 1, {"num_layers": 2}, id="window and global"),
        pytest.param(
            unrolled,
            2,
            {
                "masks": (MultiHeadMask([WINDOW, CHUNK, CausalMask(), CausalMask(-1)]), CHUNK, FIRST_TOKENS_KEPT),
                "num_kv_heads": 4,
                "qk_norm": "per_head",
                "mlp": "swiglu",
            },
            id="a mask for each head, chunks, first tokens kept, QK-norm",
        ),
        pytest.param(
            lambda model: model,
            3,
            {
                "num_kv_heads": 1,
                "sinks": True,
                "logits_soft_cap": 2.0,
                "rope_scaling": RopeScaling("llama3", 4.0, original_context_length=8),
                "tie_embeddings": False,
            },
            id="stacked layers, sinks, soft cap, RoPE scaling",
        ),
    ],
)
def test_token_by_token_is_what_training_sees(rng, lay_out, step, changes):
    model = make_model(dataclasses.replace(CONFIG, **changes), rng)
    tokens = rng.integers(0, CONFIG.vocab_size, (3, LENGTH)).astype(np.int32)
    outputs = write(lay_out(model), tokens, (1, int(rng.integers(2, LENGTH)), LENGTH), step)
    np.testing.assert_allclose(outputs, nnx.jit(lambda model: model(tokens))(model), rtol=1e-3, atol=1e-4)


def test_a_layer_keeps_what_its_mask_looks_back_on():
    caches = init_caches(CONFIG, 2, 1000, tokens_per_step=4)
    assert [cache.key.shape for cache in caches] == [(2, 9, 2, 4), (2, 1000, 2, 4), (2, 9, 2, 4)]
    assert {cache.value.dtype for cache in caches} == {jnp.dtype("float32")}


def test_unrolled_matrices_are_in_the_compute_dtype():
    config = dataclasses.replace(CONFIG, compute_dtype="bfloat16", qk_norm="per_head")
    shapes = jax.eval_shape(
        lambda: unroll_params(config, nnx.to_pure_dict(nnx.state(GPT(config, rngs=nnx.Rngs(0)), nnx.Param)))
    )
    assert sorted(shapes["blocks"]) == [0, 1, 2]
    for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]:
        assert leaf.dtype == ("float32" if path[-1].key == "scale" else "bfloat16")


def even_distance(q_pos, kv_pos):
    return (q_pos - kv_pos) % 2 == 0


@pytest.mark.parametrize(
    ("mask", "looks_back_only"),
    [
        (MultiHeadMask([WINDOW, CausalMask(-1), CHUNK, CausalMask()]), True),
        (CausalMask() & MaskFn(even_distance), True),
        (CausalMask(1), False),
        (MultiHeadMask([CausalMask(), FullMask(), CausalMask(), CausalMask()]), False),
        (MaskFn(even_distance), False),
    ],
)
def test_only_masks_that_look_back_can_be_sampled(mask, looks_back_only):
    config = dataclasses.replace(CONFIG, masks=(CausalMask(), mask))
    if looks_back_only:
        config.check_looks_back_only()
        return
    with pytest.raises(ValueError, match=r"may let a token see later ones.*sampling needs masks that only look back"):
        config.check_looks_back_only()
    with pytest.raises(ValueError, match="may let a token see later ones"):
        nnx.eval_shape(
            lambda: GPT(config, rngs=nnx.Rngs(0)).prefill(jnp.zeros((1, 4), jnp.int32), init_caches(config, 1, 4))
        )
