"""Block plans against the dense mask of random compositions, and their cost at a million tokens."""

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import (
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    MaskFn,
    MultiHeadMask,
    PrefixMask,
    TileKind,
    count_allowed_pairs,
    make_block_plan,
)
from kernels.plan import list_rows
from tests.kernels.mask_strategies import any_masks, interval_masks

lengths = st.integers(1, 260)
blocks = st.integers(1, 70)


def true_kinds(mask, q_len, kv_len, block_q, block_kv, q_offset=0, kv_offset=0):
    """Kinds of all tiles from the dense mask; a tile that sticks out past `kv_len` isn't FULL."""
    q_pos, kv_pos = q_offset + np.arange(q_len)[:, None], kv_offset + np.arange(kv_len)[None, :]
    dense = np.broadcast_to(np.asarray(mask(q_pos, kv_pos)), (q_len, kv_len))
    kinds = np.empty((-(-q_len // block_q), -(-kv_len // block_kv)), np.int8)
    for i, j in np.ndindex(*kinds.shape):
        tile = dense[i * block_q : (i + 1) * block_q, j * block_kv : (j + 1) * block_kv]
        full = tile.all() and (j + 1) * block_kv <= kv_len
        kinds[i, j] = TileKind.FULL if full else TileKind.PARTIAL if tile.any() else TileKind.EMPTY
    return kinds


@given(mask=any_masks, q_len=lengths, kv_len=lengths, block_q=blocks, block_kv=blocks)
def test_plans_of_any_composition_are_exact(mask, q_len, kv_len, block_q, block_kv):
    plan = make_block_plan(mask, q_len, kv_len, block_q, block_kv)
    expected = true_kinds(mask, q_len, kv_len, block_q, block_kv)
    np.testing.assert_array_equal(plan.tile_kinds(), expected)
    np.testing.assert_array_equal(plan.transpose().tile_kinds(), expected.T)
    assert plan.num_visited == (expected != TileKind.EMPTY).sum()
    assert plan.num_full == (expected == TileKind.FULL).sum()
    assert plan.num_tiles == expected.size


@given(
    mask=interval_masks,
    q_len=lengths,
    kv_len=lengths,
    block_q=blocks,
    block_kv=blocks,
    q_offset=st.integers(0, 300),
    kv_offset=st.integers(0, 300),
)
def test_plans_of_the_interval_family_are_exact_at_any_offset(
    mask, q_len, kv_len, block_q, block_kv, q_offset, kv_offset
):
    plan = make_block_plan(mask, q_len, kv_len, block_q, block_kv, q_offset=q_offset, kv_offset=kv_offset)
    expected = true_kinds(mask, q_len, kv_len, block_q, block_kv, q_offset, kv_offset)
    np.testing.assert_array_equal(plan.tile_kinds(), expected)


@given(mask=any_masks, q_len=lengths, kv_len=lengths)
def test_rows_name_each_tile_once_and_partial_ones_first(mask, q_len, kv_len):
    plan = make_block_plan(mask, q_len, kv_len, 32, 16)
    tile_kinds = plan.tile_kinds()
    for rows in (plan.rows, list_rows(tile_kinds[None])):
        for i in range(plan.num_rows):
            row = rows.read(0, i)
            tiles = [int(row.tile(rank)) for rank in range(int(row.num_tiles))]
            assert sorted(tiles) == list(np.flatnonzero(tile_kinds[i]))
            assert list(tile_kinds[i, tiles]) == sorted(tile_kinds[i, tiles])
            assert (tile_kinds[i, tiles] == TileKind.PARTIAL).sum() == row.num_partial
    if plan.rows.tiles is None:
        for i, (start, full_start, full_stop, stop) in enumerate(plan.rows.bounds[0]):
            assert list(range(start, stop)) == list(np.flatnonzero(tile_kinds[i]))
            assert list(range(full_start, full_stop)) == list(np.flatnonzero(tile_kinds[i] == TileKind.FULL))


@given(mask=any_masks, q_len=lengths, kv_len=lengths)
def test_allowed_pairs_are_counted_exactly(mask, q_len, kv_len):
    dense = np.broadcast_to(np.asarray(mask(np.arange(q_len)[:, None], np.arange(kv_len)[None, :])), (q_len, kv_len))
    assert count_allowed_pairs(mask, q_len, kv_len) == dense.sum()


def test_scattered_tiles_are_listed_and_intervals_are_not():
    scattered = LocalMask(8, 0) | PrefixMask(4)
    assert make_block_plan(scattered, 256, 256, 8, 8).rows.tiles is not None
    assert make_block_plan(CausalMask() | PrefixMask(64), 256, 256, 8, 8).rows.tiles is None


def test_a_function_with_a_closed_form_is_not_evaluated():
    def fn(q_pos, kv_pos):
        raise AssertionError("evaluated")

    plan = make_block_plan(MaskFn(fn, CausalMask().classify), 1 << 20, 1 << 20, 128, 128)
    assert plan.num_visited == 8192 * 8193 // 2


MILLION = 1 << 20
MILLION_MASKS = [
    CausalMask(),
    LocalMask(1023, 0),
    LocalMask(1000, 1000),
    ChunkedCausalMask(8192),
    PrefixMask(100_000),
    CausalMask() & LocalMask(4095, 0),
    ChunkedCausalMask(8192) & LocalMask(1000, 0),
    CausalMask() & PrefixMask(500_000),
    LocalMask(4095, 4095) & ChunkedCausalMask(10_000) & PrefixMask(777_777),
    CausalMask() | PrefixMask(1024),
]


@pytest.mark.serial
@pytest.mark.parametrize("mask", MILLION_MASKS, ids=repr)
def test_a_million_tokens_take_a_tenth_of_a_second_and_fifty_megabytes(mask):
    seconds, peaks = [], []
    for attempt in range(3):
        # Another offset each time, so that no attempt finds the last one's plan in the cache.
        begin = time.perf_counter()
        plan = make_block_plan(mask, MILLION, MILLION, 128, 128, q_offset=128 * attempt, kv_offset=128 * attempt)
        assert plan.rows.tiles is None
        assert plan.transpose().rows.tiles is None
        seconds.append(time.perf_counter() - begin)
    tracemalloc.start()
    try:
        plan = make_block_plan(mask, MILLION, MILLION, 128, 128, q_offset=128 * 3, kv_offset=128 * 3)
        assert plan.rows is not None
        assert plan.transpose().rows is not None
        peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert min(seconds) < 0.1
    assert max(peaks) < 50e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((CausalMask(), 0, 8, 4, 4), "q_len=0 must be at least 1"),
        ((CausalMask(), 8, 8, 4, -1), "block_kv=-1 must be at least 1"),
        ((MultiHeadMask([CausalMask(), FullMask()]), 8, 8, 4, 4), "for the mask of one head"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_block_plan(*arguments)
