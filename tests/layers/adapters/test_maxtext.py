"""The MaxText recipe against MaxText's own dense attention: its `AttentionOp`, and its attention layer."""

import functools
import importlib.metadata
import importlib.util
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("maxtext") is None, reason="MaxText isn't installed: docs/adapters/maxtext.md says how"
)

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 12, 4, 2, 8


def test_the_version_is_the_one_that_was_tried():
    """With another version, run these tests first, then set TRIED_WITH."""
    import maxtext_recipe

    assert importlib.metadata.version("maxtext") == maxtext_recipe.TRIED_WITH


@pytest.fixture(scope="module")
def op_module():
    from maxtext.layers import attention_op

    return attention_op


@pytest.fixture(scope="module")
def make_config(op_module, tmp_path_factory):
    import maxtext
    from maxtext.configs import pyconfig

    @functools.cache
    def make(**changes):
        settings = {
            "run_name": "test",
            "base_output_directory": str(tmp_path_factory.mktemp("maxtext")),
            "enable_checkpointing": False,
            "skip_jax_distributed_system": True,
            "per_device_batch_size": BATCH / jax.device_count(),
            "max_target_length": LENGTH,
            "base_emb_dim": 16,
            "base_num_query_heads": HEADS,
            "base_num_kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "dtype": "float32",
            "weight_dtype": "float32",
        }
        base = Path(maxtext.__file__).parent / "configs" / "base.yml"
        return pyconfig.initialize(["", str(base)], **(settings | changes))

    return make


def make_mesh(config, **sizes):
    sizes = [sizes.get(axis, 1) for axis in config.mesh_axes]
    return jax.sharding.Mesh(np.asarray(jax.devices()[: np.prod(sizes)]).reshape(sizes), config.mesh_axes)


@pytest.fixture
def make_op(op_module, make_config):
    def make(config=None, mesh=None, **changes):
        config = make_config() if config is None else config
        mesh = make_mesh(config) if mesh is None else mesh
        options = {"attention_kernel": "autoselected", "num_query_heads": HEADS, "num_kv_heads": KV_HEADS}
        return op_module.AttentionOp(config, mesh, max_target_length=LENGTH, **(options | changes))

    return make


