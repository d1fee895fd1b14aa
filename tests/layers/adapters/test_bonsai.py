"""The bonsai adapter against bonsai's own Qwen 3 and ViT, which are unmodified but for the adapter's one line."""

import dataclasses
import hashlib
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx


def is_installed() -> bool:
    """Returns whether the `bonsai` here is jax-ml's: PyPI has another of that name."""
    return importlib.util.find_spec("bonsai") is not None and importlib.util.find_spec("bonsai.models") is not None


pytestmark = pytest.mark.skipif(
    not is_installed(), reason="jax-ml/bonsai isn't installed: docs/adapters/bonsai.md says how"
)

BATCH, LENGTH, NUM_SLOTS = 2, 12, 16


def test_the_commit_is_the_one_that_was_tried(modeling):
    """The recipe calls a private function: with another commit, run these tests first, then set TRIED_WITH and this."""
    source = Path(modeling.__file__).read_bytes()
    # Of bonsai/models/qwen3/modeling.py in the commit that TRIED_WITH names; bonsai has no versions.
    assert hashlib.sha256(source).hexdigest() == "07f6055d98264dd6df6d09312fe032233c9f052e3782066b7be8cd3dc06cbecb"


@pytest.fixture
def modeling():
    from bonsai.models.qwen3 import modeling

    return modeling


@pytest.fixture
def config(modeling):
    return modeling.ModelConfig(
        num_layers=2,
        vocab_size=64,
        emb_dim=16,
        mlp_dim=32,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        rope_theta=1_000_000,
        rope_scaling_factor=8.0,
        local_rope_theta=1e4,
        norm_eps=1e-6,
        tie_word_embeddings=False,
    )


@pytest.fixture
def make_model(modeling, config, rng):
    seed = int(rng.integers(2**31))

    def make(adapted, implementation="reference", config=config):
        from bonsai_recipe import use_kernels

        model = modeling.Qwen3(config, rngs=nnx.Rngs(seed))
        model.embedder.embedding.set_value(model.embedder.embedding[...].astype(jnp.float32))
        if adapted:
            use_kernels(model, implementation=implementation)
        return model

    return make


@pytest.fixture
def tokens(rng):
    return jnp.asarray(rng.integers(1, 64, (BATCH, LENGTH)), jnp.int32)


def cache_of(modeling, config):
    return [modeling.LayerCache(config, BATCH, NUM_SLOTS, jnp.float32) for _ in range(config.num_layers)]


def assert_same(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, theirs)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_values_and_gradients(modeling, config, make_model, tokens, rng, implementation):
    """Rows that are padded on the left by different amounts."""
    segment_ids = jnp.asarray(np.arange(LENGTH) >= rng.integers(0, LENGTH // 2, (BATCH, 1)), jnp.int32)

    def outputs_and_gradients(adapted):
        def loss(model):
            logits = model(tokens, cache=cache_of(modeling, config), segment_ids=segment_ids)
            return (jnp.square(logits) * segment_ids[..., None]).sum(), logits

        (_, logits), gradients = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(make_model(adapted, implementation))
        return jnp.where(segment_ids[..., None], logits, 0), nnx.to_pure_dict(gradients)

    theirs = outputs_and_gradients(False)
    assert_same(outputs_and_gradients(True), theirs)
    assert np.abs(theirs[0]).max() > 0.01


def test_prefill_then_decode(modeling, config, make_model, tokens):
    def logits_and_caches(adapted):
        model, cache = make_model(adapted), cache_of(modeling, config)
        attend = nnx.jit(lambda model, cache, part: model(part, cache=cache, segment_ids=jnp.ones_like(part)))
        found = []
        for first, last in ((0, LENGTH - 2), (LENGTH - 2, LENGTH - 1), (LENGTH - 1, LENGTH)):
            found.append(attend(model, nnx.List(cache), tokens[:, first:last]))
        return found, [nnx.to_pure_dict(nnx.state(layer)) for layer in cache]

    assert_same(logits_and_caches(True), logits_and_caches(False))


def test_other_models_are_refused(rng):
    from bonsai.models.vit import modeling as vit
    from bonsai_recipe import use_kernels

    with pytest.raises(ValueError, match=r"expected a model whose layers have an `attn` of bonsai.models.qwen3.*Trans"):
        use_kernels(vit.ViTClassificationModel(small_vit(vit), rngs=nnx.Rngs(0)))


def small_vit(vit):
    config = vit.ModelConfig.vit_p16_224()
    changes = {"num_layers": 1, "hidden_dim": 32, "num_heads": 4, "mlp_dim": 32, "num_labels": 5}
    changes |= {"attn_dropout_prob": 0.0, "dropout_prob": 0.0}
    return dataclasses.replace(config, **changes)


@pytest.mark.usefixtures("eight_devices")
def test_on_a_mesh(modeling, config, make_model, rng):
    """With bonsai's own sharding, batch over fsdp and heads over tp, on axes of type Explicit."""
    tokens = jnp.asarray(rng.integers(1, 64, (8, LENGTH)), jnp.int32)
    split = dataclasses.replace(config, shd_cfg=modeling.ShardConfig.default(use_fsdp=True, use_tp=True))

    def logits(adapted, config, tokens):
        model = make_model(adapted, config=config)
        caches = nnx.List([modeling.LayerCache(config, 8, NUM_SLOTS, jnp.float32) for _ in range(config.num_layers)])
        attend = nnx.jit(lambda model, caches, part: model(part, cache=caches, segment_ids=jnp.ones_like(part)))
        return [attend(model, caches, part) for part in (tokens[:, :-1], tokens[:, -1:])]

    expected = logits(False, config, tokens)
    axes = ("fsdp", "tp")
    mesh = jax.make_mesh((2, 2), axes, (jax.sharding.AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        rows = jax.device_put(tokens, jax.sharding.NamedSharding(mesh, jax.P("fsdp")))
        for adapted in (False, True):
            assert_same(jax.device_get(logits(adapted, split, rows)), jax.device_get(expected))
