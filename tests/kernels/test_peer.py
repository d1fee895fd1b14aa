"""Attention over a few GPUs that read each other's memory: what is read, the kernels, and whom the exchange serves.

That it computes what NumPy does, test_context_on_devices.py tests on CPU devices for all exchanges, where JAX stands in
for the kernels.
"""

import dataclasses
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import CausalMask, LocalMask, Target
from kernels.call import AttentionInputs
from kernels.context import MeshLayout, Split, attend_over_mesh, choose_exchange, plan_context, shard_sequence
from kernels.context.attention import local_call
from kernels.context.exchanges.peer import GatheredKeys
from kernels.context.exchanges.peer import kernel_call as call_of_kernel
from kernels.plan import make_rows
from layers import GPTConfig
from tests.fresh_inputs import run_on_fresh_inputs
from tests.gpu_compiler import needs_gpu_compiler
from tests.kernels.test_collectives import two
from tests.kernels.test_context import call_of
from trainer.compile.collectives import count_collectives
from trainer.compile.hlo import parse_module
from trainer.compile.topology import parse_topology
from trainer.config import ContextConfig, DataConfig, MeshConfig, TrainConfig
from trainer.errors import UserMistake
from trainer.step.attention_plan import attention_calls, describe_attention, plan_context_parallelism
from trainer.step.plan import make_plan

LENGTH = 131_072
TINY = TrainConfig(name="tiny", num_steps=1000, model=GPTConfig(num_layers=1, num_heads=4, num_kv_heads=4, width=256))
H200 = Target("gpu", "NVIDIA H200", 9.0, 132)
# The kernels' own errors: probabilities are rounded to the dtype before they are multiplied.
TOLERANCES = {"bfloat16": 0.03, "float16": 0.004}


def packed_call(length=LENGTH, **changes):
    return call_of(length=length, num_ranks=2, has_segment_ids=True, target=H200, **changes)


def run_script(name, num_draws, preallocates):
    """What a script prints for fresh draws on two GPUs, or on two and on four."""
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": str(preallocates).lower(), "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}
    done = run_on_fresh_inputs(Path(__file__).parent / name, num_draws, environment=os.environ | memory)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == num_draws
    return found


@pytest.mark.gpu
@pytest.mark.jax_0_11
@pytest.mark.parametrize("preallocates", [True, False])
def test_gpus_read_and_add_up_chunks_as_numpy_does(preallocates):
    assert [draw for draw in run_script("chunks_on_gpus.py", 6, preallocates) if not draw["is_exact"]] == []


@pytest.mark.gpu
@pytest.mark.jax_0_11
@pytest.mark.parametrize("preallocates", [True, False])
def test_gpus_attend_as_numpy_does(preallocates):
    for case in run_script("context_on_devices.py", 6, preallocates):
        assert case.get("difference", np.inf) < TOLERANCES[case["sizes"][-1]], case