@pytest.fixture
def arrays(rng):
    shapes = [(BATCH, LENGTH, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    query, key, value, cotangent = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    return types.SimpleNamespace(
        inputs=(query, key, value),
        cotangent=cotangent,
        segment_ids=jnp.asarray(np.sort(rng.integers(1, 4, (BATCH, LENGTH)), -1)),
    )


def run(op, arrays, segment_ids=None, **options):
    """The output, and the gradients for query, key and value."""

    @jax.jit
    def loss(inputs):
        out = op(*inputs, segment_ids, None, "train", **options)
        return (out * arrays.cotangent).sum(), out

    gradients, out = jax.grad(loss, has_aux=True)(arrays.inputs)
    return out, gradients


@pytest.fixture
def ours(op_module, monkeypatch):
    """Runs with the one line of docs/adapters/maxtext.md, and counts calls, of the reference by default."""
    from maxtext_recipe import apply_attention

    def attend(op, arrays, *args, implementation="reference", **options):
        with monkeypatch.context() as patch:
            patch.setattr(
                op_module.AttentionOp,
                "apply_attention",
                functools.partialmethod(apply_attention, implementation=implementation),
            )
            return run(op, arrays, *args, **options)

    return attend


def assert_same(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


KINDS = {
    "global": {},
    "window": {"attention_type": "local_sliding", "sliding_window_size": 4},
    "chunks": {"attention_type": "chunk", "chunk_attn_window_size": 5},
    "full": {"attention_type": "full"},
    "soft cap": {"attn_logits_soft_cap": 2.0},
    "soft cap of 0": {"attn_logits_soft_cap": 0.0},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_attention_types(make_op, arrays, ours, kind, packed):
    segment_ids = arrays.segment_ids if packed else None
    op = make_op(**kind)
    assert_same(ours(op, arrays, segment_ids), run(op, arrays, segment_ids))


def test_mla(make_op, arrays, ours):
    """Values of another head dim than keys."""
    query, key, value = arrays.inputs
    arrays = types.SimpleNamespace(inputs=(query, key, value[..., :6]), cotangent=arrays.cotangent[..., :6])
    op = make_op(attention_type="mla")
    assert_same(ours(op, arrays), run(op, arrays))


def test_prefill(make_op, arrays):
    from maxtext_recipe import apply_attention

    op = make_op()
    call = (*arrays.inputs, arrays.segment_ids, None, None, "prefill")
    einsums = {"qk_product_einsum": jnp.einsum, "wv_product_einsum": jnp.einsum}
    out, _, row_sum = op.apply_attention(*call, **einsums)
    assert_same(apply_attention(op, *call, **einsums)[0], out / row_sum)


def test_keys_of_negative_documents_are_hidden(make_op, arrays, ours):
    """MaxText's output of queries with nothing to attend to is the mean of all values; ours is 0."""
    op, segment_ids = make_op(), arrays.segment_ids.at[:, -3:].set(-1)
    out, _ = ours(op, arrays, segment_ids)
    np.testing.assert_allclose(out[:, :-3], run(op, arrays, segment_ids)[0][:, :-3], rtol=1e-4, atol=2e-5)
    assert not np.any(out[:, -3:])


REFUSALS = {
    "kernel": ({"attention_kernel": "dot_product"}, {}, "can't honour attention=dot_product; expected autoselected"),
    "dropout": ({"dropout_rate": 0.1}, {}, "can't honour dropout_rate=0.1"),
    "images": ({}, {"bidirectional_mask": jnp.ones((BATCH, LENGTH), bool)}, "can't honour bidirectional_mask"),
    "sinks": ({}, {"sinks": jnp.zeros(HEADS)}, "can't honour sinks"),
    "QK-clip": ({}, {"record_max_logits": True}, "can't honour record_max_logits=True"),
    "padded keys": ({}, {"pad_kv_total": 2}, "can't honour pad_kv_total"),
    "window without a size": ({"attention_type": "local_sliding"}, {}, "local_sliding or chunk with its size"),
    "compressed": ({"attention_type": "compressed"}, {}, "expected attention_type global, .*COMPRESSED"),
}


@pytest.mark.parametrize(("op", "options", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals(make_op, arrays, ours, op, options, message):
    with pytest.raises(ValueError, match=message):
        ours(make_op(**op), arrays, **options)


def test_decoding_is_refused(make_op, arrays):
    from maxtext_recipe import apply_attention

    einsums = {"qk_product_einsum": jnp.einsum, "wv_product_einsum": jnp.einsum}
    with pytest.raises(ValueError, match="can't honour model_mode=autoregressive; expected train or prefill"):
        apply_attention(make_op(), *arrays.inputs, None, None, None, "autoregressive", **einsums)
    with pytest.raises(ValueError, match="can't honour qk_product_einsum"):
        apply_attention(
            make_op(), *arrays.inputs, None, None, None, "train", **(einsums | {"qk_product_einsum": jnp.dot})
        )


@pytest.mark.usefixtures("eight_devices")
def test_on_a_mesh(make_op, make_config, rng, ours):
    """Batch over fsdp and heads over tensor by MaxText's own logical rules, tokens not."""
    from flax.linen import partitioning

    config = make_config()
    shapes = [(8, LENGTH, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    query, key, value, cotangent = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    arrays = types.SimpleNamespace(inputs=(query, key, value), cotangent=cotangent)
    segment_ids = jnp.asarray(np.sort(rng.integers(1, 4, (8, LENGTH)), -1))
    expected = run(make_op(), arrays, segment_ids)
    op = make_op(mesh=make_mesh(config, fsdp=4, tensor=2))
    with partitioning.axis_rules(config.logical_axis_rules):
        assert_same(ours(op, arrays, segment_ids), expected)
        jaxpr = str(jax.make_jaxpr(lambda *inputs: ours(op, arrays, segment_ids)[0])(query))
    assert "shard_map" in jaxpr
    with (
        partitioning.axis_rules(config.logical_axis_rules),
        pytest.raises(ValueError, match="splits batch and heads alone"),
    ):
        ours(make_op(mesh=make_mesh(config, context=2)), arrays, segment_ids)
