"""The levanter adapter against levanter's own dense attention, as a function and inside its attention layer."""

import functools
import importlib.util
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("levanter") is None,
    reason="levanter isn't installed: pip install --pre marin-levanter; docs/adapters/levanter.md",
)

BATCH, LENGTH, HEAD_DIM = 2, 12, 8


@pytest.fixture
def levanter():
    """The names of levanter's and haliax's that these tests use."""
    import haliax
    from levanter.layers import attention

    return types.SimpleNamespace(haliax=haliax, attention=attention, Mask=attention.AttentionMask)


@pytest.fixture
def call(levanter, rng):
    """Queries, keys, values and a cotangent: 4 query heads, 2 key/value heads."""
    axis = levanter.haliax.Axis
    batch, kv_heads, groups = axis("batch", BATCH), axis("kv_head", 2), axis("q_heads_per_group", 2)
    position, key_position, head_size = (
        axis("position", LENGTH),
        axis("key_position", LENGTH),
        axis("head_size", HEAD_DIM),
    )

    def draw(*axes):
        return levanter.haliax.named(jnp.asarray(rng.standard_normal([a.size for a in axes]), jnp.float32), axes)

    return types.SimpleNamespace(
        inputs=(
            draw(batch, kv_heads, groups, position, head_size),
            draw(batch, kv_heads, key_position, head_size),
            draw(batch, kv_heads, key_position, head_size),
        ),
        cotangent=draw(batch, kv_heads, groups, position, head_size),
        sinks=draw(kv_heads, groups),
        axes=types.SimpleNamespace(batch=batch, position=position, key_position=key_position),
    )


def ours(call, *, implementation="reference", **options):
    from layers.adapters.levanter import dot_product_attention

    return run(functools.partial(dot_product_attention, implementation=implementation), call, **options)


def theirs(call, **options):
    from levanter.layers.attention import AttentionBackend, dot_product_attention

    return run(functools.partial(dot_product_attention, attn_backend=AttentionBackend.VANILLA), call, **options)


def run(function, call, *, attn_sink=None, **options):
    """The output, and the gradients for query, key, value and sinks."""

    @jax.jit
    def loss(inputs, sinks):
        out = function("position", "key_position", "head_size", *inputs, attn_sink=sinks, **options)
        return (out * call.cotangent).sum().array, out

    gradients, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(call.inputs, attn_sink)
    return out, gradients


def assert_same(ours, theirs):
    assert ours[0].axes == theirs[0].axes
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


