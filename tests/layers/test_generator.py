"""Texts from the generator: those of a plain loop over whole sequences, each its own whatever grows beside it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from kernels import CausalMask, LocalMask
from layers import GPT, ActivationSharding, GPTConfig
from layers.generator import Generator, SampleRequest, _numbers, generator_of
from layers.token_choice import TokenChoice
from tests.seeds import seeded_rng

CONFIG = GPTConfig(
    vocab_size=40,
    num_layers=2,
    width=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_width=24,
    masks=(CausalMask() & LocalMask(7, 0), CausalMask()),
    compute_dtype="float32",
)
# Ids that the tokenizer has; the model has more.
VOCAB_SIZE = 33


@pytest.fixture(scope="module")
def model():
    """A model that is sure of nothing, but not so unsure that rounding could tip a choice."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: GPT(CONFIG, rngs=nnx.Rngs(0))))
    rng = seeded_rng("model")
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), state))


@pytest.fixture(scope="module")
def draw(model):
    """One generator for all tests, which are of three texts each, and its parameters."""
    generator = Generator(GPT, CONFIG, vocab_size=VOCAB_SIZE)
    return generator, generator.lay_out(parameters(model))


def parameters(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


CHOICE = TokenChoice(temperature=3.0, top_k=20, top_p=0.95)


def texts_of(generator, params, requests, choice=CHOICE):
    """The tokens of each text, checked to come in turns and to end when they say so."""
    texts, ended = [[] for _ in requests], set()
    for new in generator.generate(params, requests, choice):
        assert new.request not in ended
        texts[new.request].append(new.token)
        ended |= {new.request} if new.is_last else set()
    assert ended == set(range(len(requests)))
    return texts


def random_request(rng, length, num_new_tokens, seed=0):
    """By default no token ends it."""
    return SampleRequest(tuple(rng.integers(0, VOCAB_SIZE, length).tolist()), num_new_tokens, seed, stop_token=-1)


def test_the_likeliest_texts_are_those_of_the_whole_forward_pass(rng, model, draw):
    # All grow past the window, one of them from a prompt of one token.
    requests = [random_request(rng, length, 12) for length in (1, 20, 40)]
    texts = texts_of(*draw, requests, dataclasses.replace(CHOICE, top_k=1))

    @jax.jit
    def logits_of(tokens):
        return model.logits(model(tokens))[0, :, :VOCAB_SIZE]

    for request, text in zip(requests, texts, strict=True):
        whole = np.zeros((1, 52), np.int32)
        whole[0, : len(request.tokens) + 12] = [*request.tokens, *text]
        # In one pass over all, each token must be the likeliest after those before it, but for rounding.
        logits = np.asarray(logits_of(whole))[len(request.tokens) - 1 :][:12]
        np.testing.assert_allclose(logits[np.arange(12), text], logits.max(-1), atol=1e-3)


def test_a_text_is_made_by_its_prompt_and_seed_alone(rng, draw):
    request, *others = (random_request(rng, length, 15, seed=7) for length in (9, 30, 2))
    text = texts_of(*draw, [request, *others])[0]
    other_seed = dataclasses.replace(request, seed=8)
    other_prompt = dataclasses.replace(request, tokens=(*request.tokens, 0))
    *rest, same = texts_of(*draw, [other_seed, other_prompt, request])
    assert same == text
    assert text not in rest


def test_only_the_tokenizers_ids_are_chosen(rng, draw):
    texts = texts_of(*draw, [random_request(rng, 5, 100, seed) for seed in range(3)])
    assert [len(text) for text in texts] == [100] * 3
    assert max(map(max, texts)) < VOCAB_SIZE


def test_the_stop_token_ends_a_text_and_no_other(rng, draw):
    requests = [random_request(rng, length, 30) for length in (4, 5, 6)]
    texts = texts_of(*draw, requests)
    stop = texts[1][10]
    requests[1] = dataclasses.replace(requests[1], stop_token=stop)
    assert texts_of(*draw, requests) == [texts[0], texts[1][: texts[1].index(stop) + 1], texts[2]]


def test_a_single_token_needs_no_step_of_decoding(rng, draw):
    assert [len(text) for text in texts_of(*draw, [random_request(rng, length, 1) for length in (64, 3, 1)])] == [1] * 3


def test_a_token_is_told_while_the_next_is_made(rng, draw, monkeypatch):
    generator, params = draw
    steps, step = [], generator._step
    monkeypatch.setattr(
        generator, "_step", lambda *arguments, **options: steps.append(None) or step(*arguments, **options)
    )
    tokens = generator.generate(params, [random_request(rng, 4, 100)] * 3, CHOICE)
    order = [next(tokens).request for _ in range(6)]
    assert order == [0, 1, 2, 0, 1, 2]
    assert len(steps) == 2
    tokens.close()


def test_caches_are_written_in_place(rng, draw):
    """A step's results lie where its caches lay: no second copy of them exists."""
    generator, params = draw
    texts = generator._no_texts([random_request(rng, 4, 20_000)] * 3)
    step = generator._step.lower(params, texts, _numbers(CHOICE), context_length=20_224)
    memory = step.compile().memory_analysis()
    caches = sum(leaf.nbytes for leaf in jax.tree.leaves(texts.caches))
    assert memory.alias_size_in_bytes >= caches
    assert memory.temp_size_in_bytes < caches


def test_a_model_that_looks_ahead_is_refused():
    with pytest.raises(ValueError, match="may let a token see later ones"):
        Generator(GPT, GPTConfig(num_layers=1, masks=(LocalMask(3, 3),)), vocab_size=257)


def test_a_model_generates_what_its_generator_does_and_compiles_once(rng, model, draw):
    prompts = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in (9, 3, 5)]
    requests = [SampleRequest(tuple(prompt), 6, 4 + i, -1) for i, prompt in enumerate(prompts)]
    options = {"seed": 4, "vocab_size": VOCAB_SIZE, "top_k": 20, "top_p": 0.95}
    texts = model.generate(prompts, 6, temperature=3.0, **options)
    assert texts == texts_of(*draw, requests)
    generator = generator_of(GPT, CONFIG, VOCAB_SIZE)
    sizes = [program._cache_size() for program in (generator.lay_out, generator._begin, generator._step)]
    stop = texts[0][2]
    other = nnx.clone(model)
    longer = [np.asarray(prompt + prompt) for prompt in prompts]
    again = other.generate(longer, 8, temperature=1.0, stop_token=stop, **options)
    assert sizes == [1, 1, 1] == [each._cache_size() for each in (generator.lay_out, generator._begin, generator._step)]
    assert all(len(text) == 8 or text[-1] == stop for text in again)


