"""Sharding a sequence: every token once, equal counts, costs that a count by hand confirms, and level ranks."""

import numpy as np
import pytest

from kernels import (
    Bounds,
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    MaskFn,
    MultiHeadMask,
    NumpyMask,
    PrefixMask,
)
from kernels.context import (
    check_sequence_sharding,
    choose_sequence_sharding,
    chunk_costs,
    default_chunk_size,
    imbalance,
    shard_sequence,
)
from tests.kernels.context_on_devices import BOUNDS
from tests.kernels.contract_cases import draw_bounds

LENGTH = 131_072


def packed_row(length: int, draw_length) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids and positions of documents of drawn lengths, the last one cut off."""
    ids, positions = np.zeros((2, length), np.int32)
    begin, document = 0, 0
    while begin < length:
        size, document = min(max(1, int(draw_length())), length - begin), document + 1
        ids[begin : begin + size] = document
        positions[begin : begin + size] = np.arange(size)
        begin += size
    return ids, positions


def lengths_of_documents(rng: np.random.Generator):
    """A way of drawing document lengths: log-normal around some length, heavy-tailed, or all alike."""
    typical = rng.choice([300, 1000, 4000, 30_000])
    return [
        lambda: rng.lognormal(np.log(typical), 1),
        lambda: rng.pareto(0.8) * 300 + 1,
        lambda: typical,
    ][rng.integers(3)]


def cost_by_hand(mask, length: int, chunk_size: int, ids, positions, bounds) -> list[int]:
    """Pairs in the tiles from the first to the last that a row has, less those that the keys' bounds exclude."""
    allowed = np.zeros((length, length), bool)
    for q in range(length):
        for kv in range(length):
            own = bounds["k_start"][q] <= kv < bounds["k_end"][q]
            allowed[q, kv] = own and ids[q] == ids[kv] and bool(mask(int(positions[q]), int(positions[kv])))
    side = min(128, chunk_size)
    costs = []
    for chunk in range(0, length, chunk_size):
        pairs = 0
        for start in range(chunk, chunk + chunk_size, side):
            rows = allowed[start : min(start + side, chunk + chunk_size)]
            met = [kv // side for kv in np.flatnonzero(rows.any(0))]
            for tile in range(min(met), max(met) + 1) if met else ():
                keys = slice(tile * side, (tile + 1) * side)
                is_before = start + len(rows) <= bounds["q_start"][keys].min()
                pairs += 0 if is_before or start >= bounds["q_end"][keys].max() else len(rows) * side
        costs.append(pairs)
    return costs


@pytest.mark.parametrize("sequence_sharding", ["contiguous", "zigzag", "balanced"])
def test_every_token_is_held_once_and_rises_within_a_rank(sequence_sharding, rng):
    num_ranks, chunk_size = int(rng.integers(1, 7)), int(rng.integers(1, 40))
    length = 2 * num_ranks * chunk_size * int(rng.integers(1, 9))
    ids, positions = packed_row(length, lambda: rng.integers(1, length + 1))
    token_order = shard_sequence(
        sequence_sharding,
        length,
        num_ranks,
        masks={CausalMask(): 1.0},
        chunk_size=chunk_size,
        segment_ids=ids,
        positions=positions,
    )
    assert token_order.dtype == np.int32
    assert sorted(token_order.tolist()) == list(range(length))
    assert (np.diff(token_order.reshape(num_ranks, -1), axis=1) > 0).all()
    if sequence_sharding == "balanced":
        chunks = token_order.reshape(-1, chunk_size)
        assert (chunks[:, 0] % chunk_size == 0).all()
        assert (np.diff(chunks, axis=1) == 1).all()


def test_zigzag_pairs_the_ends_of_a_row():
    assert shard_sequence("zigzag", 12, 3).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]