MASKS = {
    "none": lambda Mask: None,
    "full": lambda Mask: Mask(),
    "causal": lambda Mask: Mask.causal(),
    "causal, moved": lambda Mask: Mask.causal(offset=3),
    "causal window": lambda Mask: Mask.causal(sliding_window=4),
    "causal window, moved": lambda Mask: Mask.causal(sliding_window=4, offset=1),
    "window on both sides": lambda Mask: Mask.bidirectional_sliding_window(2),
    "both windows": lambda Mask: Mask.causal(sliding_window=5) & Mask.bidirectional_sliding_window(3),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_masks(levanter, call, mask, implementation):
    assert_same(
        ours(call, mask=mask(levanter.Mask), implementation=implementation), theirs(call, mask=mask(levanter.Mask))
    )


@pytest.mark.parametrize("with_batch", [True, False], ids=["each row its own", "one for all rows"])
def test_packed_documents(levanter, call, rng, with_batch):
    axes = (call.axes.batch, call.axes.position) if with_batch else (call.axes.position,)
    ids = levanter.haliax.named(jnp.asarray(np.sort(rng.integers(0, 3, [a.size for a in axes]), -1)), axes)
    mask = levanter.Mask.causal().with_segment_ids(ids)
    assert_same(ours(call, mask=mask), theirs(call, mask=mask))
    of_keys = levanter.Mask.causal().with_segment_ids(ids, ids.rename({"position": "key_position"}))
    assert_same(ours(call, mask=of_keys), theirs(call, mask=mask))


def test_offset_of_each_row(levanter, call, rng):
    offset = levanter.haliax.named(jnp.asarray(rng.integers(0, 4, BATCH), jnp.int32), call.axes.batch)
    mask = levanter.Mask.causal(offset=offset)
    assert_same(ours(call, mask=mask), theirs(call, mask=mask))


def test_traced_offset(levanter, call):
    def attend(run, offset):
        return run(call, mask=levanter.Mask.causal(offset=levanter.haliax.named(offset, ())))[0].array

    expected = theirs(call, mask=levanter.Mask.causal(offset=2))[0].array
    np.testing.assert_allclose(jax.jit(functools.partial(attend, ours))(jnp.int32(2)), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    "options", [{"logits_soft_cap": 1.5}, {"scaling_factor": 0.3}, {"attention_dtype": jnp.float32}], ids=str
)
def test_options(levanter, call, options):
    mask = levanter.Mask.causal()
    changed = ours(call, mask=mask, **options)
    assert_same(changed, theirs(call, mask=mask, **options))
    if "attention_dtype" not in options:
        assert np.abs(changed[0].array - ours(call, mask=mask)[0].array).max() > 1e-4


def test_sinks(levanter, call):
    mask = levanter.Mask.causal()
    assert_same(ours(call, mask=mask, attn_sink=call.sinks), theirs(call, mask=mask, attn_sink=call.sinks))


def test_without_batch_and_with_one_key_head(levanter, call):
    """Levanter's GPT-2 calls with heads in all three arrays and, under `vmap`, without a batch."""
    unbatched = types.SimpleNamespace(
        inputs=tuple(x["batch", 0] for x in call.inputs), cotangent=call.cotangent["batch", 0], axes=call.axes
    )
    assert_same(ours(unbatched, mask=levanter.Mask.causal()), theirs(unbatched, mask=levanter.Mask.causal()))
    queries, keys, values = unbatched.inputs
    multi_query = types.SimpleNamespace(
        inputs=(queries, keys["kv_head", 0], values["kv_head", 0]), cotangent=unbatched.cotangent, axes=call.axes
    )
    assert_same(ours(multi_query, mask=levanter.Mask.causal()), theirs(multi_query, mask=levanter.Mask.causal()))


def test_half_precision_comes_out_as_the_query(levanter, call):
    half_precision = types.SimpleNamespace(
        inputs=tuple(x.astype(jnp.bfloat16) for x in call.inputs), cotangent=call.cotangent, axes=call.axes
    )
    out, _ = ours(half_precision, mask=levanter.Mask.causal(), attention_dtype=jnp.float32)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        out.array.astype(jnp.float32), theirs(call, mask=levanter.Mask.causal())[0].array, atol=0.05
    )


def test_attention_layer(levanter, rng, monkeypatch):
    """The one line of docs/adapters/levanter.md, in levanter's own layer."""
    from layers.adapters.levanter import dot_product_attention

    attention, haliax = levanter.attention, levanter.haliax
    embed, batch, position = haliax.Axis("embed", 16), haliax.Axis("batch", BATCH), haliax.Axis("position", LENGTH)
    config = attention.AttentionConfig(
        Embed=embed, num_heads=4, num_kv_heads=2, sliding_window=5, attn_backend=None, logits_soft_cap=2.0
    )
    layer = attention.Attention.init(config, key=jax.random.key(int(rng.integers(2**31))))
    x = haliax.named(jnp.asarray(rng.standard_normal((BATCH, LENGTH, 16)), jnp.float32), (batch, position, embed))

    def outputs_and_gradients():
        def loss(layer, x):
            out = layer(x, levanter.Mask.causal())
            return (out * out).sum().array, out

        gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True, allow_int=True))(layer, x)
        return out, gradients

    expected = outputs_and_gradients()
    calls = []
    monkeypatch.setattr(
        attention,
        "dot_product_attention",
        lambda *args, **kwargs: calls.append(1) or dot_product_attention(*args, **kwargs),
    )
    jax.clear_caches()
    assert_same(outputs_and_gradients(), expected)
    assert calls


