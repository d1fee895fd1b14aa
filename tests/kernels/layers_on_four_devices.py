"""Gradients through a scan over layers whose attention lies on four CPU devices, against one device's; run as a program
by test_context.py.

Prints a JSON line for each exchange: its name, and the largest difference of a gradient relative to the largest value.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from kernels import CausalMask, LocalMask, dot_product_attention
from kernels.context import MeshLayout, attend_over_mesh
from kernels.context.exchange import EXCHANGES

BATCH, LENGTH, NUM_HEADS, HEAD_DIM, NUM_LAYERS = 2, 64, 4, 8, 3
MASK = CausalMask() & LocalMask(13, 0)


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng()
    weights, hidden = (
        rng.standard_normal((NUM_LAYERS, HEAD_DIM)),
        rng.standard_normal((BATCH, LENGTH, NUM_HEADS, HEAD_DIM)),
    )
    documents = np.cumsum(rng.random((BATCH, LENGTH)) < 0.1, axis=1, dtype=np.int32)
    layout = MeshLayout(
        jax.make_mesh((1, 2, 2), ("data", "tensor", "context"), (AxisType.Auto,) * 3), ("data",), "context", "tensor"
    )

    def gradients(attend):
        # Documents are the same in all layers: what follows from them alone, JAX takes out of the scan.
        def loss(weights, hidden, documents):
            def layer(hidden, weight):
                return hidden + attend(hidden * weight, hidden, hidden, documents), None

            return jnp.square(jax.lax.scan(layer, hidden, weights)[0]).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(weights, hidden, documents)

    def on_one_device(query, key, value, documents):
        options = {"query_segment_ids": documents, "key_value_segment_ids": documents}
        return dot_product_attention(query, key, value, MASK, implementation="reference", **options)

    expected = gradients(on_one_device)
    for exchange in (name for name in EXCHANGES if name != "peer"):  # which is for two GPUs

        def on_mesh(query, key, value, documents, exchange=exchange):
            return attend_over_mesh(query, key, value, MASK, layout, segment_ids=documents, exchange=exchange)

        found = gradients(on_mesh)
        differences = [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(found, expected, strict=True)]
        print(json.dumps({"exchange": exchange, "difference": float(np.max(differences))}), flush=True)


if __name__ == "__main__":
    main()
