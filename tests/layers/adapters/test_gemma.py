"""The gemma adapter against the unmodified models of Google DeepMind's `gemma` package."""

import importlib.metadata
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gemma") is None, reason="gemma isn't installed: docs/adapters/gemma.md says how"
)

BATCH, LENGTH, WINDOW = 2, 12, 4


def test_the_version_is_the_one_that_was_tried():
    """The recipe overrides private methods: with another version, run these tests first, then set TRIED_WITH."""
    import gemma_recipe

    assert importlib.metadata.version("gemma") == gemma_recipe.TRIED_WITH


@pytest.fixture
def gm():
    from gemma import gm

    return gm


@pytest.fixture
def make_model(gm):
    from gemma.gm.nn import _config, _modules

    kinds = _modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL

    def make(**changes):
        settings = {
            "num_embed": 64,
            "embed_dim": 16,
            "hidden_dim": 32,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "final_logit_softcap": None,
            "use_post_attn_norm": True,
            "use_post_ffw_norm": True,
            "use_qk_norm": True,
            "attention_types": kinds,
            "sliding_window_size": WINDOW,
            "local_base_frequency": 10_000,
            "global_base_frequency": 1_000_000,
        }
        config = _config.TransformerConfig(**(settings | changes))
        return gm.nn.Transformer(config=config, dtype=jnp.float32, tokens="batch.tokens")

    return make


@pytest.fixture
def tokens(rng):
    return jnp.asarray(rng.integers(1, 64, (BATCH, LENGTH)), jnp.int32)


@pytest.fixture
def draw_params(rng):
    """Random parameters: gemma's own initial values are too small to tell masks apart."""

    def draw(model, tokens):
        shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
        return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), shapes)

    return draw


def logits_and_gradients(model, params, tokens):
    """Of the tokens that aren't padding."""
    weight = (tokens != 0)[..., None]

    def loss(params):
        logits = model.apply(params, tokens).logits * weight
        return jnp.square(logits).sum(), logits

    gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
    return logits, gradients


def assert_same(ours, theirs):
    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * max(1, float(np.abs(b).max())))

    jax.tree.map(compare, ours, theirs)


MODELS = {
    "Gemma 3": {},
    "Gemma 2": {"use_qk_norm": False, "attn_logits_soft_cap": 2.0, "final_logit_softcap": 30.0},
    "one key/value head": {"num_kv_heads": 1},
    "as many key/value heads": {"num_kv_heads": 4},
    "scaled rotary embedding": {"global_scale_factor": 8.0},
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_models(make_model, draw_params, tokens, changes):
    from gemma_recipe import with_kernels

    model = make_model(**changes)
    params = draw_params(model, tokens)
    theirs = logits_and_gradients(model, params, tokens)
    assert_same(logits_and_gradients(with_kernels(model, implementation="reference"), params, tokens), theirs)


@pytest.mark.parametrize("where", ["left", "right", "middle"])
@pytest.mark.parametrize("implementation", ["reference", None])
def test_padding(make_model, draw_params, tokens, rng, where, implementation):
    """Gemma counts windows without padding, and hides it, wherever it stands."""
    from gemma_recipe import with_kernels

    model = make_model()
    indices, size = np.arange(LENGTH), rng.integers(1, LENGTH // 2, (BATCH, 1))
    first = {"left": 0, "right": LENGTH - size, "middle": 3}[where]
    tokens = jnp.where((indices >= first) & (indices < first + size), 0, tokens)
    params = draw_params(model, tokens)
    theirs = logits_and_gradients(model, params, tokens)
    assert_same(logits_and_gradients(with_kernels(model, implementation=implementation), params, tokens), theirs)


def test_each_model_is_traced_for_itself(make_model, draw_params, tokens, monkeypatch):
    """Gemma's `nn.jit` keeps traces: one with kernels must not serve the model as it was, nor the other way round."""
    import gemma_recipe

    calls = []
    attend = gemma_recipe.dot_product_attention
    monkeypatch.setattr(gemma_recipe, "dot_product_attention", lambda *a, **k: calls.append(1) or attend(*a, **k))
    model = make_model(hidden_dim=48)  # no other test traces this one
    params = draw_params(model, tokens)
    model.apply(params, tokens)
    assert not calls
    gemma_recipe.with_kernels(model, implementation="reference").apply(params, tokens)
    assert len(calls) == 2
    model.apply(params, tokens)
    assert len(calls) == 2


REFUSALS = {
    "mask": (lambda model: {"attention_mask": jnp.ones((BATCH, LENGTH, LENGTH), bool)}, "can't honour attention_mask"),
    "positions": (lambda model: {"positions": jnp.zeros((BATCH, LENGTH), jnp.int32)}, "can't honour positions"),
    "cache": (
        lambda model: {"cache": model.config.init_cache(batch_size=BATCH, dtype=jnp.float32, cache_length=LENGTH)},
        "takes no cache; sample with the model as it was",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals(make_model, draw_params, tokens, options, message):
    from gemma_recipe import with_kernels

    model = make_model()
    with pytest.raises(ValueError, match=message):
        with_kernels(model).apply(draw_params(model, tokens), tokens, **options(model))


def test_other_architectures_are_refused(gm):
    from gemma_recipe import with_kernels

    with pytest.raises(ValueError, match=r"expected a Gemma 2 or 3 of gemma.gm.nn.Transformer, got Gemma4"):
        with_kernels(gm.nn.Gemma4_E2B())


def test_no_array_of_length_squared(make_model, draw_params):
    """Gemma still describes its dense mask; XLA drops what nothing reads."""
    from gemma_recipe import with_kernels

    model, length = make_model(), 1024
    tokens = jnp.ones((1, length), jnp.int32)
    params = draw_params(model, tokens[:, :LENGTH])

    def arrays_of_length_squared(model):
        gradient = jax.jit(jax.grad(lambda params: model.apply(params, tokens).logits.sum()))
        return re.findall(rf"\[[\d,]*\b{length},(?:\d+,)?{length}\b", gradient.lower(params).compile().as_text())

    assert arrays_of_length_squared(model)
    assert not arrays_of_length_squared(with_kernels(model))