@pytest.mark.sample(12)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("sequence_sharding", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize(("has_documents", "is_compact"), [(True, True), (True, False), (False, False)])
def test_what_is_read_is_what_is_needed(num_ranks, sequence_sharding, has_documents, is_compact, rng):
    length, batch, chunk, past_the_last = num_ranks * 2 * 17 * 16, 3, 16, 40
    split = Split.of("context", num_ranks, sequence_sharding, length, None)._replace(
        chunk_size=chunk if sequence_sharding == "balanced" else None
    )
    chunk = split.run_chunk
    # Where ids rise, a chunk is needed just if another rank holds a later one of a document that it has.
    ids = np.sort(rng.integers(0, 20, (batch, length)), axis=1).astype(np.int32)
    if sequence_sharding == "balanced":
        order = np.stack([rng.permutation(length // chunk) for _ in range(batch)])
        token_order = (order[:, :, None] * chunk + np.arange(chunk)).reshape(batch, length).astype(np.int32)
    else:
        token_order = np.broadcast_to(shard_sequence(sequence_sharding, length, num_ranks), (batch, length))
    chunks = token_order[:, ::chunk] // chunk
    local = jnp.zeros((batch, length // num_ranks, 1, 8))
    call = call_of(length=length, num_ranks=num_ranks, batch=batch, has_segment_ids=has_documents, target=H200)

    def tables(ids, token_order):
        inputs = AttentionInputs(
            local, local, local, token_order=token_order if sequence_sharding == "balanced" else None
        )
        inputs = inputs._replace(query_segment_ids=ids if has_documents else None)
        rows = GatheredKeys.of(inputs, call, split, is_compact=is_compact)
        return rows.tables(past_the_last), rows.num_keys, rows.order_of_own

    def of_ranks(x):
        return jnp.asarray(np.moveaxis(x.reshape(batch, num_ranks, -1), 1, 0))

    sharded_ids = np.take_along_axis(ids, token_order, axis=1)
    found, num_keys, order_of_own = jax.tree.map(
        np.asarray, jax.vmap(tables, axis_name="context")(of_ranks(sharded_ids), of_ranks(token_order))
    )
    num_chunks, ranks = length // chunk, range(num_ranks)
    num_own = num_chunks // num_ranks
    for b in range(batch):
        held = chunks[b].reshape(num_ranks, num_own)
        in_chunk = [set(ids[b, c * chunk : (c + 1) * chunk]) if has_documents else {0} for c in range(num_chunks)]

        def attends(readers, c, in_chunk=in_chunk):
            return any(q > c and in_chunk[q] & in_chunk[c] for q in readers)

        # What a rank holds or reads, in the row's order, and all others where rows aren't compact.
        read = [{c for c in {*range(num_chunks)} - {*held[rank].tolist()} if attends(held[rank], c)} for rank in ranks]
        rows = [sorted(read[rank] | {*held[rank].tolist()} if is_compact else range(num_chunks)) for rank in ranks]
        for rank in ranks:
            own, row = held[rank], rows[rank]
            after = [(rank + distance) % num_ranks for distance in ranks]
            of_row, of_own, num_filled = (x[rank, b] if x.ndim > 2 else x[rank] for x in found)
            assert num_keys[rank, b] == len(row) * chunk
            assert num_filled == min(num_keys[rank].max() // chunk + -(-past_the_last // chunk), num_chunks)
            by_distance = np.concatenate([held[other] for other in after])
            assert all(by_distance[of_row[i]] == c for i, c in enumerate(row) if c in {*own} | read[rank])
            assert {c for i, c in enumerate(row) if of_row[i] >= num_own} == read[rank]
            assert (of_row[len(row) :] < num_own).all()
            assert of_own[:, 0].tolist() == [row.index(c) for c in own]
            for distance in ranks[1:]:
                theirs = after[distance]
                there = [rows[theirs].index(c) + 1 if c in read[theirs] else 0 for c in own]
                assert of_own[:, distance].tolist() == there
            first = np.array([row.index(c) for c in own]) * chunk
            assert (order_of_own[rank, b] == (first[:, None] + np.arange(chunk)).ravel()).all()


def test_chunks_that_are_left_out_cut_no_tile_of_a_document(rng):
    length, batch = 16_384, 2
    split = Split.of("context", 2, "balanced", length, None)
    ids = jnp.asarray(np.sort(rng.integers(0, rng.choice([5, 12, 40]), (batch, length)))[:, ::-1], jnp.int32)
    token_order = jnp.asarray(
        np.stack([shard_sequence("balanced", length, 2, masks={CausalMask(): 1.0}, segment_ids=row) for row in ids])
    )
    call = call_of(length=length, num_ranks=2, batch=batch, has_segment_ids=True, target=H200)

    def tiles(rank_ids, rank_order, is_compact):
        local = jnp.zeros((batch, length // 2, 1, 8))
        inputs = AttentionInputs(local, local, local, query_segment_ids=rank_ids, token_order=rank_order)
        rows = GatheredKeys.of(inputs, call, split, is_compact=is_compact)
        inputs = inputs._replace(
            key_value_segment_ids=rows.gather(rank_ids),
            query_positions=rows.order_of_own,
            key_value_positions=jnp.broadcast_to(jnp.arange(length), (batch, length)),
        )
        start, full_start, full_stop, stop = jnp.moveaxis(
            make_rows(inputs, call_of_kernel(call, split), 64, 64).bounds, -1, 0
        )
        return (stop - start).sum(), (full_stop - full_start).sum(), rows.num_keys

    def of_ranks(x):
        return jnp.moveaxis(jnp.take_along_axis(x, token_order, axis=1).reshape(batch, 2, -1), 1, 0)

    sharded = of_ranks(ids), of_ranks(jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length)))
    whole, compact = (
        jax.tree.map(np.asarray, jax.vmap(lambda *x, c=is_compact: tiles(*x, c), axis_name="context")(*sharded))
        for is_compact in (False, True)
    )
    assert (whole[1] > 0).all()
    assert (compact[2] < whole[2]).any()  # some are left out
    np.testing.assert_array_equal(compact[:2], whole[:2])


@pytest.mark.sample(1)
@needs_gpu_compiler
@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    ("remat", "num_gathers", "num_ranks"), [("none", 1, 2), ("save_attention", 2, 2), ("none", 1, 4)]
)
def test_keys_are_brought_once_and_again_only_where_a_layer_is_made_anew(remat, num_gathers, num_ranks):
    devices = np.array(parse_topology(f"h200:{num_ranks}").devices()).reshape(1, 1, num_ranks)
    mesh = Mesh(devices, ("data", "tensor", "context"), axis_types=(AxisType.Auto,) * 3)
    layout = MeshLayout(mesh, ("data",), "context", "tensor", "balanced")
    batch, length, heads, head_dim, num_layers = 1, 16_384, 4, 64, 3

    def loss(weights, hidden, ids, token_order):
        def layer(hidden, weight):
            x = hidden * weight
            attended = attend_over_mesh(
                x, x, x, CausalMask(), layout, segment_ids=ids, token_order=token_order, exchange="peer"
            )
            return hidden + attended, None

        if remat == "save_attention":
            names = jax.checkpoint_policies.save_only_these_names("attention_output", "attention_lse")
            layer = jax.checkpoint(layer, policy=names)
        return jax.lax.scan(layer, hidden, weights)[0].astype(jnp.float32).sum()

    sharding = NamedSharding(mesh, P("data", "context"))
    weights = jax.ShapeDtypeStruct((num_layers, heads, head_dim), "bfloat16", sharding=NamedSharding(mesh, P()))
    hidden = jax.ShapeDtypeStruct((batch, length, heads, head_dim), "bfloat16", sharding=sharding)
    of_tokens = jax.ShapeDtypeStruct((batch, length), "int32", sharding=sharding)
    compiled = jax.jit(jax.grad(loss)).lower(weights, hidden, of_tokens, of_tokens).compile()
    module = parse_module(compiled.as_text())
    totals = {total.operation: total.count for total in count_collectives(module)}
    assert (totals["gather_chunks"], totals["sum_chunks"]) == (num_gathers * num_layers, num_layers)
    # The host chooses no program. A kernel that were called on a slice of the layers' arrays would be told of other
    # memory on the other GPU; it would stand in a fusion.
    opcodes = {i.opcode for computation in module.computations.values() for i in computation.instructions.values()}
    assert "conditional" not in opcodes
    callers = {
        called: instruction.opcode
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        for called in instruction.called()
    }
    where = {
        name
        for name, computation in module.computations.items()
        for instruction in computation.instructions.values()
        if re.search("gather_chunks|sum_chunks", instruction.op_name) and instruction.opcode == "custom-call"
    }
    assert where
    assert {callers.get(name, "entry") for name in where} <= {"while", "entry"}


def test_packed_documents_are_read_from_the_other_gpu():
    by_cost = Split.of("context", 2, "balanced", LENGTH, None)
    chosen = choose_exchange(packed_call(), by_cost)
    assert chosen.name == "peer"
    gather = choose_exchange(packed_call(), by_cost, "all_gather").costs["all_gather"]
    assert chosen.costs["peer"].received_bytes < gather.received_bytes
    plan = plan_context({packed_call(): 1.0}, "context", 2, peer_refusal=None)
    assert (plan.sequence_sharding, plan.exchanges[0].name) == ("balanced", "peer")
    # Over four, too.
    four = call_of(length=LENGTH, num_ranks=4, has_segment_ids=True, target=H200)
    plan = plan_context({four: 1.0}, "context", 4, peer_refusal=None)
    assert (plan.sequence_sharding, plan.exchanges[0].name) == ("balanced", "peer")
    # Nobody says that the ranks reach each other's memory.
    assert plan_context({packed_call(): 1.0}, "context", 2).exchanges[0].name != "peer"


@pytest.mark.parametrize(
    ("call", "peer_refusal", "reason"),
    [
        (packed_call(), "is for Hopper GPUs", "is for Hopper GPUs"),
        (packed_call(dtype=jnp.dtype("float32")), None, "takes bfloat16 and float16, not float32"),
        (
            packed_call(3 * 64, num_kv_heads=1, head_dim=64),
            None,
            "takes chunks of a multiple of 8192 numbers, not of 32 tokens × 64 features; a length that a larger power",
        ),
        (
            packed_call(3 * 64, num_kv_heads=2, head_dim=128, value_dim=64),
            None,
            "takes chunks of a multiple of 8192 numbers, not of 32 tokens × 128 features",
        ),
        (
            packed_call(2 * 4099, mask=LocalMask(99, 0)),
            None,
            "takes rows of at most 8192 chunks, not of 8198; a length",
        ),
    ],
)
def test_whom_the_exchange_cannot_serve_is_told_why(call, peer_refusal, reason):
    split = Split.of("context", 2, "contiguous", 2 * call.q_len, peer_refusal)
    with pytest.raises(ValueError, match=rf"^exchange='peer' can't serve this call: it {reason}"):
        choose_exchange(call, split, "peer")
    assert choose_exchange(call, split).refusals["peer"].startswith(reason)


def test_more_ranks_than_four_are_refused_before_devices_are_known():
    call = call_of(length=LENGTH, num_ranks=8, has_segment_ids=True, target=H200)
    with pytest.raises(ValueError, match="exchange='peer' can't serve this call: it is for at most 4 ranks, not for 8"):
        plan_context({call: 1.0}, "context", 8, exchange="peer", peer_refusal=None)
    mesh, context = MeshConfig(data=2, context=2), ContextConfig(exchange="peer")
    four = dataclasses.replace(TINY, mesh=mesh, context=context, batch_size=2, gradient_accumulation=1)
    with pytest.raises(
        UserMistake, match=r"it is for meshes of 2 to 4 devices, all of them along context, not for .*2"
    ):
        plan_context_parallelism(four, None)


@pytest.mark.jax_0_11
def test_the_trainer_plans_what_the_layers_choose():
    config = dataclasses.replace(
        TINY,
        mesh=MeshConfig(context=2),
        data=DataConfig(keep_documents_apart=True),
        sequence_length=LENGTH,
        batch_size=1,
        gradient_accumulation=1,
    )
    mesh = SimpleNamespace(
        size=2,
        shape={"data": 1, "fsdp": 1, "tensor": 1, "context": 2},
        axis_names=("data", "fsdp", "tensor", "context"),
        devices=np.array([SimpleNamespace(**vars(gpu) | {"device_kind": "NVIDIA H200"}) for gpu in two()]).reshape(
            1, 1, 1, 2
        ),
    )
    (plan,) = make_plan(config, mesh).attention
    assert plan.exchange.name == "peer"
    layout = MeshLayout(mesh, ("data", "fsdp"), "context", "tensor", plan.exchange.sequence_sharding)
    (call,) = attention_calls(config, Target.of(mesh.devices.flat[0]))
    whole = call._replace(q_len=config.sequence_length, kv_len=config.sequence_length)
    assert local_call(layout, whole, None, None)[0] == "peer"
    mesh.devices = mesh.devices[..., ::-1]
    (plan,) = make_plan(config, mesh).attention
    assert plan.exchange.name != "peer"
    assert "  peer passed over: is for the process's first 2 GPUs in their order, not for [1, 0]" in describe_attention(
        [plan]
    )


def test_devices_that_cannot_reach_each_other_are_refused_by_name():
    mesh = jax.make_mesh((1, 1, 1), ("data", "tensor", "context"), (AxisType.Auto,) * 3, devices=jax.devices()[:1])
    split = MeshLayout(mesh, ("data",), "context", "tensor").split(1024)
    assert split.peer_refusal == "is for meshes of 2 to 4 devices, all of them along context, not for " + str(
        {"data": 1, "tensor": 1, "context": 1}
    )
