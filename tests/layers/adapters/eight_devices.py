"""Attention in shards over eight devices against one device's; run as a program by test_shards.py.

Prints a JSON object: the largest relative differences of the output and of gradients, and which packages importing
the adapters has imported.
"""

import importlib
import json
import pkgutil
import sys

import jax
import jax.numpy as jnp
import numpy as np

import layers.adapters
from kernels import CausalMask, LocalMask, dot_product_attention
from layers.adapters.shards import attend_in_shards

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 8, 12, 4, 2, 8


def differences(seed: int) -> list[float]:
    """Batch over two axes and heads over one; sinks, documents and positions differ."""
    rng = np.random.default_rng(seed)
    mesh = jax.make_mesh((2, 2, 2), ("replica", "data", "model"), (jax.sharding.AxisType.Auto,) * 3)
    query, key, value = (
        jnp.asarray(rng.standard_normal((BATCH, LENGTH, heads, HEAD_DIM)), jnp.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    documents = jnp.asarray(np.sort(rng.integers(0, 3, (BATCH, LENGTH)), -1))
    options = {
        "query_segment_ids": documents,
        "key_value_segment_ids": documents,
        "query_positions": jnp.arange(LENGTH) + jnp.asarray(rng.integers(0, 3, (BATCH, 1))),
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

        sinks = jnp.linspace(-1.0, 1.0, HEADS)
        return jax.jit(jax.grad(loss, argnums=range(4), has_aux=True))(query, key, value, sinks)

    relative = lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max())  # noqa: E731
    return jax.tree.leaves(jax.tree.map(relative, run(in_shards), run(on_one)))


def main(seed: int) -> None:
    for module in pkgutil.iter_modules(layers.adapters.__path__):
        importlib.import_module(f"layers.adapters.{module.name}")
    packages = {name.partition(".")[0] for name in sys.modules}
    print(json.dumps({"packages": sorted(packages), "differences": differences(seed)}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
