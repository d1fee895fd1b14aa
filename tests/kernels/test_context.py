"""Attention over a mesh: what each exchange moves, which is chosen, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from kernels import Bounds, CausalMask, FullMask, LocalMask, MultiHeadMask, PrefixMask, Target, select_backend
from kernels.call import AttentionCall
from kernels.context import (
    MeshLayout,
    Split,
    attend_over_mesh,
    choose_exchange,
    kernel_call,
    plan_context,
    shard_sequence,
)
from kernels.context.costs import exchange_cost, memory_bytes
from kernels.context.exchanges.halo import Runs, unused_id
from kernels.context.exchanges.ring import add_sinks

CAUSAL, WINDOW = CausalMask(), CausalMask() & LocalMask(4095, 0)


def call_of(mask=CAUSAL, *, length=131_072, num_ranks=8, num_heads=16, num_kv_heads=16, kind="NVIDIA H200", **changes):
    """What attention asks of each device."""
    call = AttentionCall(
        batch=1,
        q_len=length // num_ranks,
        kv_len=length // num_ranks,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        value_dim=128,
        dtype=jnp.dtype(jnp.bfloat16),
        mask=mask,
        scale=1.0,
        logits_soft_cap=None,
        has_sinks=False,
        has_segment_ids=False,
        has_query_positions=False,
        has_key_value_positions=False,
        return_lse=False,
        target=Target("tpu" if "TPU" in kind else "gpu", kind),
    )
    return call._replace(**changes)


def on_ranks(num_ranks, function, *arguments):
    """The jaxpr of a function of local arrays, on a mesh that needs no devices."""
    mesh = jax.sharding.AbstractMesh((num_ranks,), ("context",), axis_types=(AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, "context")
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return str(jax.make_jaxpr(mapped)(*arguments))


@pytest.mark.parametrize(("sequence_sharding", "num_runs"), [("contiguous", 1), ("zigzag", 2)])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_halo_moves_nothing_but_the_windows_neighbours(sequence_sharding, num_runs, num_ranks):
    length, num_tokens = 4096, 256
    call = call_of(CausalMask() & LocalMask(200, 0), length=length, num_ranks=num_ranks)
    split = Split.of("context", num_ranks, sequence_sharding, length)

    text = on_ranks(num_ranks, Runs(call, split).with_halos, jax.ShapeDtypeStruct((1, length, 16, 128), jnp.bfloat16))
    moved = [line for line in text.splitlines() if "ppermute" in line]
    # A run gets its neighbour's last tokens, in whole tiles. Two halves of a zigzag may come from different slots.
    assert num_runs <= len(moved) <= num_runs + (sequence_sharding == "zigzag")
    assert all(f"bf16[1,{num_tokens},16,128]" in line for line in moved)
    forward, backward = exchange_cost("halo", call, split).received_bytes
    minimum = num_runs * num_tokens * 16 * 256 * 2
    assert forward == minimum
    assert backward == 2 * minimum  # the keys again, and gradients back


@pytest.mark.parametrize(
    ("name", "sequence_sharding", "mask", "received"),
    # Of attention alone on four GPUs, without remat: context_attention_h100.jsonl, and of windows
    # context_attention_h200.jsonl. The halo was read from the neighbours' memory.
    [
        ("all_to_all", "contiguous", CAUSAL, 806_879_232),
        ("all_gather", "zigzag", CAUSAL, 2_415_919_104),
        ("ring", "zigzag", CAUSAL, 3_221_880_832),
        ("halo", "contiguous", WINDOW, 67_108_864),
        ("all_gather", "contiguous", WINDOW, 301_989_888),
        ("all_gather", "zigzag", WINDOW, 603_979_776),
    ],
)
def test_the_bytes_that_are_received_are_those_of_traces(name, sequence_sharding, mask, received):
    split = Split.of("context", 4, sequence_sharding, 131_072, None)
    cost = exchange_cost(name, call_of(mask, num_ranks=4), split, remat=False)
    assert sum(cost.received_bytes) == pytest.approx(received, rel=1e-3)


def test_an_id_that_no_token_has_is_found_even_at_the_ends_of_int32(rng):
    lowest, highest = -(2**31), 2**31 - 1
    ids = np.stack([np.arange(5) + lowest, rng.permutation([lowest, highest, 0, lowest + 1, lowest + 3])]).astype(
        np.int32
    )
    found = np.asarray(unused_id(jnp.asarray(ids)))
    assert [found[row] in ids[row] for row in range(2)] == [False, False]
    assert found.tolist() == [lowest + 5, lowest + 2]


@pytest.mark.parametrize(
    ("mask", "has_documents", "num_ranks", "reach_each_other", "sequence_sharding", "exchange"),
    # The fastest rows of context_attention_h*.jsonl and train_meshes_h*.jsonl.
    [
        (CAUSAL, False, 2, True, "contiguous", "all_to_all"),
        (CAUSAL, False, 4, True, "contiguous", "all_to_all"),
        (WINDOW, False, 4, True, "contiguous", "halo"),
        (WINDOW, False, 4, False, "contiguous", "halo"),
        (CAUSAL, True, 2, True, "balanced", "peer"),
        (CAUSAL, True, 4, True, "balanced", "peer"),
        (CAUSAL, True, 2, False, "contiguous", "all_to_all"),
        (CAUSAL, True, 4, False, "contiguous", "all_to_all"),
    ],
)
def test_the_exchange_that_was_fastest_is_chosen(
    mask, has_documents, num_ranks, reach_each_other, sequence_sharding, exchange
):
    call = call_of(mask, num_ranks=num_ranks, has_segment_ids=has_documents)
    refusal = None if reach_each_other else "is for GPUs that reach each other"
    plan = plan_context({call: 12.0}, "context", num_ranks, peer_refusal=refusal)
    assert (plan.sequence_sharding, plan.exchanges[0].name) == (sequence_sharding, exchange)


def test_heads_that_do_not_divide_are_gathered():
    split = Split.of("context", 8, "zigzag", 131_072)
    assert choose_exchange(call_of(), split).name == "all_to_all"
    # Three key/value heads don't divide by eight, nor eight by three.
    chosen = choose_exchange(call_of(num_heads=12, num_kv_heads=3), split)
    assert chosen.name == "all_gather"
    assert "12 don't divide by 8 ranks" in chosen.refusals["all_to_all"]


@pytest.mark.parametrize(("reach", "exchange"), [(16_384, "halo"), (16_385, "all_to_all")])
def test_a_window_past_the_neighbours_gets_whole_sequences(reach, exchange):
    split = Split.of("context", 8, "contiguous", 131_072)
    assert choose_exchange(call_of(CausalMask() & LocalMask(reach, 0)), split).name == exchange


def test_keys_that_do_not_fit_travel_round_a_ring():
    length = 4 * 2**20
    call = call_of(length=length, num_heads=12, num_kv_heads=12, kind="NVIDIA H100 80GB HBM3")
    split = Split.of("context", 8, "zigzag", length)
    costs = choose_exchange(call, split).costs
    assert not costs["all_gather"].fits
    assert costs["ring"].held_bytes < costs["all_gather"].held_bytes / 3
    assert choose_exchange(call, split).name == "ring"


def test_an_exchange_whose_kernel_the_fastest_backend_does_not_serve_is_passed_over():
    # Whole rows of a million tokens have more tiles than splash can list; a rank's own queries have fewer.
    call = call_of(length=2**20, num_ranks=16, kind="TPU v5")
    split = Split.of("context", 16, "zigzag", 2**20)
    chosen = choose_exchange(call, split)
    assert chosen.name == "ring"
    assert "served by blockwise, and not by splash" in chosen.refusals["all_to_all"]
    assert choose_exchange(call, split, "all_to_all").name == "all_to_all"


@pytest.mark.parametrize("exchange", ["all_gather", "ring", "all_to_all"])
def test_a_backend_that_gives_no_lse_is_never_a_kernel_of_an_exchange(exchange):
    # On a GPU before Hopper cuDNN would serve whole causal rows, and come before the kernels that give an lse.
    call = call_of()._replace(target=Target("gpu", "NVIDIA A100-SXM4-80GB", 8.0, 108))
    split = Split.of("context", 8, "contiguous", 131_072)
    whole = call._replace(q_len=131_072, kv_len=131_072)
    assert select_backend(whole).name == "cudnn"
    assert select_backend(kernel_call(exchange, call, split)).name in ("triton", "blockwise")


def test_a_named_exchange_is_used_or_refused_with_the_reason():
    split = Split.of("context", 8, "contiguous", 131_072)
    assert choose_exchange(call_of(), split, "ring").name == "ring"
    with pytest.raises(
        ValueError, match=r"exchange='halo' can't serve this call: it needs a mask that reaches only so"
    ):
        choose_exchange(call_of(), split, "halo")
    with pytest.raises(ValueError, match=r"neither do 6 divide by 8 ranks nor the ranks by them"):
        choose_exchange(call_of(num_heads=48, num_kv_heads=6), split, "all_to_all")
    with pytest.raises(ValueError, match=r"heads.*can't have masks of their own"):
        choose_exchange(call_of(MultiHeadMask([CAUSAL, WINDOW] * 8)), split, "all_to_all")
    with pytest.raises(
        ValueError, match="exchange='rings' is not one of all_gather, peer, halo, ring, all_to_all, or None"
    ):
        choose_exchange(call_of(), split, "rings")
    with pytest.raises(ValueError, match="would be all of the sequence"):
        choose_exchange(call_of(CausalMask() & LocalMask(130_000, 0)), split, "halo")


def test_a_sharding_is_chosen_together_with_the_exchanges():
    plan = functools.partial(plan_context, axis="context", num_ranks=8)
    # Whole rows on every rank: there is nothing to shard.
    assert plan({call_of(): 4.0, call_of(WINDOW): 20.0}).sequence_sharding == "contiguous"
    assert [each.name for each in plan({call_of(): 4.0, call_of(WINDOW): 20.0}).exchanges] == ["all_to_all", "halo"]
    odd = {"num_heads": 12, "num_kv_heads": 3}
    assert plan({call_of(**odd): 4.0}).sequence_sharding == "zigzag"
    assert plan({call_of(**odd, has_segment_ids=True): 4.0}).sequence_sharding == "balanced"
    assert plan({call_of(FullMask(), **odd): 4.0}).sequence_sharding == "contiguous"
    # A name is kept to.
    assert plan({call_of(): 4.0}, exchange="all_gather").sequence_sharding == "zigzag"
    assert (
        plan({call_of(): 4.0}, exchange="all_gather", sequence_sharding="contiguous").sequence_sharding == "contiguous"
    )
    assert {each.name for each in plan({call_of(): 4.0}, exchange="ring").exchanges} == {"ring"}
    with pytest.raises(ValueError, match="exchange='halo' can't serve"):
        plan({call_of(): 4.0}, exchange="halo")
    with pytest.raises(ValueError, match="not a multiple of twice 8 ranks"):
        plan_context({call_of(length=1000, num_ranks=8): 1.0}, "context", 8, sequence_sharding="zigzag")


def test_calls_of_one_mask_weigh_together_by_the_features_of_their_heads(monkeypatch):
    weighed = []
    monkeypatch.setattr(
        "kernels.context.plan.choose_sequence_sharding",
        lambda masks, *_, **__: weighed.append(dict(masks)) or "balanced",
    )
    # None of these heads divide by eight, so that no call gets whole sequences.
    call = functools.partial(call_of, length=2048, num_heads=12, num_kv_heads=12)
    calls = {call(): 4.0, call(WINDOW): 20.0, call(num_kv_heads=3): 3.0, call(head_dim=256): 1.5}
    assert len(plan_context(calls, "context", 8).exchanges) == 4
    assert weighed == [{CAUSAL: 10.0, WINDOW: 20.0}]


@pytest.mark.parametrize(
    ("kind", "size"), [("NVIDIA H200", 141e9), ("NVIDIA H100 80GB HBM3", 80e9), ("TPU v5", 95e9), ("TPU v5 lite", 16e9)]
)
def test_the_memory_of_accelerators_is_known(kind, size):
    assert memory_bytes(Target("gpu", kind)) == size


def test_sharded_tokens_without_their_order_are_refused():
    mesh = jax.sharding.AbstractMesh((1, 1, 2), ("data", "tensor", "context"), axis_types=(AxisType.Auto,) * 3)
    x = jnp.ones((1, 64, 4, 8))
    with pytest.raises(ValueError, match="sequence_sharding='balanced' needs the order of the tokens"):
        attend_over_mesh(x, x, x, CAUSAL, MeshLayout(mesh, ("data",), "context", "tensor", "balanced"))


def test_keys_of_other_tokens_than_the_queries_are_refused():
    mesh = jax.sharding.AbstractMesh((1, 1, 2), ("data", "tensor", "context"), axis_types=(AxisType.Auto,) * 3)
    query, key = jnp.ones((1, 64, 4, 8)), jnp.ones((1, 32, 4, 8))
    with pytest.raises(ValueError, match="tokens to each other, got 64 queries and 32 keys; use kernels"):
        attend_over_mesh(query, key, key, CAUSAL, MeshLayout(mesh, ("data",), "context", "tensor"))


def test_an_order_that_is_not_of_whole_chunks_is_refused():
    mesh = jax.sharding.AbstractMesh((1, 1, 2), ("data", "tensor", "context"), axis_types=(AxisType.Auto,) * 3)
    layout, x = MeshLayout(mesh, ("data",), "context", "tensor", "balanced"), jnp.ones((1, 64, 4, 8))
    for token_order in (
        shard_sequence("zigzag", 64, 2),
        shard_sequence("balanced", 64, 2, masks={CAUSAL: 1.0}, chunk_size=8),
    ):
        with pytest.raises(ValueError, match="token_order isn't of chunks of 32 tokens that follow one another"):
            attend_over_mesh(x, x, x, CAUSAL, layout, token_order=token_order[None])


def test_bounds_and_an_order_that_does_not_rise_on_a_rank_are_refused():
    mesh = jax.sharding.AbstractMesh((1, 1, 2), ("data", "tensor", "context"), axis_types=(AxisType.Auto,) * 3)
    layout, x = MeshLayout(mesh, ("data",), "context", "tensor", "balanced"), jnp.ones((1, 96, 4, 8))
    bounds = Bounds(q_end=jnp.arange(96)[None])
    token_order = np.arange(96).reshape(6, 16)[[1, 0, 2, 3, 4, 5]].reshape(1, 96)
    with pytest.raises(ValueError, match="token_order doesn't rise within each rank, which bounds need"):
        attend_over_mesh(x, x, x, CAUSAL, layout, token_order=token_order, bounds=bounds)


@pytest.mark.parametrize("sink", [np.inf, np.nan])
def test_a_ring_hides_no_sink_that_is_not_a_number(sink, rng):
    output, lse = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 5, 2, 4), (1, 5, 2)))
    lse = lse.at[0, 3].set(-jnp.inf)  # a query that attends to nothing
    found = add_sinks((jnp.where(lse[..., None] == -jnp.inf, 0, output), lse), jnp.asarray([sink, 0.5], jnp.float32))
    attends = np.arange(5) != 3
    for each in found:
        assert np.isnan(each[0, attends, 0]).all()
        assert not np.isnan(each[0, :, 1]).any()
        assert not np.isnan(each[0, 3]).any()


@pytest.mark.jax_0_11
def test_mosaic_gpu_is_differentiated_in_a_scan_over_a_mesh(monkeypatch):
    # Traced for a GPU that isn't there. The kernels' references must not be taken out of the scan.
    monkeypatch.setattr(Target, "of", staticmethod(lambda device: Target("gpu", "NVIDIA H200", 9.0, 132)))
    mesh = jax.make_mesh((1, 1, 1), ("data", "tensor", "context"), (AxisType.Auto,) * 3, devices=jax.devices()[:1])
    layout = MeshLayout(mesh, ("data",), "context", "tensor")
    mask = CausalMask() & LocalMask(100, 0)

    @jax.checkpoint
    def layer(x, _):
        return x + attend_over_mesh(x, x, x, mask, layout, implementation="mosaic_gpu"), None

    def loss(x):
        return jax.lax.scan(layer, x, length=2)[0].astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    assert jax.eval_shape(jax.grad(loss), x).shape == x.shape


def test_a_prefix_is_no_window():
    assert (
        choose_exchange(call_of(CAUSAL | PrefixMask(100)), Split.of("context", 8, "contiguous", 131_072)).name != "halo"
    )


def test_a_few_global_layers_do_not_take_the_halo_from_many_windows():
    packed = functools.partial(call_of, has_segment_ids=True)
    plan = functools.partial(plan_context, axis="context", num_ranks=8)
    few = plan({packed(WINDOW): 20.0, packed(): 4.0})
    assert few.sequence_sharding == "contiguous"
    assert [each.name for each in few.exchanges] == ["halo", "all_to_all"]
    odd = {"num_heads": 12, "num_kv_heads": 3}
    few = plan({packed(WINDOW, **odd): 20.0, packed(**odd): 4.0})
    assert (few.sequence_sharding, few.exchanges[0].name) == ("contiguous", "halo")
    many = plan({packed(WINDOW, **odd): 4.0, packed(**odd): 20.0})
    assert (many.sequence_sharding, many.exchanges[1].name) == ("balanced", "all_gather")


def test_a_named_halo_that_contiguous_tokens_refuse_is_tried_with_zigzag():
    wide = CausalMask() & LocalMask(80_000, 0)
    found = plan_context({call_of(wide, num_ranks=2): 1.0}, "context", 2, exchange="halo")
    assert (found.sequence_sharding, found.exchanges[0].name) == ("zigzag", "halo")
    with pytest.raises(ValueError, match="would be all of the sequence"):
        plan_context({call_of(CausalMask() & LocalMask(130_000, 0), num_ranks=2): 1.0}, "context", 2, exchange="halo")
