"""How far keys travel round a ring: as far as the documents of a batch need them, on all ranks alike.

That it computes what NumPy does, test_context.py tests.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import CausalMask, FullMask, LocalMask, PrefixMask
from kernels.context import MeshLayout, Split, attend_over_mesh
from kernels.context.costs import exchange_cost
from kernels.context.exchanges.ring import Ring, needed_hops
from tests.gpu_compiler import needs_gpu_compiler
from tests.kernels.test_context import call_of
from trainer.compile.collectives import count_collectives
from trainer.compile.hlo import parse_module
from trainer.compile.topology import parse_topology

BATCH, LENGTH = 3, 240
WINDOW = CausalMask() & LocalMask(100, 0)


def hops_on_ranks(mask, ids, num_ranks, sequence_sharding="contiguous"):
    """What each rank finds."""
    call = call_of(mask, length=LENGTH, num_ranks=num_ranks, batch=BATCH, has_segment_ids=True)
    split = Split.of("context", num_ranks, sequence_sharding, LENGTH)
    by_rank = jnp.asarray(ids.reshape(BATCH, num_ranks, -1).swapaxes(0, 1))
    of_rank = jax.vmap(lambda ids: jnp.asarray(needed_hops(call, split, ids)), axis_name="context", axis_size=num_ranks)
    return np.broadcast_to(of_rank(by_rank), num_ranks).tolist()


def hops_by_definition(allows, ids, num_ranks):
    """One more than the most ranks that lie between a query's and a key's."""
    token = np.arange(LENGTH)
    allowed = allows(token[:, None], token[None]) & (ids[:, :, None] == ids[:, None])
    queries, keys = np.nonzero(allowed.any(0))
    of_rank = LENGTH // num_ranks
    return 1 + int((queries // of_rank - keys // of_rank).max())


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize(
    ("mask", "allows"),
    [(CausalMask(), lambda q, k: k <= q), (WINDOW, lambda q, k: (k <= q) & (q - k <= 100))],
    ids=["causal", "window"],
)
@pytest.mark.parametrize("order", ["falling", "rising", "any", "coming back"])
def test_keys_travel_as_far_as_documents_reach(order, mask, allows, num_ranks, rng):
    lengths = rng.multinomial(LENGTH, rng.dirichlet(np.ones(rng.integers(1, 30))), size=BATCH)
    names = np.sort(rng.choice(2**32, lengths.shape[1], replace=False) - 2**31)
    if order == "falling":
        names = names[::-1]
    elif order == "any":
        names = rng.permutation(names)
    elif order == "coming back":
        names = rng.choice(names, len(names))
    ids = np.stack([np.repeat(names, row) for row in lengths]).astype(np.int32)
    found = hops_on_ranks(mask, ids, num_ranks)
    assert len(set(found)) == 1
    expected = hops_by_definition(allows, ids, num_ranks)
    farthest = hops_by_definition(allows, np.zeros_like(ids), num_ranks)
    if order in ("falling", "rising") and mask != WINDOW:
        assert found[0] == max(expected, 2)  # the first hop is made in any case
    else:
        assert expected <= found[0] <= max(farthest, 2)


def test_only_where_every_key_comes_from_a_rank_before_do_documents_bound_the_way():
    ids = np.repeat(np.arange(24), 10)[None].repeat(BATCH, 0).astype(np.int32)  # each lies on one of eight ranks
    assert set(hops_on_ranks(CausalMask(), ids, 8)) == {2}
    assert set(hops_on_ranks(CausalMask(), ids, 8, "zigzag")) == {8}
    for mask in (FullMask(), CausalMask() | PrefixMask(3), LocalMask(3, 3)):
        assert set(hops_on_ranks(mask, ids, 8)) == {8}


@pytest.mark.parametrize("num_ranks", [3, 8])
def test_gradients_come_home_from_any_rank(num_ranks):
    split = Split.of("context", num_ranks, "contiguous", LENGTH)
    ranks = jnp.arange(num_ranks)

    def there_and_back(rank, num_hops):
        ring = Ring(split, num_hops)
        there = jax.lax.fori_loop(1, num_hops, lambda _, x: ring.to_next(x), rank)
        return there, ring.home(there)

    on_ranks = jax.jit(jax.vmap(there_and_back, in_axes=(0, None), axis_name="context"))
    for num_hops in range(2, num_ranks + 1):
        there, back = on_ranks(ranks, num_hops)
        assert there.tolist() == [(rank - num_hops + 1) % num_ranks for rank in range(num_ranks)]
        assert back.tolist() == ranks.tolist()


def test_documents_that_end_are_counted_in_the_bytes():
    split = Split.of("context", 64, "contiguous", 2**20)
    rows, packed = (
        exchange_cost("ring", call_of(length=2**20, num_ranks=64, has_segment_ids=has), split).received_bytes
        for has in (False, True)
    )
    assert packed[0] < rows[0] / 8
    assert packed[1] < rows[1] / 8


@pytest.mark.sample(1)
@needs_gpu_compiler
@pytest.mark.jax_0_11
@pytest.mark.parametrize("layers", ["scan", "loop"])
def test_layers_are_made_anew_whose_hops_documents_decide(layers):
    """Within a `jax.shard_map` of all axes, as in a training step: the kernels are in a loop of unknown trips there."""
    devices = np.array(parse_topology("h200:4").devices()).reshape(1, 1, 4)
    mesh = Mesh(devices, ("data", "tensor", "context"), axis_types=(AxisType.Auto,) * 3)
    layout = MeshLayout(mesh, ("data",), "context", "tensor", "contiguous")

    def gradient(weights, hidden, ids):
        @functools.partial(
            jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("attention_output", "attention_lse")
        )
        def layer(hidden, weight):
            x = hidden * weight
            attended = attend_over_mesh(x, x, x, CausalMask(), layout, segment_ids=ids, exchange="ring")
            return hidden + attended, None

        def loss(weights):
            last = jax.lax.scan(layer, hidden, weights)[0] if layers == "scan" else layer(hidden, weights[0])[0]
            return last.astype(jnp.float32).sum()

        return jax.grad(loss)(weights)

    of_tokens = P("data", "context")
    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), of_tokens, of_tokens), out_specs=P(), check_vma=False)
    weights, hidden, ids = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in (
            ((3, 16, 128), "bfloat16", P()),
            ((1, 65_536, 16, 128), "bfloat16", of_tokens),
            ((1, 65_536), "int32", of_tokens),
        )
    )
    compiled = jax.jit(mapped).lower(weights, hidden, ids).compile()
    (hops,) = (t for t in count_collectives(parse_module(compiled.as_text())) if t.operation == "collective-permute")
    assert not hops.is_exact