@pytest.mark.parametrize(
    ("prompts", "num_tokens", "options", "message"),
    [
        ([], 3, {}, "there must be a prompt and a token to add, got 0 and num_tokens=3"),
        ([[1]], 0, {}, "got 1 and num_tokens=0"),
        ([[1], []], 3, {}, "with a token at least"),
        ([1, 2], 3, {}, r"must be lists of token ids.*a single prompt is \[prompt\]"),
        ("a text", 3, {}, "must be lists of token ids"),
        (["a text"], 3, {}, "must be lists of token ids"),
        ([[1, 40]], 3, {}, "from 0 to vocab_size - 1 = 39"),
        ([[-1]], 3, {}, "from 0 to vocab_size - 1 = 39"),
        ([[0.5]], 3, {}, "must hold integers"),
        ([[1]], 3, {"temperature": -1.0}, "temperature=-1.0 must be finite and not negative"),
        ([[1]], 3, {"top_k": 0}, "top_k=0 must be at least 1"),
        ([[1]], 3, {"top_p": 1.5}, "top_p=1.5 must be more than 0 and at most 1"),
    ],
)
def test_what_cannot_be_continued_is_refused(model, prompts, num_tokens, options, message):
    with pytest.raises(ValueError, match=message):
        model.generate(prompts, num_tokens, **options)


def test_generate_is_called_outside_of_jit(model):
    with pytest.raises(ValueError, match=r"call it outside of jax\.jit"):
        jax.eval_shape(lambda: model.generate([jnp.zeros(3, jnp.int32)], 2))


@pytest.mark.usefixtures("eight_devices")
def test_a_model_on_a_mesh_is_told_how_to_generate():
    mesh = jax.make_mesh(
        (1, 2, 1, 1), ("data", "fsdp", "tensor", "context"), (AxisType.Auto,) * 4, devices=jax.devices()[:2]
    )
    model = nnx.eval_shape(lambda: GPT(CONFIG, rngs=nnx.Rngs(0), activation_sharding=ActivationSharding(mesh)))
    with pytest.raises(ValueError, match=r"generate runs on one device.*nnx\.update"):
        model.generate([[1]], 2)
