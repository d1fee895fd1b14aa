"""Shared by all adapters: attention in shards of a mesh, and modules that import none of the packages."""

import importlib.util
import pkgutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import layers.adapters
from kernels import CausalMask, LocalMask, dot_product_attention
from layers.adapters.shards import attend_in_shards

ADAPTED = {"bonsai", "gemma", "haliax", "levanter", "maxtext"}


@pytest.mark.usefixtures("eight_devices")
def test_shards_give_what_one_device_gives(rng):
    """Batch over two axes and heads over one; sinks, documents and positions differ."""
    batch, length, num_heads, num_kv_heads, head_dim = 8, 12, 4, 2, 8
    mesh = jax.make_mesh((2, 2, 2), ("replica", "data", "model"), (AxisType.Auto,) * 3, devices=jax.devices()[:8])
    query, key, value = (
        jnp.asarray(rng.standard_normal((batch, length, heads, head_dim)), jnp.float32)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    documents = jnp.asarray(np.sort(rng.integers(0, 3, (batch, length)), -1))
    options = {
        "query_segment_ids": documents,
        "key_value_segment_ids": documents,
        "query_positions": jnp.arange(length) + jnp.asarray(rng.integers(0, 3, (batch, 1))),
        "logits_soft_cap": 2.0,
        "implementation": "reference",
    }
    mask = CausalMask() & LocalMask(5, 0)

    def in_shards(query, key, value, sinks):
        return attend_in_shards(mesh, ("replica", "data"), ("model",), query, key, value, mask, sinks=sinks, **options)

    def on_one(query, key, value, sinks):
        return dot_product_attention(query, key, value, mask, sinks=sinks, **options)

    def run(attend):
        def loss(*inputs):
            out = attend(*inputs)
            return jnp.square(out).sum(), out

        sinks = jnp.linspace(-1.0, 1.0, num_heads)
        return jax.tree.leaves(jax.jit(jax.grad(loss, argnums=range(4), has_aux=True))(query, key, value, sinks))

    for found, expected in zip(run(in_shards), run(on_one), strict=True):
        assert jnp.abs(found - expected).max() < 1e-5 * jnp.abs(expected).max()


def test_adapters_import_no_package(monkeypatch):
    sought = set()

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            sought.add(name.partition(".")[0])

    for name in [name for name in sys.modules if name.partition(".")[0] in ADAPTED]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    adapters = {module.name for module in pkgutil.iter_modules(layers.adapters.__path__)}
    assert {"levanter", "maxtext", "shards"} <= adapters
    for name in adapters:
        spec = importlib.util.find_spec(f"layers.adapters.{name}")
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert not ADAPTED & sought
    importlib.util.find_spec("bonsai")
    assert "bonsai" in sought


@pytest.mark.parametrize(
    ("batch", "num_heads", "num_kv_heads", "message"),
    [
        (3, 4, 2, "batch size 3 is not a multiple of the mesh's data=2; change one of them"),
        (2, 3, 1, "number of query heads 3 is not a multiple of the mesh's model=2"),
        (2, 4, 1, "number of key/value heads 1 is not a multiple of the mesh's model=2"),
    ],
)
def test_refuses_what_does_not_divide(batch, num_heads, num_kv_heads, message):
    query, key = jnp.ones((batch, 4, num_heads, 8)), jnp.ones((batch, 4, num_kv_heads, 8))
    with pytest.raises(ValueError, match=message):
        attend_in_shards(AbstractMesh((2, 2), ("data", "model")), ("data",), ("model",), query, key, key, CausalMask())
