"""Halos that GPUs read from their neighbours' memory: which chunks, for whom, and how often.

That attention over them computes what NumPy does, test_context.py and test_peer.py test.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import CausalMask, LocalMask, Target
from kernels.context import MeshLayout, Split, attend_over_mesh
from kernels.context.exchanges.halo import chunks_of_halo
from kernels.context.exchanges.halo_chunks import HaloChunks
from tests.gpu_compiler import needs_gpu_compiler
from tests.kernels.context_on_devices import MASKS, draw_sizes_of_gpus
from tests.kernels.test_context import call_of
from trainer.compile.collectives import count_collectives
from trainer.compile.hlo import parse_module
from trainer.compile.topology import parse_topology

LENGTH = 131_072
WINDOW = CausalMask() & LocalMask(4095, 0)
H200 = Target("gpu", "NVIDIA H200", 9.0, 132)


def on_ranks(num_ranks, function):
    """What a function of no arguments returns on each rank."""
    return jax.vmap(lambda _: function(), axis_name="context", axis_size=num_ranks)(jnp.zeros(num_ranks))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_row_is_the_ranks_own_chunks_and_those_around_them(num_ranks, rng):
    for _ in range(8):
        batch, num_own = (int(n) for n in rng.integers(1, (4, 8)))
        left, right = (int(n) for n in rng.integers(0, num_own, 2, endpoint=True))
        split = Split.of("context", num_ranks, "contiguous", num_ranks * num_own * 16, None)
        tables = functools.partial(HaloChunks(16, left, num_own, right).tables, split, batch)
        of_row, of_own, num_chunks = map(np.asarray, on_ranks(num_ranks, tables))
        assert of_row.shape == (num_ranks, batch, left + num_own + right)
        assert (num_chunks == left + num_own + right).all()
        assert (of_row == of_row[:, :1]).all()
        assert (of_own == of_own[:, :1]).all()
        for rank in range(num_ranks):
            begin = rank * num_own - left
            is_there = [0 <= begin + place < num_ranks * num_own for place in range(of_row.shape[2])]
            distance, number = np.divmod(of_row[rank, 0], num_own)
            chunks = (rank + distance) % num_ranks * num_own + number
            assert all(chunks[place] == begin + place for place in np.flatnonzero(is_there))
            assert (distance[~np.array(is_there)] == 0).all()  # nothing is read for what isn't there
            # An own chunk's places in all rows, from the rows themselves.
            for chunk in range(num_own):
                assert of_own[rank, 0, chunk, 0] == left + chunk
                for far in range(1, num_ranks):
                    place = rank * num_own + chunk - ((rank + far) % num_ranks * num_own - left)
                    is_read = 0 <= place < of_row.shape[2]
                    assert of_own[rank, 0, chunk, far] == (place + 1 if is_read else 0)


@pytest.mark.parametrize(
    ("changes", "of_split", "length"),
    [
        ({}, {}, 512),
        ({"mask": LocalMask(200, 3)}, {}, 128),
        ({"mask": LocalMask(200, 3), "length": 4 * 100, "dtype": jnp.dtype("float16")}, {}, None),  # no whole tiles
        ({"dtype": jnp.dtype("float32")}, {}, None),
        ({"mask": CausalMask() & LocalMask(LENGTH // 4 + 1, 0)}, {}, None),  # from further than the neighbour
        ({"mask": LocalMask(0, 0)}, {}, None),
        ({}, {"sequence_sharding": "zigzag"}, None),
        ({}, {"peer_refusal": "is for Hopper GPUs"}, None),
        ({}, {"num_ranks": 8}, None),
    ],
    ids=lambda given: str(given),
)
def test_the_kernels_serve_neighbours_of_one_run_each(changes, of_split, length):
    num_ranks = of_split.get("num_ranks", 4)
    call = call_of(**({"mask": WINDOW, "num_ranks": num_ranks, "target": H200} | changes))
    split = Split.of(
        "context",
        num_ranks,
        of_split.get("sequence_sharding", "contiguous"),
        num_ranks * call.q_len,
        of_split.get("peer_refusal"),
    )
    chunks = chunks_of_halo(call, split)
    assert (chunks and chunks.length) == length


@needs_gpu_compiler
@pytest.mark.jax_0_11
@pytest.mark.parametrize("has_documents", [False, True])
def test_a_halo_is_read_once_a_layer_and_keys_are_not_sent(has_documents):
    devices = np.array(parse_topology("h200:4").devices()).reshape(1, 1, 4)
    mesh = Mesh(devices, ("data", "tensor", "context"), axis_types=(AxisType.Auto,) * 3)
    layout, num_layers = MeshLayout(mesh, ("data",), "context", "tensor", "contiguous"), 3

    def loss(weights, hidden, ids):
        for weight in weights:
            x = hidden * weight
            hidden += attend_over_mesh(
                x, x, x, CausalMask() & LocalMask(1000, 0), layout, segment_ids=ids, exchange="halo"
            )
        return hidden.astype(jnp.float32).sum()

    weights = jax.ShapeDtypeStruct((num_layers, 4, 64), "bfloat16", sharding=NamedSharding(mesh, P()))
    sharding = NamedSharding(mesh, P("data", "context"))
    hidden = jax.ShapeDtypeStruct((1, 16_384, 4, 64), "bfloat16", sharding=sharding)
    ids = jax.ShapeDtypeStruct((1, 16_384), "int32", sharding=sharding) if has_documents else None
    compiled = jax.jit(jax.grad(loss)).lower(weights, hidden, ids).compile()
    totals = {total.operation: total for total in count_collectives(parse_module(compiled.as_text()))}
    assert (totals["gather_chunks"].count, totals["sum_chunks"].count) == (num_layers, num_layers)
    # Ids of documents are, of 1,024 tokens for each layer.
    sent = totals["collective-permute"].bytes if "collective-permute" in totals else 0
    assert sent <= num_layers * 1024 * 4 * has_documents


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("mask", ["window", "both sides", "ahead"])
def test_halos_that_are_drawn_for_gpus_are_read(mask, num_ranks, rng):
    for _ in range(20):
        sizes = draw_sizes_of_gpus(rng, mask, num_ranks, "halo")._asdict()
        sizes["dtype"] = jnp.dtype(sizes["dtype"])
        call = call_of(MASKS[mask][0], num_ranks=num_ranks, target=H200, **sizes)
        assert chunks_of_halo(call, Split.of("context", num_ranks, "contiguous", sizes["length"], None)) is not None
