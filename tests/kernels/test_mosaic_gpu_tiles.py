"""The tiles that the Mosaic GPU kernels visit, and what they hold for each warpgroup."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels import CausalMask, FullMask, LocalMask, MaskFn, MosaicBackwardTuning, PrefixMask
from kernels.backends.mosaic_gpu.backward_dkv import block_shift
from kernels.backends.mosaic_gpu.block_range import read_block_range, union_of_ranges
from kernels.backends.mosaic_gpu.warpgroup_tiles import BlockRows
from kernels.masks import TileKind
from kernels.plan import make_rows
from tests.kernels.gpu_calls import call_of
from tests.kernels.tile_kinds import dense_tile_kinds, visited

WITH_GAPS = CausalMask() & ~LocalMask(150, -50)
# Its rows are intervals of keys, its columns aren't intervals of queries.
ROWS_OUT_OF_ORDER = MaskFn(lambda q_pos, kv_pos: kv_pos <= q_pos ^ 64)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("mask", [FullMask(), CausalMask(), LocalMask(70, 0), PrefixMask(100), WITH_GAPS], ids=repr)
def test_kernels_visit_the_plans_tiles(mask, transposed):
    inputs, call = call_of(mask)
    kinds = visited(make_rows(inputs, call, 64, 32, transposed=transposed), 1, 8 if transposed else 16)
    position = np.arange(512)
    expected = dense_tile_kinds(
        np.broadcast_to(np.asarray(mask(position[:, None], position[None])), (512, 512)), 64, 32
    )
    np.testing.assert_array_equal(kinds.T if transposed else kinds, expected)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("mask", [CausalMask(), WITH_GAPS, ROWS_OUT_OF_ORDER], ids=repr)
def test_packed_documents_narrow_what_is_visited(mask, transposed, rng):
    ids = jnp.asarray(np.sort(rng.integers(0, 5, (2, 512))))
    inputs, call = call_of(mask, query_segment_ids=ids, key_value_segment_ids=ids)
    rows = make_rows(inputs, call, 64, 32, transposed=transposed)
    position = np.arange(512)
    for batch in range(2):
        kinds = visited(rows, batch, 8 if transposed else 16)
        same = np.asarray(ids[batch][:, None] == ids[batch][None])
        planned = dense_tile_kinds(np.asarray(mask(position[:, None], position[None])), 64, 32)
        expected = np.minimum(planned, dense_tile_kinds(same, 64, 32))
        np.testing.assert_array_equal(kinds.T if transposed else kinds, expected)


@pytest.mark.parametrize("num_warpgroups", [1, 2, 3])
@pytest.mark.parametrize("mask", [FullMask(), CausalMask(), LocalMask(70, 0), CausalMask(-200)], ids=repr)
@pytest.mark.parametrize("is_packed", [False, True], ids=["one document", "packed"])
def test_warpgroups_attend_to_their_own_tiles_of_the_blocks_range(mask, num_warpgroups, is_packed, rng):
    ids = jnp.asarray(np.sort(rng.integers(0, 5, (2, 512)))) if is_packed else None
    inputs, call = call_of(mask, query_segment_ids=ids, key_value_segment_ids=ids)
    rows = make_rows(inputs, call, 64, 32)
    shared = union_of_ranges(rows, num_warpgroups)
    for batch in range(2):
        expected, kinds = visited(rows, batch, 16), np.full((shared.bounds.shape[1], 16), TileKind.EMPTY)
        streamed = set()
        for i in range(len(kinds)):
            block, member = divmod(i, num_warpgroups)
            walk = read_block_range(shared, batch, block, member, num_warpgroups)
            streamed.add((block, *(int(walk.tile(rank)) for rank in range(int(walk.num_tiles)))))
            assert 0 <= walk.begin <= walk.ends[0] <= walk.ends[1] <= walk.ends[2] <= walk.num_tiles
            for rank in range(int(walk.begin), int(walk.ends[2])):
                is_full = walk.ends[0] <= rank < walk.ends[1]
                kinds[i, int(walk.tile(rank))] = TileKind.FULL if is_full else TileKind.PARTIAL
        np.testing.assert_array_equal(kinds[: len(expected)], expected)
        assert (kinds[len(expected) :] == TileKind.EMPTY).all()
        assert len(streamed) == len(kinds) // num_warpgroups, "a block's rows see the same tiles"


def kinds_of_warpgroups(rows: BlockRows, batch: int, num_warpgroups: int, num_cols: int) -> np.ndarray:
    """What each warpgroup is told of every tile that its block visits, and EMPTY for the others."""
    kinds = np.full((rows.blocks.num_rows, num_warpgroups, num_cols), TileKind.EMPTY)
    for block, warpgroup in np.ndindex(kinds.shape[:2]):
        kind_of = rows.read_kind(batch, block, warpgroup)
        row = rows.blocks.read(batch, block)
        tiles = [int(row.tile(rank)) for rank in range(int(row.num_tiles))]
        assert len(set(tiles)) == len(tiles), "no tile is visited twice"
        for rank, tile in enumerate(tiles):
            kinds[block, warpgroup, tile] = kind_of(tile, rank < row.num_partial)
    return kinds.reshape(-1, num_cols)


@pytest.mark.sample(10)
@pytest.mark.parametrize("num_warpgroups", [2, 3])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("mask", [FullMask(), CausalMask(), LocalMask(70, 0), CausalMask(-200)], ids=repr)
@pytest.mark.parametrize("documents", [None, "packed", "packed, at positions", "one that comes back"])
def test_a_backward_tells_each_warpgroup_what_a_tile_holds_for_it(mask, documents, transposed, num_warpgroups, rng):
    is_ragged = rng.random() < 0.5
    q_len, kv_len = rng.integers(3, 9, 2) * 64 - (rng.integers(1, 63, 2) if is_ragged else 0)
    ids = [rng.integers(0, 5, (2, length)) for length in (q_len, kv_len)]
    if documents == "one that comes back":
        ids = [np.arange(length)[None] // [[90], [130]] % 2 for length in (q_len, kv_len)]
    else:
        ids = [np.sort(x) for x in ids]
    positions = [np.arange(length) + rng.integers(0, 300) for length in (q_len, kv_len)]
    if documents != "packed, at positions":
        positions = [np.arange(length) for length in (q_len, kv_len)]
    names = ("query_segment_ids", "key_value_segment_ids", "query_positions", "key_value_positions")
    num_given = {None: 0, "packed, at positions": 4}.get(documents, 2)
    given = dict(zip(names[:num_given], map(jnp.asarray, [*ids, *positions]), strict=False))
    inputs, call = call_of(mask, length=q_len, kv_len=kv_len, **given)
    block = 64 * num_warpgroups
    sides = (32, block) if transposed else (block, 32)
    rows = BlockRows.of(inputs, call, *sides, transposed=transposed, waits_in_each_step=False)
    for batch in range(2):
        by_mask = np.broadcast_to(mask(positions[0][:, None], positions[1]), (q_len, kv_len))
        by_documents = np.broadcast_to(documents is None or ids[0][batch][:, None] == ids[1][batch], (q_len, kv_len))
        # Rows and columns that fill the last tiles hold nothing.
        of_mask, of_documents, exact = (
            dense_tile_kinds(padded.T if transposed else padded, 64, 32)
            for allowed in (by_mask, by_documents, by_mask & by_documents)
            for padded in [np.pad(allowed, [(0, -length % 64) for length in (q_len, kv_len)])]
        )
        kinds = kinds_of_warpgroups(rows, batch, num_warpgroups, exact.shape[1])[: len(exact)]
        assert ((kinds > TileKind.EMPTY) | (exact == TileKind.EMPTY)).all()
        if not is_ragged:
            assert (exact[kinds == TileKind.FULL] == TileKind.FULL).all()
            if rows.warpgroup_bounds is not None and documents in (None, "packed"):
                np.testing.assert_array_equal(kinds, np.minimum(of_mask, of_documents))


@pytest.mark.parametrize(
    ("mask", "length", "packed", "waits_in_each_step", "passes_over"),
    [
        (CausalMask(), 512, False, False, True),
        (CausalMask(), 1024, False, False, True),
        (CausalMask(), 2048, False, False, False),
        (CausalMask(), 512, False, True, False),
        (CausalMask(), 8192, True, True, True),
        (LocalMask(255, 0), 8192, False, False, True),
        (LocalMask(255, 0), 8192, False, True, False),
        (FullMask(), 512, False, False, False),
        (MaskFn(lambda q_pos, kv_pos: kv_pos <= q_pos), 512, False, False, False),
        (MaskFn(lambda q_pos, kv_pos: kv_pos <= q_pos), 512, True, True, False),
        (ROWS_OUT_OF_ORDER, 512, True, False, False),
    ],
)
def test_warpgroups_pass_over_tiles_where_it_pays(mask, length, packed, waits_in_each_step, passes_over):
    ids = jnp.zeros((2, length), jnp.int32) if packed else None
    inputs, call = call_of(mask, length=length, query_segment_ids=ids, key_value_segment_ids=ids)
    how = {"transposed": True, "waits_in_each_step": waits_in_each_step}
    assert (BlockRows.of(inputs, call, 64, 128, **how).warpgroup_bounds is not None) == passes_over
    # A block of one warpgroup has nothing to tell apart.
    assert BlockRows.of(inputs, call, 64, 64, **how).warpgroup_bounds is None


@pytest.mark.parametrize("mask", [CausalMask(), FullMask()], ids=repr)
@pytest.mark.parametrize("returns", [False, True], ids=["scattered", "a document that comes back"])
def test_unsorted_documents_lose_no_pair(mask, returns, rng):
    scattered = rng.integers(0, 3, (2, 512)) * (np.arange(512) % 96 > 60)
    ids = jnp.asarray(np.repeat([[0, 1, 0, 2], [3, 3, 0, 3]], 128, axis=1) if returns else scattered)
    inputs, call = call_of(mask, query_segment_ids=ids, key_value_segment_ids=ids)
    rows = make_rows(inputs, call, 64, 32)
    position = np.arange(512)
    for batch in range(2):
        allowed = np.asarray((ids[batch][:, None] == ids[batch][None]) & mask(position[:, None], position[None]))
        kinds, exact = visited(rows, batch, 16), dense_tile_kinds(allowed, 64, 32)
        assert ((kinds > TileKind.EMPTY) | (exact == TileKind.EMPTY)).all()
        assert (exact[kinds == TileKind.FULL] == TileKind.FULL).all()


def test_positions_are_classified_on_the_device(rng):
    positions = jnp.asarray(rng.permutation(512))
    inputs, call = call_of(LocalMask(40, 0), query_positions=jnp.arange(512) + 7, key_value_positions=positions)
    kinds = visited(make_rows(inputs, call, 64, 32), 0, 16)
    exact = dense_tile_kinds(
        np.asarray(LocalMask(40, 0)(np.arange(512)[:, None] + 7, np.asarray(positions)[None])), 64, 32
    )
    assert ((kinds > TileKind.EMPTY) | (exact == TileKind.EMPTY)).all()


@pytest.mark.parametrize(
    ("length", "head_dim", "num_l2_heads", "shift"),
    [(32_768, 128, 2, 2), (32_768, 128, 1, 2), (4096, 128, 2, 4), (32_768, 64, 2, 4), (262_144, 256, 2, 1)],
)
def test_blocks_that_run_at_once_share_tiles_in_the_l2_cache(length, head_dim, num_l2_heads, shift):
    _, call = call_of(FullMask(), head_dim=head_dim)
    tuning = MosaicBackwardTuning(block_q=64, num_l2_heads=num_l2_heads)
    assert block_shift(call._replace(q_len=length), tuning) == shift
