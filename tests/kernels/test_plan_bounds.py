"""Plans within bounds, against every pair of tokens: no pair is lost, FULL is true, and holes are found."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import Bounds, CausalMask, FullMask, LocalMask, dot_product_attention
from kernels.call import make_call
from kernels.masks import TileKind
from kernels.masks.bounds import OF_KEYS, OF_QUERIES
from kernels.plan import Rows, counted, make_rows, tile_kinds_at
from tests.kernels.contract_cases import draw_bounds
from tests.kernels.tile_kinds import dense_tile_kinds

MASKS = (CausalMask(), FullMask(), CausalMask() & LocalMask(60, 0), CausalMask() & ~LocalMask(60, -20))
NAMES = ("k_start", "k_end", "q_start", "q_end", "k_start k_end q_start q_end", "k_end q_start", "tree", "blocks")


def call_of(mask, q_len, kv_len, bounds, **given):
    query, key = jnp.ones((2, q_len, 1, 8)), jnp.ones((2, kv_len, 1, 8))
    return make_call(query, key, key, mask, bounds=bounds, **given)


def kinds_of(rows: Rows, batch: int, num_cols: int) -> np.ndarray:
    """The kind of every tile, as a kernel without a walk finds it."""
    rows = Rows(*(x if x is None else np.asarray(x) for x in rows))
    kinds = np.full((rows.num_rows, num_cols), TileKind.EMPTY)
    for i in range(rows.num_rows):
        row = rows.read(batch, i)
        for rank in range(int(row.num_tiles)):
            tile = int(row.tile(rank))
            by_rank = TileKind.PARTIAL if rank < row.num_partial else TileKind.FULL
            kinds[i, tile] = by_rank if row.kind is None else row.kind(tile)
    return kinds


@pytest.mark.sample(16)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("names", NAMES)
def test_no_pair_is_lost_and_full_is_true(names, mask, rng):
    (q_len, kv_len), (block_q, block_kv) = (200, 256)[:: rng.choice([-1, 1])], (16, 24)
    bounds, transposed = draw_bounds(rng, names, 2, q_len, kv_len), bool(rng.integers(2))
    ids = np.sort(rng.integers(0, 3, (2, max(q_len, kv_len))))
    q_ids, kv_ids = ids[:, :q_len], ids[:, :kv_len]
    given = {"query_segment_ids": q_ids, "key_value_segment_ids": kv_ids} if rng.random() < 0.5 else {}
    inputs, call = call_of(mask, q_len, kv_len, bounds, **given)
    rows = make_rows(inputs, call, block_q, block_kv, transposed=transposed)
    under_mask = np.asarray(mask(np.arange(q_len)[:, None], np.arange(kv_len)))
    for b in range(2):
        dense = under_mask & np.broadcast_to(bounds.allowed(q_len, kv_len), (2, q_len, kv_len))[b]
        if given:
            dense = dense & (q_ids[b, :, None] == kv_ids[b])
        exact = dense_tile_kinds(dense, block_q, block_kv)
        exact = exact.T if transposed else exact
        kinds = kinds_of(rows, b, exact.shape[1])
        assert not ((exact != TileKind.EMPTY) & (kinds == TileKind.EMPTY)).any()
        assert (exact[kinds == TileKind.FULL] == TileKind.FULL).all()
        tiles = np.broadcast_to(np.arange(exact.shape[1]), exact.shape)
        at = np.asarray(tile_kinds_at(inputs, call, block_q, block_kv, tiles, transposed=transposed))[b]
        assert not ((exact != TileKind.EMPTY) & (at == TileKind.EMPTY)).any()
        assert (exact[at == TileKind.FULL] == TileKind.FULL).all()


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_a_walk_visits_what_the_counts_say(transposed, rng):
    def drawn(low, high):
        """[2, 300] One number for 50 tokens at a time, so that there are FULL tiles whatever is drawn."""
        return np.repeat(rng.integers(low, high, (2, 6)), 50, axis=1)

    start, end = OF_QUERIES if transposed else OF_KEYS
    bounds = Bounds(k_start=drawn(0, 30))._replace(**{start: drawn(0, 30), end: drawn(150, 301)})
    inputs, call = call_of(CausalMask(), 300, 300, bounds)
    rows = counted(make_rows(inputs, call, 16, 16, transposed=transposed))
    kinds = [kinds_of(rows._replace(counts=None), b, 19) for b in range(2)]
    assert any((each == TileKind.FULL).any() for each in kinds)

    @jax.jit
    def walk(rows, batch, row):
        row = rows.read(batch, row)
        visits = jax.new_ref(jnp.full((40, 2), -1))

        def visit(step, rank, tile):
            visits[step] = jnp.stack([rank, tile])

        # Twice over, as for two heads.
        row.walk(2 * row.num_tiles, visit)
        return row.num_tiles, row.num_partial, jax.freeze(visits)

    for b in range(2):
        for r, kinds_of_row in enumerate(kinds[b]):
            num_tiles, num_partial, visits = map(np.asarray, walk(rows, b, r))
            partial, full = (np.flatnonzero(kinds_of_row == kind) for kind in (TileKind.PARTIAL, TileKind.FULL))
            assert (num_tiles, num_partial) == (len(partial) + len(full), len(partial))
            expected = np.stack([np.arange(num_tiles), np.concatenate([partial, full])], axis=1)
            np.testing.assert_array_equal(visits[: 2 * num_tiles], np.concatenate([expected] * 2))


def test_siblings_are_holes():
    # A prompt of 64 tokens, and completions of 32.
    ends = np.where(np.arange(192) < 64, 192, (np.arange(192) // 32 + 1) * 32)
    inputs, call = call_of(CausalMask(), 192, 192, Bounds(q_end=ends))
    kinds = kinds_of(make_rows(inputs, call, 32, 32), 0, 6)
    f, p = TileKind.FULL, TileKind.PARTIAL
    np.testing.assert_array_equal(
        kinds,
        [[p, 0, 0, 0, 0, 0], [f, p, 0, 0, 0, 0]] + [[f, f, *[p if i == j else 0 for j in range(4)]] for i in range(4)],
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("names", ["q_end", "k_start k_end", "k_start k_end q_start q_end"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_a_plan_keeps_no_number_for_every_tile(names, transposed):
    """Of the compiled plan's buffers, none is as large as the tiles, of which there are 1024 × 1024."""
    length, block = 8192, 8

    def plan(*given):
        inputs, call = call_of(CausalMask(), length, length, Bounds(**dict(zip(names.split(), given, strict=True))))
        rows = make_rows(inputs, call, block, block, transposed=transposed)
        return rows if rows.columns is None else counted(rows)

    given = [jax.ShapeDtypeStruct((2, length), jnp.int32)] * len(names.split())
    memory = jax.jit(plan).lower(*given).compile().memory_analysis()
    assert memory.temp_size_in_bytes < (length // block) ** 2


# Of each pass: the queries and keys of a tile, and whether its plan is transposed.
PASSES = {"forward": (128, 64, False), "backward_dkv": (64, 128, True), "backward_dq": (128, 128, False)}


@pytest.mark.gpu
@pytest.mark.parametrize("names", NAMES)
def test_the_plans_of_three_passes_in_one_program_are_each_their_own(names, rng):
    """XLA makes one GPU kernel of several reductions, and did it wrongly once: see test_plan_device.py."""
    length = 4096
    bounds = draw_bounds(rng, names, 2, length, length)

    @jax.jit
    def plans(bounds):
        inputs, call = call_of(CausalMask(), length, length, bounds)
        of_pass = {
            name: make_rows(inputs, call, block_q, block_kv, transposed=transposed)
            for name, (block_q, block_kv, transposed) in PASSES.items()
        }
        return {name: rows if rows.columns is None else counted(rows) for name, rows in of_pass.items()}

    in_one = jax.device_get(plans(jax.tree.map(jnp.asarray, bounds)))
    allowed = np.tril(np.ones((length, length), bool)) & bounds.allowed(length, length)
    for name, (block_q, block_kv, transposed) in PASSES.items():
        for b in range(2):
            exact = dense_tile_kinds(np.broadcast_to(allowed, (2, length, length))[b], block_q, block_kv)
            exact = exact.T if transposed else exact
            rows = in_one[name]
            kinds = kinds_of(rows._replace(counts=None), b, exact.shape[1])
            assert not ((exact != TileKind.EMPTY) & (kinds == TileKind.EMPTY)).any(), name
            assert (exact[kinds == TileKind.FULL] == TileKind.FULL).all(), name
            if rows.counts is not None:
                for kind, number, first in ((TileKind.PARTIAL, 0, 1), (TileKind.FULL, 2, 3)):
                    np.testing.assert_array_equal(rows.counts[b, :, number], (kinds == kind).sum(axis=1))
                    firsts = np.where((kinds == kind).any(axis=1), (kinds == kind).argmax(axis=1), -1)
                    found = np.where(rows.counts[b, :, number] > 0, rows.counts[b, :, first], -1)
                    np.testing.assert_array_equal(found, firsts)


def test_bounds_of_another_form_are_refused_while_a_program_is_traced():
    query = jax.ShapeDtypeStruct((2, 5, 1, 8), jnp.float32)
    for bounds, message in (
        ({"k_end": np.zeros(5, int)}, "bounds must be kernels.Bounds, got dict"),
        (Bounds(k_end=np.zeros(6, int)), r"bounds.k_end must be integers \[2, 5\] or \[5\], got int64\(6,\)"),
        (Bounds(k_start=np.zeros((3, 5), int)), r"bounds.k_start must be integers \[2, 5\] .* got int64\(3, 5\)"),
        (Bounds(q_start=np.zeros((2, 5))), r"bounds.q_start must be integers \[2, 5\] or \[5\], got float64\(2, 5\)"),
        (Bounds(q_end=np.ones(5, bool)), r"bounds.q_end must be integers \[2, 5\] or \[5\], got bool\(5,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(functools.partial(dot_product_attention, bounds=bounds), query, query, query)


def test_bounds_beyond_int32_and_past_the_ends_say_the_same():
    query = jnp.ones((2, 5, 1, 8))
    far = Bounds(k_start=np.array([-(2**40), 0, 1, 2, 2**40]), k_end=np.full(5, 2**63, np.uint64))
    inputs, call = make_call(query, query, query, None, bounds=far)
    assert call.bounds == ("k_start", "k_end")
    np.testing.assert_array_equal(inputs.bounds.k_start, [[0, 0, 1, 2, 5]] * 2)
    np.testing.assert_array_equal(inputs.bounds.k_end, [[5] * 5] * 2)
    assert make_call(query, query, query, None, bounds=Bounds())[1].bounds == ()
