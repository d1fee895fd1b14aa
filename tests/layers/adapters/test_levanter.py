"""The levanter recipe against levanter's own dense attention, as a function and inside its attention layer."""

import functools
import importlib.metadata
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("levanter") is None,
    reason="levanter isn't installed: pip install --pre marin-levanter; docs/adapters/levanter.md",
)

BATCH, LENGTH = 8, 12
NAMES = ("position", "key_position", "head_size")


def test_the_version_is_the_one_that_was_tried():
    """With another version, run these tests first, then set TRIED_WITH."""
    import levanter_recipe

    assert importlib.metadata.version("marin-levanter") == levanter_recipe.TRIED_WITH


@pytest.fixture
def draw(rng):
    import haliax

    def draw(**sizes):
        axes = [haliax.Axis(name, size) for name, size in sizes.items()]
        return haliax.named(jnp.asarray(rng.standard_normal(list(sizes.values())), jnp.float32), axes)

    return draw


@pytest.fixture
def inputs(draw):
    """4 query heads, 2 key/value heads."""
    query = draw(batch=BATCH, kv_head=2, q_heads_per_group=2, position=LENGTH, head_size=8)
    return query, *(draw(batch=BATCH, kv_head=2, key_position=LENGTH, head_size=8) for _ in range(2))


@pytest.fixture
def masks(rng):
    """Documents of each sequence, and of all alike, and a window."""
    import haliax
    from levanter.layers.attention import AttentionMask

    documents = haliax.named(jnp.asarray(np.sort(rng.integers(0, 3, (BATCH, LENGTH)), -1)), ("batch", "position"))
    return {
        "none": None,
        "full": AttentionMask(),
        "causal": AttentionMask.causal(),
        "window": AttentionMask.causal(sliding_window=4),
        "documents": AttentionMask.causal().with_segment_ids(documents),
        "one for all": AttentionMask.causal().with_segment_ids(documents["batch", 0]),
        "both": AttentionMask.causal(sliding_window=4).with_segment_ids(documents),
    }


def run(function, inputs, **options):
    def loss(inputs):
        out = function(*NAMES, *inputs, **options)
        return (out * out).sum().array, out

    gradients, out = jax.jit(jax.grad(loss, has_aux=True))(inputs)
    return out, gradients


def ours(inputs, implementation="reference", **options):
    from levanter_recipe import dot_product_attention

    return run(functools.partial(dot_product_attention, implementation=implementation), inputs, **options)


def theirs(inputs, **options):
    from levanter.layers.attention import AttentionBackend, dot_product_attention

    return run(functools.partial(dot_product_attention, attn_backend=AttentionBackend.VANILLA), inputs, **options)


def assert_same(ours, theirs):
    assert ours[0].axes == theirs[0].axes
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["none", "full", "causal", "window", "documents", "one for all", "both"])
def test_masks(inputs, masks, name):
    expected = theirs(inputs, mask=masks[name])
    for implementation in ("reference", "blockwise"):
        assert_same(ours(inputs, implementation, mask=masks[name]), expected)


@pytest.mark.parametrize("options", [{"logits_soft_cap": 1.5}, {"scaling_factor": 0.3}], ids=str)
def test_options(inputs, masks, options):
    assert_same(ours(inputs, mask=masks["causal"], **options), theirs(inputs, mask=masks["causal"], **options))
    assert np.abs((ours(inputs, **options)[0] - ours(inputs)[0]).array).max() > 1e-4


def test_attention_layer(draw, masks, monkeypatch):
    import haliax
    from levanter.layers import attention
    from levanter_recipe import dot_product_attention

    config = attention.AttentionConfig(
        Embed=haliax.Axis("embed", 16), num_heads=4, num_kv_heads=2, sliding_window=5, logits_soft_cap=2.0
    )
    layer = attention.Attention.init(config, key=jax.random.key(0))
    x = draw(batch=BATCH, position=LENGTH, embed=16)
    expected = layer(x, masks["documents"]).array
    calls = []
    monkeypatch.setattr(
        attention,
        "dot_product_attention",
        lambda *args, **options: calls.append(1) or dot_product_attention(*args, **options),
    )
    jax.clear_caches()
    np.testing.assert_allclose(layer(x, masks["documents"]).array, expected, rtol=1e-4, atol=2e-5)
    assert calls


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": 1.0}, "can't honour bias"),
        ({"dropout": 0.1, "inference": False}, "can't honour dropout"),
        ({"use_flash": False}, "can't honour use_flash"),
        ({"attn_backend": "splash"}, "can't honour attn_backend"),
        ({"new": 1}, "can't honour new"),
    ],
)
def test_refusals(inputs, options, message):
    with pytest.raises(ValueError, match=message):
        ours(inputs, **options)


def test_refused_masks(inputs, masks):
    from levanter.layers.attention import AttentionMask

    dense = masks["causal"].materialize(inputs[0].resolve_axis("position"), inputs[1].resolve_axis("key_position"))
    for mask, got in (
        (dense, "got a dense mask"),
        (AttentionMask.explicit(dense), r"got \['explicit_mask'\]"),
        (AttentionMask.causal(offset=3), "causal_offset"),
        (AttentionMask.bidirectional_sliding_window(2), "bidirectional_window"),
    ):
        with pytest.raises(ValueError, match=f"expected an AttentionMask of .* alone, {got}" if "got" in got else got):
            ours(inputs, mask=mask)


@pytest.mark.usefixtures("eight_devices")
def test_on_a_mesh(inputs, masks):
    """Batch and key/value heads split by haliax's axis mapping, queries' positions not."""
    import haliax
    from levanter_recipe import dot_product_attention

    def attend(inputs, mask):
        return dot_product_attention(*NAMES, *inputs, mask).array

    expected = attend(inputs, masks["both"])
    mesh = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
    with haliax.partitioning.set_mesh(mesh), haliax.axis_mapping({"batch": "data", "kv_head": "model"}):
        shards = haliax.shard(inputs)
        compiled = jax.jit(attend).lower(shards, masks["both"]).compile()
        np.testing.assert_allclose(compiled(shards, masks["both"]), expected, rtol=1e-4, atol=1e-5)
    assert "all-gather" not in compiled.as_text(), "each device attends to its own part"
    with (
        haliax.partitioning.set_mesh(mesh),
        haliax.axis_mapping({"position": "data"}),
        pytest.raises(ValueError, match=r"alone, got one that splits \['position'\]"),
    ):
        jax.jit(attend)(inputs, masks["both"])
