"""Attention over two GPUs that read each other's memory: the kernels, what compiles, and whom the exchange serves.

That it reads what is needed, and computes what NumPy does, test_context.py tests on CPU devices for all exchanges.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import CausalMask, LocalMask, Target
from kernels.context import MeshLayout, Split, attend_over_mesh, choose_exchange, plan_context
from tests.gpu_compiler import needs_gpu_compiler
from tests.kernels.test_context import call_of
from trainer.compile.collectives import count_collectives
from trainer.compile.hlo import parse_module
from trainer.compile.topology import parse_topology

SCRIPT = Path(__file__).parent / "context_on_devices.py"
NEEDS_JAX_0_11 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernels need JAX 0.11")
LENGTH = 131_072
H200 = Target("gpu", "NVIDIA H200", 9.0, 132)
# The kernels' own errors: probabilities are rounded to the dtype before they are multiplied.
TOLERANCES = {"bfloat16": 0.03, "float16": 0.004}


def packed_call(length=LENGTH, **changes):
    return call_of(length=length, num_ranks=2, has_segment_ids=True, target=H200, **changes)


@pytest.mark.gpu
@NEEDS_JAX_0_11
def test_two_gpus_compute_what_numpy_does():
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    num_draws, seed = 6, int(np.random.default_rng().integers(2**31))
    print(f"Inputs: {SCRIPT.name} {seed} {num_draws}")
    command = [sys.executable, SCRIPT, str(seed), str(num_draws)]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == num_draws
    for case in found:
        assert case.get("difference", np.inf) < TOLERANCES[case["sizes"][-1]], case


@needs_gpu_compiler
@NEEDS_JAX_0_11
def test_nothing_but_needed_chunks_and_small_integers_goes_to_the_other_gpu():
    devices = np.array(parse_topology("h200:2").devices()).reshape(1, 1, 2)
    mesh = Mesh(devices, ("data", "tensor", "context"), axis_types=(AxisType.Auto,) * 3)
    layout = MeshLayout(mesh, ("data",), "context", "tensor", "by_cost")
    batch, length, heads, head_dim = 1, 16_384, 4, 64

    def attend(query, key, value, ids, places):
        return attend_over_mesh(
            query, key, value, CausalMask(), layout, segment_ids=ids, places=places, exchange="peer"
        )

    def both(query, key, value, ids, places):
        output, vjp = jax.vjp(lambda *x: attend(*x, ids, places), query, key, value)
        return vjp(output)

    sharding = NamedSharding(mesh, P("data", "context"))
    of_heads = jax.ShapeDtypeStruct((batch, length, heads, head_dim), "bfloat16", sharding=sharding)
    of_tokens = jax.ShapeDtypeStruct((batch, length), "int32", sharding=sharding)
    compiled = jax.jit(both).lower(of_heads, of_heads, of_heads, of_tokens, of_tokens).compile()
    totals = {total.operation: total for total in count_collectives(parse_module(compiled.as_text()))}
    whole_rows = 2 * batch * length * heads * head_dim * 2
    # Keys are brought once, and kept for the backward pass.
    assert totals["gather_chunks"].count == totals["sum_chunks"].count == 1
    assert totals["gather_chunks"].bytes == pytest.approx(whole_rows, rel=0.01)
    others = [total for name, total in totals.items() if name not in ("gather_chunks", "sum_chunks")]
    assert sum(total.bytes for total in others) < 16 * length
    assert " conditional(" not in compiled.as_text()


def test_packed_documents_are_read_from_the_other_gpu():
    by_cost = Split.of("context", 2, "by_cost", LENGTH, None)
    chosen = choose_exchange(packed_call(), by_cost)
    assert chosen.name == "peer"
    gather = choose_exchange(packed_call(), by_cost, "gather").costs["gather"]
    assert chosen.costs["peer"].received_bytes < gather.received_bytes
    plan = plan_context({packed_call(): 1.0}, "context", 2, no_peers=None)
    assert (plan.deal, plan.exchanges[0].name) == ("by_cost", "peer")
    # Nobody says that the ranks reach each other's memory.
    assert plan_context({packed_call(): 1.0}, "context", 2).exchanges[0].name != "peer"


@pytest.mark.parametrize(
    ("call", "no_peers", "reason"),
    [
        (packed_call(), "is for Hopper GPUs", "is for Hopper GPUs"),
        (packed_call(dtype=jnp.dtype("float32")), None, "takes bfloat16 and float16, not float32"),
        (packed_call(3 * 64, num_kv_heads=1, head_dim=64), None, r"8192 numbers, not of 32 tokens × 64 features"),
        (packed_call(3 * 64, num_kv_heads=2, head_dim=128, value_dim=64), None, "32 tokens × 128 features"),
        (packed_call(2 * 4099, mask=LocalMask(99, 0)), None, "at most 8192 chunks, not of 8198"),
    ],
)
def test_whom_the_exchange_cannot_serve_is_told_why(call, no_peers, reason):
    split = Split.of("context", 2, "in_order", 2 * call.q_len, no_peers)
    with pytest.raises(ValueError, match=rf"exchange='peer' can't serve this call: it {reason}|{reason}"):
        choose_exchange(call, split, "peer")
    assert "peer" in choose_exchange(call, split).refusals


def test_devices_that_cannot_reach_each_other_are_refused_by_name():
    mesh = jax.make_mesh((1, 1, 1), ("data", "tensor", "context"), (AxisType.Auto,) * 3, devices=jax.devices()[:1])
    split = MeshLayout(mesh, ("data",), "context", "tensor").split(1024)
    assert split.no_peers == "is for meshes of two devices, both of them along context, not for " + str(
        {"data": 1, "tensor": 1, "context": 1}
    )
