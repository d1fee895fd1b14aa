"""The splash backend, compiled by the TPU compiler for TPUs that aren't here: what it lowers to is what they run."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap

import pytest

from trainer.compile.topology import parse_topology

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: the `tpu` extra, on Linux x86-64"
)

# One process for each TPU generation: libtpu reads its environment once.
COMPILE = textwrap.dedent("""
    import json, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from kernels import *
    from tests.kernels.test_splash_compiles import CASES

    device = topologies.get_topology_desc(topology_name=sys.argv[1], platform="tpu").devices[0]
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())

    def compile_case(mask, length=1024, heads=(4, 2), head_dims=(32, 32), dtype="bfloat16", backward="split", block=256,
                     segments=False, positions=False, bounds="", sinks=False, cap=None, tuning=True):
        def shape(*dims, dtype=dtype):
            return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

        def loss(query, key, value, ids, places, sink_logits):
            output, lse = dot_product_attention(
                query, key, value, eval(mask), device=device, return_lse=True, logits_soft_cap=cap,
                query_segment_ids=ids if segments else None, key_value_segment_ids=ids if segments else None,
                query_positions=places if positions else None,
                key_value_positions=places if positions == "both" else None,
                bounds=Bounds(**dict.fromkeys(bounds.split(), places)), sinks=sink_logits if sinks else None,
                implementation=SplashTuning.square(block, backward=backward) if tuning else None)
            return output.astype(jnp.float32).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

        tokens = shape(2, length, dtype="int32")
        args = (shape(2, length, heads[0], head_dims[0]), shape(2, length, heads[1], head_dims[0]),
                shape(2, length, heads[1], head_dims[1]), tokens, tokens, shape(heads[0], dtype="float32"))
        grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        return grad.trace(*args).lower().compile().as_text().count("tpu_custom_call")

    print(json.dumps({name: compile_case(**CASES[name]) for name in sys.argv[2:]}))
""")

# Narrow heads and small tiles, where nothing else is said: they compile in a third of the time.
CASES = {
    "heads of 128, tiles of 512": {"mask": "CausalMask()", "head_dims": (128, 128), "block": 512},
    "fused": {"mask": "CausalMask()", "backward": "fused"},
    "window, documents": {"mask": "CausalMask() & LocalMask(700, 0)", "segments": True},
    "prefix, soft cap, sinks": {"mask": "CausalMask() | PrefixMask(600)", "cap": 30.0, "sinks": True},
    "complement of chunks": {"mask": "~ChunkedCausalMask(500) | PrefixMask(3)"},
    "no mask, ragged, float32": {"mask": "FullMask()", "length": 1500, "dtype": "float32"},
    "function": {"mask": "MaskFn(lambda q, kv: (kv <= q) & ((q - kv) % 5 == 0))"},
    "array": {"mask": "NumpyMask(np.tri(1024, dtype=bool))"},
    "two masks": {"mask": "MultiHeadMask([CausalMask(), LocalMask(300, 0)] * 2)"},
    "context shard": {"mask": "CausalMask() & LocalMask(700, 0)", "positions": True},
    "keys out of order": {"mask": "CausalMask() & LocalMask(700, 0)", "positions": "both", "segments": True},
    "masks without intervals": {"mask": "MultiHeadMask([~LocalMask(9, 9), CausalMask()] * 2)", "positions": "both"},
    "bounds": {"mask": "CausalMask()", "bounds": "k_start k_end q_start q_end", "positions": True, "segments": True},
    "narrow heads": {"mask": "CausalMask()", "head_dims": (20, 24)},
    "wide heads, own tiles": {"mask": "CausalMask()", "head_dims": (256, 256), "tuning": False},
}


def count_kernels(topology: str, cases: list[str]) -> dict[str, int]:
    """Pallas kernels in the compiled forward and backward of each case."""
    environment = os.environ | parse_topology(topology).environment()
    command = [sys.executable, "-c", COMPILE, topology, *cases]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.full
@pytest.mark.parametrize(
    ("topology", "cases"),
    [("v5p:2x2x1", list(CASES)), ("v6e:2x2", ["wide heads, own tiles"])],
    ids=["v5p", "v6e"],
)
def test_every_feature_compiles(topology, cases):
    kernels = count_kernels(topology, cases)
    assert list(kernels) == cases
    for name, count in kernels.items():
        passes = 2 if CASES[name].get("backward") == "fused" else 3
        assert count == passes, name
