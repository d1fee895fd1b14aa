"""The bytes on the wire: the least in closed form, what a device receives, and the command on devices of a host."""

import json

import jax
import numpy as np
import pytest

from experiments.benchmarks.context_bytes.__main__ import BytesArguments, ContextMesh, main
from experiments.benchmarks.context_bytes.least import count_hops, count_missing_keys, least_bytes
from experiments.benchmarks.sequence_sharding import random_sequence
from kernels import CausalMask, ChunkedCausalMask, FullMask, LocalMask, MaskFn, PrefixMask
from kernels.context import shard_sequence
from tests.host_cpus import environment_of_cpus
from trainer.compile.collectives import received_share
from trainer.errors import UserMistake


@pytest.mark.parametrize("sequence_sharding", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize(
    "mask",
    [FullMask(), CausalMask(), LocalMask(9, 0), LocalMask(3, 2), ChunkedCausalMask(24), CausalMask() | PrefixMask(5)],
    ids=repr,
)
def test_missing_keys_are_those_of_the_dense_mask(mask, sequence_sharding, rng):
    length, num_ranks = 128, 4
    ids, positions = random_sequence(length, lambda rng: rng.integers(1, 60), rng)
    for documents in ({}, {"segment_ids": ids, "positions": positions}):
        token_order = shard_sequence(sequence_sharding, length, num_ranks, masks={mask: 1.0}, **documents)
        row = np.arange(length)
        at = documents.get("positions", row)
        allowed = mask(at[:, None], at[None]) & (ids[:, None] == ids[None] if documents else True)
        of_ranks = token_order.reshape(num_ranks, -1)
        expected = [np.isin(np.flatnonzero(allowed[own].any(0)), own, invert=True).sum() for own in of_ranks]
        assert count_missing_keys(mask, token_order, num_ranks, **documents).tolist() == expected


def test_hops_reach_the_farthest_key_of_a_document(rng):
    length, num_ranks = 128, int(rng.choice([2, 4, 8]))
    ids, _ = random_sequence(length, lambda rng: rng.integers(1, 60), rng)
    queries, keys = np.nonzero(np.tri(length, dtype=bool) & (ids[:, None] == ids[None]))
    of_rank = length // num_ranks
    assert count_hops(ids, num_ranks) == 1 + (queries // of_rank - keys // of_rank).max()


def test_a_mask_whose_rows_are_no_intervals_has_no_least():
    with pytest.raises(
        ValueError, match=r"the rows of .* aren't intervals, so the keys that a rank needs have no closed form"
    ):
        count_missing_keys(MaskFn(lambda q, kv: (q + kv) % 2 == 0), np.arange(8), 2)


def test_the_least_counts_keys_twice_and_gradients_once_in_float32():
    # 100 tokens × 2 heads × (8 of the key and 8 of the value)
    assert least_bytes(100, num_kv_heads=2, head_dim=8, itemsize=2) == (3200 * 2, 3200 * 2 + 3200 * 4)


def test_what_a_device_has_already_does_not_travel():
    for operation in ("all-gather", "reduce-scatter", "all-to-all"):
        assert 800 * received_share(operation, 8) == 700
    assert 800 * received_share("all-reduce", 8) == 1400
    assert 800 * received_share("collective-permute", 8) == 800


@pytest.fixture
def eight_cpus(monkeypatch):
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "PYTHONPATH"):
        monkeypatch.setenv(name, environment_of_cpus(8)[name])


@pytest.mark.usefixtures("eight_cpus")
def test_a_gather_moves_chunks_that_any_rank_needs_and_a_halo_the_keys_within_the_window(tmp_path, capsys):
    output = tmp_path / "new" / "rows.jsonl"
    assert main(BytesArguments(("local/4/16384",), ("window",), ("all_gather", "halo"), output=output)) == 0
    gather, halo = map(json.loads, output.read_text().splitlines())
    assert (gather["exchange"], halo["exchange"]) == ("all_gather", "halo")
    # XLA's CPU backend sends bfloat16 as float32. The backward brings keys again, and sends their gradients once. With
    # JAX 0.10 one exchange of keys does for both passes, and so the backward has that of gradients alone.
    of_token, is_shared = 16 * 2 * 128 * 4, jax.__version_info__ < (0, 11)
    for passes in ("forward_bytes", "backward_bytes"):
        is_once = passes == "forward_bytes" or is_shared
        # Rank 0's whole 4,096 tokens are within the reach of rank 1's, but for the first.
        assert gather[passes] == pytest.approx((1 if is_once else 2) * 3 * 4096 * of_token, rel=0.01)
        num_spans = {"contiguous": 1, "zigzag": 2}[halo["sequence_sharding"]]
        assert halo[passes] == pytest.approx((1 if is_once else 2) * 4095 * num_spans * of_token, rel=0.01)
    # Queries of a run look 4,095 tokens back, at those of another rank.
    assert halo["least_greatest_bytes"] == [4095 * num_spans * 16 * 2 * 128 * size for size in (2, 2 + 4)]
    assert halo["least_mean_bytes"][0] < halo["least_greatest_bytes"][0]  # a row's first run looks at none
    printed = capsys.readouterr().out
    assert f"window, local, 4 ranks, 16,384 tokens, halo, {halo['sequence_sharding']}: " in printed
    assert "least (busiest rank)" in printed


@pytest.mark.full
@pytest.mark.usefixtures("eight_cpus")
def test_a_ring_counts_the_hops_that_documents_need(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    assert main(BytesArguments(("local/8/524288",), ("packed",), ("ring",), "contiguous", output=output)) == 0
    row = json.loads(output.read_text())
    assert 2 <= row["mean_hops"] < 8
    # XLA's CPU backend sends bfloat16 as float32. Gradients go there and back. Places and ids are 8 of 16,392 bytes.
    gradients = 65_536 * 16 * 2 * 128 * 4
    hop, num_hops = gradients + 65_536 * 8, row["mean_hops"] - 1
    assert row["trip_bytes"] == pytest.approx([hop, hop + 2 * gradients], rel=0.01)
    assert row["forward_bytes"] == pytest.approx(num_hops * hop, rel=0.01)
    # With JAX 0.10 one first hop does for both passes.
    shared = hop if jax.__version_info__ < (0, 11) else 0
    assert row["backward_bytes"] == pytest.approx(num_hops * (hop + 2 * gradients) - shared, rel=0.01)
    assert "packed, local, 8 ranks, 524,288 tokens, ring, contiguous: " in capsys.readouterr().out


@pytest.mark.usefixtures("eight_cpus")
def test_an_exchange_that_cannot_serve_a_mask_leaves_a_message(tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    assert main(BytesArguments(("local/8/4096",), ("causal",), ("halo",), output=output)) == 0
    row = json.loads(output.read_text())
    assert "needs a mask that reaches only so far" in row["message"]
    assert "forward_bytes" not in row
    assert "causal, local, 8 ranks, 4,096 tokens, halo: " in capsys.readouterr().out


def test_mistakes_are_told_before_anything_is_compiled(capsys):
    for field, told in (("workloads", "causal, window, packed"), ("exchanges", "chosen, all_gather, peer, halo, ring")):
        with pytest.raises(UserMistake, match=f"unknown {field} unknown; expected some of {told}"):
            BytesArguments(**{field: ("unknown",)})
    for text in ("v5p:2x2x2", "v5p:2x2x2/8", "v5p:2x2x2/eight/131072"):
        with pytest.raises(UserMistake, match="is no case; expected TOPOLOGY/RANKS/TOKENS, such as v5p:2x2x2/8/131072"):
            ContextMesh.parse(text)
    assert main(BytesArguments(cases=("v9:2x2/4/1024",))) == 2
    assert capsys.readouterr().err.startswith("error: unknown topology 'v9:2x2'; expected")
