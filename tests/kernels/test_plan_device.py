"""Plans made on the device, against every pair of tokens: none is lost, FULL is true, and intervals are tight."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import CausalMask, ChunkedCausalMask, FullMask, LocalMask, MaskFn, PrefixMask
from kernels.call import make_call
from kernels.masks import TileKind
from kernels.plan import make_rows
from tests.kernels.tile_kinds import dense_tile_kinds, visited

# Of each mask its pairs, spelled out once more: (query positions, key positions) → allowed.
INTERVAL_MASKS = {
    "all": (FullMask(), lambda q, k: q == q),
    "causal": (CausalMask(), lambda q, k: k <= q),
    "causal, shifted": (CausalMask(-37), lambda q, k: k <= q - 37),
    "window": (CausalMask() & LocalMask(40, 0), lambda q, k: (k <= q) & (k >= q - 40)),
    "around": (LocalMask(17, 25), lambda q, k: (k <= q + 25) & (k >= q - 17)),
    "ahead": (LocalMask(-20, 60), lambda q, k: (k <= q + 60) & (k >= q + 20)),
    "far ahead": (LocalMask(-20, None), lambda q, k: k >= q + 20),
    "chunks": (ChunkedCausalMask(50), lambda q, k: (k <= q) & (k // 50 == q // 50)),
    "prefix": (CausalMask() | PrefixMask(90), lambda q, k: (k <= q) | (k < 90)),
    "window in a prefix": (LocalMask(30, 30) & PrefixMask(120), lambda q, k: (abs(q - k) <= 30) & (k < 120)),
    "nothing": (LocalMask(-5, 3), lambda q, k: (k <= q + 3) & (k >= q + 5)),
}
OTHER_MASKS = {
    "gap": (CausalMask() & ~LocalMask(60, -20), lambda q, k: (k <= q) & ~((k >= q - 60) & (k <= q - 20))),
    "function": (MaskFn(lambda q, k: (q + k) % 3 == 0), lambda q, k: (q + k) % 3 == 0),
}


def shards(length: int, num_shards: int) -> np.ndarray:
    """The positions of one rank of a zigzag: the first of its chunks, and the last."""
    chunk = length // 2
    return np.concatenate([np.arange(chunk) + 30, np.arange(length - chunk) + 30 + (num_shards - 1) * chunk])


POSITIONS = {
    "none": lambda rng, length: None,
    "counted": lambda rng, length: np.arange(length),
    "later": lambda rng, length: np.arange(length) + int(rng.integers(1, 200)),
    "zigzag": lambda rng, length: shards(length, 4),
    "zigzag the other way": lambda rng, length: np.roll(shards(length, 4), length // 2),
    "with gaps": lambda rng, length: np.sort(rng.integers(0, 3 * length, length)),
    "shuffled": lambda rng, length: rng.permutation(length),
    "restarting": lambda rng, length: np.concatenate([np.arange(length // 3), np.arange(length - length // 3)]),
    "at the end": lambda rng, length: np.arange(length) + (2**31 - length),
    "anything": lambda rng, length: rng.choice([0, 1, 50, 2**31 - 1, 2**31 - 30, 1000], length),
}

DOCUMENTS = {
    "none": lambda rng, length: None,
    "ascending": lambda rng, length: np.sort(rng.integers(0, 5, length)),
    "descending": lambda rng, length: -np.sort(rng.integers(0, 5, length)),
    "hashed": lambda rng, length: rng.integers(-(2**31), 2**31, 5)[np.sort(rng.integers(0, 5, length))],
    "padded": lambda rng, length: np.where(np.arange(length) < length - 70, 1 + np.arange(length) // 60, 0),
    "coming back": lambda rng, length: (np.arange(length) // 45) % 3,
    "meeting in the table": lambda rng, length: (np.arange(length) // 45) << 20,
    "scattered": lambda rng, length: rng.integers(0, 4, length),
}


def call_of(mask, q_len, kv_len, **given):
    """Inputs and call of a batch of two; ids and positions are rows for both, as NumPy arrays, or None."""
    names = ("query_segment_ids", "key_value_segment_ids", "query_positions", "key_value_positions")
    query, key = jnp.ones((2, q_len, 1, 8)), jnp.ones((2, kv_len, 1, 8))
    nothing = dict.fromkeys((*names, "scale", "logits_soft_cap", "sinks"))
    return make_call(query, key, key, mask, **{**nothing, **given}, return_lse=False)


def hull(kinds: np.ndarray) -> np.ndarray:
    """Which tiles lie between each row's first and last that isn't EMPTY."""
    some = kinds != TileKind.EMPTY
    return np.maximum.accumulate(some, axis=1) & np.maximum.accumulate(some[:, ::-1], axis=1)[:, ::-1]


@pytest.mark.sample(40)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_no_pair_is_lost_and_full_is_true(positions, documents, rng):
    # Few shapes, since each is compiled.
    (q_len, kv_len), (block_q, block_kv) = (200, 256)[:: rng.choice([-1, 1])], (16, 24)
    masks = INTERVAL_MASKS | OTHER_MASKS
    for name in rng.choice(list(masks), 3, replace=False):
        (mask, rule), transposed = masks[name], bool(rng.integers(2))
        q_pos, kv_pos = POSITIONS[positions](rng, q_len), POSITIONS[positions](rng, kv_len)
        # Keys mostly count from zero while queries are a shard's.
        kv_pos = None if rng.random() < 0.4 else kv_pos
        q_ids, kv_ids = DOCUMENTS[documents](rng, q_len), DOCUMENTS[documents](rng, kv_len)
        given = {
            "query_segment_ids": q_ids,
            "key_value_segment_ids": kv_ids,
            "query_positions": q_pos,
            "key_value_positions": kv_pos,
        }
        inputs, call = call_of(mask, q_len, kv_len, **given)
        q, k = (np.arange(n) if x is None else x for x, n in ((q_pos, q_len), (kv_pos, kv_len)))
        allowed = np.broadcast_to(rule(q[:, None].astype(np.int64), k[None].astype(np.int64)), (q_len, kv_len))
        if q_ids is not None:
            allowed = allowed & (q_ids[:, None] == kv_ids[None])
        exact = dense_tile_kinds(allowed, block_q, block_kv)
        for only_intervals in (False, True):
            rows = make_rows(inputs, call, block_q, block_kv, transposed=transposed, only_intervals=only_intervals)
            assert rows.tiles is None or not (only_intervals or name in INTERVAL_MASKS)
            kinds = visited(rows, 1, exact.shape[0 if transposed else 1])
            kinds = kinds.T if transposed else kinds
            assert not ((exact != TileKind.EMPTY) & (kinds == TileKind.EMPTY)).any(), name
            assert (exact[kinds == TileKind.FULL] == TileKind.FULL).all(), name


@pytest.mark.sample(20)
@pytest.mark.parametrize("documents", ["none", "ascending", "descending", "hashed", "padded"])
@pytest.mark.parametrize("positions", ["none", "counted", "later", "zigzag", "zigzag the other way", "restarting"])
@pytest.mark.parametrize("keys_are_counted", [True, False], ids=["all keys", "own keys"])
def test_intervals_are_tight(positions, documents, keys_are_counted, rng):
    """Where runs of positions and documents are whole tiles, rows reach from their first tile to their last."""
    length, block = 256, 16
    q_pos = POSITIONS[positions](rng, length)
    if positions == "restarting":
        q_pos = np.arange(length) % 128
    kv_pos = None if keys_are_counted else q_pos
    ids = DOCUMENTS[documents](rng, length // block)
    if documents == "padded":
        ids = np.where(np.arange(length // block) < 12, 1 + np.arange(length // block) // 3, 0)
    ids = None if ids is None else np.repeat(ids, block)
    given = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    q, k = (np.arange(length) if x is None else x for x in (q_pos, kv_pos))
    for name, (mask, rule) in INTERVAL_MASKS.items():
        if name == "nothing":
            continue  # A tile's reach is known to be empty only where it ends before it begins.
        transposed = bool(rng.integers(2))
        inputs, call = call_of(mask, length, length, query_positions=q_pos, key_value_positions=kv_pos, **given)
        allowed = np.broadcast_to(rule(q[:, None], k[None]), (length, length))
        if ids is not None:
            allowed = allowed & (ids[:, None] == ids[None])
        exact = dense_tile_kinds(allowed, block, block)
        exact = exact.T if transposed else exact
        kinds = visited(make_rows(inputs, call, block, block, transposed=transposed), 0, length // block)
        np.testing.assert_array_equal(kinds != TileKind.EMPTY, hull(exact), err_msg=name)


@pytest.mark.sample(8)
@pytest.mark.parametrize("given", ["positions", "documents", "both", "key positions, too"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("mask", [CausalMask(), LocalMask(100, 0), CausalMask() | PrefixMask(100)], ids=repr)
def test_a_plan_costs_what_its_rows_cost(mask, given, transposed):
    """No array of the compiled plan has an element for every tile, of which there are 1024 × 1024."""
    length, block = 8192, 8
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32)

    def plan(segment_ids, positions):
        inputs, call = call_of(
            mask,
            length,
            length,
            query_segment_ids=None if given == "positions" else segment_ids,
            key_value_segment_ids=None if given == "positions" else segment_ids,
            query_positions=None if given == "documents" else positions,
            key_value_positions=positions if given == "key positions, too" else None,
        )
        return make_rows(inputs, call, block, block, transposed=transposed)

    hlo = jax.jit(plan).lower(ids, ids).compile().as_text()
    shapes = re.findall(r"\b(?:pred|[a-z]+\d+)\[([\d,]+)\]", hlo)
    largest = max(int(np.prod([int(side) for side in shape.split(",")])) for shape in shapes)
    assert largest < (length // block) ** 2


PASSES = {"forward": (128, 128, False), "d_key_value": (64, 128, True), "d_query": (128, 64, False)}


@pytest.mark.gpu
def test_the_plans_of_three_passes_in_one_program_are_each_their_own(rng):
    """XLA of JAX 0.11.2 made one GPU kernel of their reductions, and gave some tiles the whole sequence's result."""
    length = 16_384
    ends = [np.sort(rng.choice(np.arange(1, length), 63, replace=False)) for _ in range(2)]
    ids = np.stack([np.searchsorted(each, np.arange(length), side="right") for each in ends])

    @jax.jit
    def plans(ids):
        inputs, call = call_of(CausalMask(), length, length, query_segment_ids=ids, key_value_segment_ids=ids)
        return {
            name: make_rows(inputs, call, block_q, block_kv, transposed=transposed).bounds
            for name, (block_q, block_kv, transposed) in PASSES.items()
        }

    for name, bounds in plans(jnp.asarray(ids)).items():
        block_q, block_kv, transposed = PASSES[name]
        own, other = (block_kv, block_q) if transposed else (block_q, block_kv)
        for b, rows in enumerate(np.asarray(bounds)):
            for r, (start, _, _, stop) in enumerate(rows):
                first, last = r * own, (r + 1) * own - 1
                (indices,) = np.nonzero((ids[b] >= ids[b, first]) & (ids[b] <= ids[b, last]))
                lowest, highest = (first, indices[-1]) if transposed else (indices[0], last)
                assert (start, stop) == (lowest // other, highest // other + 1), (name, b, r)