def test_costs_are_those_counted_by_hand_on_the_whole_matrix(rng):
    chunk_size = int(rng.choice([24, 64, 96, 160]))
    length = chunk_size * int(rng.integers(2, 480 // chunk_size + 1))
    ids, positions = packed_row(length, lambda: rng.integers(1, length))
    masks = [
        CausalMask(),
        FullMask(),
        CausalMask() & LocalMask(int(rng.integers(0, 200)), 0),
        ChunkedCausalMask(int(rng.integers(1, 200))),
        CausalMask() | PrefixMask(int(rng.integers(0, length))),
        LocalMask(int(rng.integers(0, 60)), int(rng.integers(0, 60))),
    ]
    mask, weight = masks[rng.integers(len(masks))], float(rng.uniform(0.5, 3))
    kind = BOUNDS[rng.integers(len(BOUNDS))]
    bounds = Bounds() if kind is None else draw_bounds(rng, kind, 1, length, length)
    bounds = bounds.map(*[lambda bound: np.broadcast_to(bound, (1, length))[0]] * 2)
    everything = {name: np.full(length, 0 if name.endswith("start") else length) for name in Bounds._fields}
    expected = cost_by_hand(
        mask, length, chunk_size, ids, positions, everything | {name: getattr(bounds, name) for name in bounds.given}
    )
    found = chunk_costs({mask: weight}, length, chunk_size, segment_ids=ids, positions=positions, bounds=bounds)
    np.testing.assert_allclose(found, weight * np.array(expected), rtol=1e-12)


def test_costs_of_one_document_without_intervals_are_counted_too(rng):
    length, gap = 512, int(rng.integers(2, 5))
    mask = MaskFn(lambda q, kv: (kv <= q) & ((q // 128 - kv // 128) % gap == 0))
    expected = [sum((tile - other) % gap == 0 for other in range(tile + 1)) * 128 * 128 for tile in range(4)]
    assert chunk_costs({mask: 1.0}, length, 128).tolist() == expected
    array = NumpyMask(np.tril(np.ones((length, length), bool)))
    np.testing.assert_array_equal(
        chunk_costs({array: 2.0}, length, 128), 2 * chunk_costs({CausalMask(): 1}, length, 128)
    )


def test_masks_of_several_heads_weigh_as_their_heads_do():
    near, far = CausalMask() & LocalMask(255, 0), CausalMask()
    found = chunk_costs({MultiHeadMask([near, far, far, far]): 4.0}, 4096, 512)
    np.testing.assert_allclose(found, chunk_costs({near: 1.0, far: 3.0}, 4096, 512))


@pytest.mark.parametrize(("num_ranks", "most"), [(2, 1.03), (4, 1.03), (8, 1.03), (16, 1.10)])
def test_random_packed_rows_are_sharded_level(num_ranks, most, rng):
    masks = {CausalMask(): float(rng.integers(1, 8)), CausalMask() & LocalMask(1023, 0): float(rng.integers(1, 24))}
    for _ in range(12):
        ids, positions = packed_row(LENGTH, lengths_of_documents(rng))
        token_order = shard_sequence("balanced", LENGTH, num_ranks, masks=masks, segment_ids=ids, positions=positions)
        # In the tiles of the sharding, and in tiles of half their side: a kernel's lie between the two.
        for side, bound in ((128, most), (64, 1.10)):
            costs = chunk_costs(masks, LENGTH, side, segment_ids=ids, positions=positions)
            assert imbalance(costs[token_order[::side] // side].reshape(num_ranks, -1)) <= bound
    # One whole document in order is far from level.
    whole = chunk_costs({CausalMask(): 1.0}, LENGTH, 64)
    assert imbalance(whole.reshape(num_ranks, -1)) > most


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_long_document_comes_out_zigzagged_and_one_of_level_cost_in_order(num_ranks):
    for mask, sequence_sharding in ((CausalMask(), "zigzag"), (FullMask(), "contiguous")):
        token_order = shard_sequence("balanced", LENGTH, num_ranks, masks={mask: 1.0})
        np.testing.assert_array_equal(token_order, shard_sequence(sequence_sharding, LENGTH, num_ranks))
    # Only the first tokens have less than the window to attend to.
    windows = shard_sequence("balanced", LENGTH, num_ranks, masks={CausalMask() & LocalMask(16_383, 0): 1.0})
    assert (np.diff(windows) != 1).sum() < 4 * num_ranks


def test_few_documents_are_parted(rng):
    """Most documents shorter than a chunk lie on one rank, and longer ones on few more than they need to."""
    masks, num_ranks = {CausalMask(): 1.0, CausalMask() & LocalMask(1023, 0): 4.0}, 4
    chunk_size, num_runs, is_parted = default_chunk_size(LENGTH, num_ranks), [], []
    for _ in range(8):
        ids, positions = packed_row(LENGTH, lambda: rng.lognormal(np.log(300), 1))
        token_order = shard_sequence("balanced", LENGTH, num_ranks, masks=masks, segment_ids=ids, positions=positions)
        num_runs.append(1 + (np.diff(token_order) != 1).sum())
        ranks = np.empty(LENGTH, int)
        ranks[token_order] = np.repeat(np.arange(num_ranks), LENGTH // num_ranks)
        starts = np.flatnonzero(np.diff(ids, prepend=0))
        of_first, of_last = np.minimum.reduceat(ranks, starts), np.maximum.reduceat(ranks, starts)
        is_parted += (of_first < of_last)[np.diff(starts, append=LENGTH) < chunk_size].tolist()
    assert np.median(num_runs) <= LENGTH // chunk_size / 4
    assert np.mean(is_parted) < 0.1


def test_ranks_lack_few_tokens_of_the_documents_that_are_cut(rng):
    """On average the rank that lacks most lacks 0.75 times what it holds, and 1.28 times if runs are dealt by cost."""
    num_ranks, lacked = 8, []
    for _ in range(24):
        ids, positions = packed_row(LENGTH, lambda: rng.lognormal(np.log(4096), 0.5))
        token_order = shard_sequence(
            "balanced", LENGTH, num_ranks, masks={CausalMask(): 1.0}, segment_ids=ids, positions=positions
        )
        of_ranks = []
        for own in token_order.reshape(num_ranks, -1):
            furthest = np.full(ids.max() + 1, -1)
            np.maximum.at(furthest, ids[own], positions[own])
            is_needed = positions <= furthest[ids]
            is_needed[own] = False
            of_ranks.append(is_needed.sum())
        lacked.append(max(of_ranks) / (LENGTH / num_ranks))
    assert np.mean(lacked) < 1.05


def test_the_simplest_level_sharding_is_chosen():
    causal, window = CausalMask(), CausalMask() & LocalMask(4095, 0)
    assert choose_sequence_sharding({causal: 12.0}, LENGTH, 8, has_documents=False) == "zigzag"
    assert choose_sequence_sharding({causal: 12.0}, LENGTH, 8, has_documents=True) == "balanced"
    assert choose_sequence_sharding({window: 12.0}, LENGTH, 8, has_documents=False) == "contiguous"
    assert choose_sequence_sharding({window: 12.0}, LENGTH, 8, has_documents=True) == "contiguous"
    assert choose_sequence_sharding({window: 20.0, causal: 4.0}, LENGTH, 8, has_documents=True) == "balanced"
    assert choose_sequence_sharding({FullMask(): 12.0}, LENGTH, 8, has_documents=False) == "contiguous"
    assert choose_sequence_sharding({causal | PrefixMask(30_000): 1.0}, LENGTH, 8, has_documents=False) == "balanced"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"segment_ids": np.zeros(6, int)}, r"segment_ids must be those of one sequence, \[8\], got shape \(6,\)"),
        (
            {"segment_ids": np.zeros((1, 8), int)},
            r"segment_ids must be those of one sequence, \[8\], got shape \(1, 8\)",
        ),
        ({"positions": np.zeros(9, int)}, r"positions must be those of one sequence, \[8\], got shape \(9,\)"),
        ({"masks": {CausalMask(): np.nan}}, r"positive, finite weights, got \[nan\]"),
        ({"masks": {CausalMask(): -1.0}}, r"positive, finite weights, got \[-1.0\]"),
    ],
)
def test_what_belongs_to_no_row_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        shard_sequence("balanced", 8, 2, **({"masks": {CausalMask(): 1.0}} | arguments))


def test_ids_may_be_a_list():
    ids = [3, 3, 3, 1, 1, 2, 2, 2]
    sharded = [
        shard_sequence("balanced", 8, 2, masks={CausalMask(): 1.0}, segment_ids=each) for each in (ids, np.array(ids))
    ]
    np.testing.assert_array_equal(*sharded)


def test_a_length_that_cannot_be_cut_is_refused_with_the_next_that_can():
    with pytest.raises(ValueError, match=r"1000 tokens is not a multiple of 3 ranks.*use 1002 tokens"):
        check_sequence_sharding("contiguous", 1000, 3)
    with pytest.raises(ValueError, match=r"not a multiple of twice 3 ranks.*use 1002 tokens"):
        check_sequence_sharding("zigzag", 999, 3)
    with pytest.raises(ValueError, match=r"2 ranks × chunk_size=512.*use 2048 tokens"):
        shard_sequence("balanced", 1536, 2, masks={CausalMask(): 1.0}, chunk_size=512)
    with pytest.raises(ValueError, match="sequence_sharding='random' is not one of contiguous, zigzag, balanced"):
        shard_sequence("random", 1024, 2)
    with pytest.raises(ValueError, match="needs the masks whose costs it levels"):
        shard_sequence("balanced", 1024, 2)
    assert default_chunk_size(3 * 2**20, 3) == 512
    assert default_chunk_size(48, 3) == 16