REFUSALS = {
    "bias": (lambda lev, call: {"bias": call.inputs[0]}, r"can't honour bias: .*use a mask"),
    "dropout": (lambda lev, call: {"dropout": 0.1, "inference": False}, r"can't honour dropout: .*attn_pdrop=0.0"),
    "precision": (lambda lev, call: {"precision": jax.lax.Precision.HIGHEST}, "can't honour precision"),
    "dense": (lambda lev, call: {"use_flash": False}, "can't honour use_flash: it asks for dense"),
    "backend": (lambda lev, call: {"attn_backend": lev.attention.AttentionBackend.SPLASH}, "set attn_backend=None"),
    "block size": (lambda lev, call: {"flash_block_size": 512}, "can't honour flash_block_size"),
    "dense mask": (
        lambda lev, call: {"mask": lev.Mask.causal().materialize(call.axes.position, call.axes.key_position)},
        "dense mask of axes .* would need a T×T array",
    ),
    "explicit mask": (
        lambda lev, call: {
            "mask": lev.Mask.explicit(lev.Mask.causal().materialize(call.axes.position, call.axes.key_position))
        },
        "can't honour mask: its explicit part",
    ),
    "sinks of a batch": (
        lambda lev, call: {
            "attn_sink": call.sinks.broadcast_axis(call.axes.batch),
            "mask": lev.Mask.causal(offset=lev.haliax.zeros(call.axes.batch, dtype=jnp.int32)),
        },
        r"attn_sink differs over \['batch'\]",
    ),
    "window under a moved query": (
        lambda lev, call: {
            "mask": lev.Mask.causal(sliding_window=3, offset=lev.haliax.zeros(call.axes.batch, dtype=jnp.int32))
        },
        "causal_offset that is traced or differs",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals(levanter, call, options, message):
    from layers.adapters.levanter import dot_product_attention

    with pytest.raises(ValueError, match=message):
        dot_product_attention("position", "key_position", "head_size", *call.inputs, **options(levanter, call))


def test_arguments_are_levanters(levanter):
    """An argument that a later levanter adds must not be dropped."""
    import inspect

    from layers.adapters.levanter import dot_product_attention

    own = inspect.signature(dot_product_attention).parameters.values()
    their = inspect.signature(levanter.attention.dot_product_attention).parameters.values()
    assert [(p.name, p.default) for p in own if p.name != "implementation"] == [(p.name, p.default) for p in their]
    import dataclasses

    from layers.adapters.levanter import _MASK_FIELDS

    assert {field.name for field in dataclasses.fields(levanter.Mask)} == _MASK_FIELDS


@pytest.mark.usefixtures("eight_devices")
def test_on_a_mesh(levanter, rng):
    """Batch and key/value heads split by haliax's axis mapping, queries' positions not."""
    import haliax

    from layers.adapters.levanter import dot_product_attention

    def draw(**sizes):
        axes = [haliax.Axis(name, size) for name, size in sizes.items()]
        return haliax.named(jnp.asarray(rng.standard_normal(list(sizes.values())), jnp.float32), axes)

    query = draw(batch=8, kv_head=2, q_heads_per_group=2, position=LENGTH, head_size=HEAD_DIM)
    key, value = (draw(batch=8, kv_head=2, key_position=LENGTH, head_size=HEAD_DIM) for _ in range(2))
    sinks = draw(kv_head=2, q_heads_per_group=2)

    def attend(query, key, value, sinks):
        return dot_product_attention(
            "position", "key_position", "head_size", query, key, value, levanter.Mask.causal(), attn_sink=sinks
        ).array

    expected = attend(query, key, value, sinks)
    mesh = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
    with haliax.partitioning.set_mesh(mesh), haliax.axis_mapping({"batch": "data", "kv_head": "model"}):
        inputs = haliax.shard((query, key, value, sinks))
        compiled = jax.jit(attend).lower(*inputs).compile()
        out = compiled(*inputs)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    assert "all-gather" not in compiled.as_text(), "each device attends to its own part"
    with (
        haliax.partitioning.set_mesh(mesh),
        haliax.axis_mapping({"position": "data"}),
        pytest.raises(ValueError, match="the mesh's data splits 'position'"),
    ):
        jax.jit(attend)(query, key, value, sinks)
