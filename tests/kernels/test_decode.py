"""Decoding through a key/value cache: the same as attention over the whole sequence, whatever else the cache holds."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import LocalMask, MultiHeadMask, TritonDecodeTuning, TritonTuning, decode_attention, slab_capacity
from kernels.decode.blocks import BlockSummary, block_tile_kinds
from kernels.masks import TileKind
from kernels.plan import list_rows
from tests.kernels.decode_session import (
    CAUSAL,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LONGEST,
    MASKS,
    NUM_COMPARED,
    NUM_SEQUENCES,
    STEP_ROOM,
    WINDOW,
    Session,
    decode,
    empty_cache,
    random_mask,
    run_session,
    with_nan_key,
)


@pytest.mark.sample(8)
@pytest.mark.parametrize("form", ["slab", "unified"])
@pytest.mark.parametrize("name", [*MASKS, "array"])
def test_decoding_equals_attention_over_the_whole_sequence(name, form, rng):
    session = Session(rng, empty_cache(form), random_mask(rng) if name == "array" else MASKS[name])
    run_session(session)
    assert session.compare(2e-5) == NUM_COMPARED


@pytest.mark.parametrize(("form", "dtype", "tolerance"), [("slab", jnp.float32, 2e-5), ("unified", jnp.bfloat16, 2e-2)])
def test_soft_cap_scale_and_sinks(form, dtype, tolerance, rng):
    sinks = jnp.asarray(rng.standard_normal(HEADS), jnp.float32)
    session = Session(rng, empty_cache(form, dtype), WINDOW, scale=0.4, logits_soft_cap=2.0, sinks=sinks)
    run_session(session)
    assert session.compare(tolerance) == NUM_COMPARED


@pytest.mark.parametrize("name", ["window", "chunked"])
def test_a_ring_keeps_what_the_mask_sees(name, rng):
    capacity = slab_capacity(MASKS[name], LONGEST, tokens_per_step=STEP_ROOM)
    assert capacity < LONGEST
    session = Session(rng, empty_cache("slab", capacity=capacity), MASKS[name])
    run_session(session)
    assert session.compare(2e-5) == NUM_COMPARED


@pytest.mark.parametrize("implementation", ["blockwise", "dense"])
@pytest.mark.parametrize("form", ["slab", "unified"])
def test_no_sequence_reads_anothers_slots(form, implementation, rng):
    """All of a neighbour's slots hold NaN or infinity; what a sequence gets doesn't change by a bit."""
    session = Session(rng, empty_cache(form), CAUSAL)
    session.start({0: 20, 1: 13, 2: 9})
    query, _ = session.append({0: 4, 1: 4, 2: 4}, STEP_ROOM)
    before = decode(query, session.cache, CAUSAL, implementation=implementation)
    if form == "slab":
        neighbours = np.zeros((NUM_SEQUENCES, 1), bool)
        neighbours[1] = True
    else:
        neighbours = np.asarray(session.cache.slots(jnp.array([1]), jnp.arange(session.cache.capacity)[None])[1][0])
        assert neighbours.sum() == 13 + 4
    neighbours = neighbours[..., None, None]
    cache = dataclasses.replace(
        session.cache,
        # Not infinite keys: a query of one sign makes logits of −inf of them, which count as pairs that may not attend.
        key=jnp.where(neighbours, jnp.nan, session.cache.key),
        value=jnp.where(neighbours, jnp.inf, session.cache.value),
    )
    after = np.asarray(decode(query, cache, CAUSAL, implementation=implementation))
    np.testing.assert_array_equal(after[[0, 2]], before[jnp.array([0, 2])])
    assert not np.isfinite(after[1]).any(), "the neighbour itself does read them"


@pytest.mark.parametrize("implementation", ["blockwise", "dense"])
@pytest.mark.parametrize("form", ["slab", "unified"])
def test_queries_that_see_nothing(form, implementation):
    cache = empty_cache(form)
    query = jnp.ones((NUM_SEQUENCES, 2, HEADS, HEAD_DIM))
    output, lse = decode(query, cache, CAUSAL, sinks=jnp.ones(HEADS), return_lse=True, implementation=implementation)
    assert (output == 0).all()
    assert (lse == -jnp.inf).all()


@pytest.mark.parametrize("implementation", ["blockwise", "dense"])
@pytest.mark.parametrize("form", ["slab", "unified"])
def test_a_key_that_is_nan_shows(form, implementation, rng):
    """In output and lse of the tokens and heads that see it, and nowhere else."""
    session = Session(rng, empty_cache(form), CAUSAL)
    session.start({0: 20, 1: 13, 2: 9})
    query, _ = session.append({0: 2, 1: 2, 2: 2}, 2)
    cache = with_nan_key(session.cache, sequence=1)
    output, lse = decode(query, cache, CAUSAL, return_lse=True, implementation=implementation)
    sees = np.zeros((NUM_SEQUENCES, 2, HEADS), bool)
    sees[1, 1, : HEADS // KV_HEADS] = True
    np.testing.assert_array_equal(np.isnan(lse), sees)
    np.testing.assert_array_equal(np.isnan(output), np.broadcast_to(sees[..., None], output.shape))


@pytest.mark.parametrize("form", ["slab", "unified"])
def test_visits_are_the_blocks_that_hold_an_allowed_slot(form, rng):
    """Against the mask of every slot: no block is left out, none is read in vain, FULL ones need no mask."""
    session = Session(rng, empty_cache(form, capacity=32), WINDOW)
    session.start({0: 20, 1: 7, 2: 24})
    for _ in range(20):
        session.append({0: 1, 2: 1}, 1)
    cache, window = session.cache, LocalMask(15, 0)
    newest = np.asarray(cache.lengths)[:, None] - 1

    @jax.jit
    def look(cache):
        slots = jnp.broadcast_to(jnp.arange(cache.capacity), (NUM_SEQUENCES, cache.capacity))
        return list_rows(block_tile_kinds(window, jnp.asarray(newest), cache.blocks(None))[:, None]), cache.slots(
            None, slots
        )

    plan, (position, seen) = look(cache)
    allowed = np.asarray(seen & window(newest, position)).reshape(NUM_SEQUENCES, -1, cache.block_size)
    counts = plan.bounds[:, 0, 1::2].tolist()
    assert counts == [[0, 2], [1, 1], [2, 3]], "of 40, 7 and 44 tokens"
    for sequence, (num_partial, num_visited) in enumerate(counts):
        blocks = plan.tiles[sequence, :num_visited].tolist()
        assert set(blocks) == set(np.flatnonzero(allowed[sequence].any(-1)))
        assert allowed[sequence, blocks[num_partial:]].all()


def test_a_block_counts_for_all_heads_together():
    summary = BlockSummary(*(jnp.array([[start, start + 7]])[:, :1] for start in (0, 7)), *[jnp.ones((1, 1), bool)] * 2)
    tile_kinds = [
        block_tile_kinds(mask, jnp.array([[9]]), summary).item()
        for mask in (CAUSAL, LocalMask(1, 0), LocalMask(3, 0), MultiHeadMask([CAUSAL, LocalMask(1, 0)]))
    ]
    assert tile_kinds == [TileKind.FULL, TileKind.EMPTY, TileKind.PARTIAL, TileKind.PARTIAL]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": jnp.ones((3, 1, 4, 9))}, "doesn't fit a cache of 2 key/value heads of 8"),
        ({"query": jnp.ones((3, 1, 3, 8))}, "a multiple of 2"),
        ({"query": jnp.ones((3, 4, 8))}, "query must be [batch, new tokens, heads, head_dim]"),
        ({"query": jnp.ones((3, 1, 4, 8), jnp.bfloat16)}, "query is bfloat16, but the cache holds float32; cast it"),
        ({"query": jnp.ones((2, 1, 4, 8))}, "a batch of 2 for a cache of 3 sequences; say with `sequences`"),
        ({"cache": {}}, "cache must be a SlabCache or a UnifiedCache, got dict"),
        ({"mask": "causal"}, "mask must be a kernels.Mask"),
        ({"mask": MultiHeadMask([CAUSAL, WINDOW])}, "has 2 masks for num_heads=4"),
        ({"sequences": jnp.zeros(2, int)}, "sequences must be integers [3]"),
        ({"query_positions": jnp.zeros((3, 2), int)}, "query_positions must be integers [3, 1]"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap=-1.0 must be positive"),
        ({"sinks": jnp.zeros(3)}, "sinks must be floating [4]"),
        (
            {"implementation": "mosaic_gpu"},
            "'mosaic_gpu' is no backend of decoding; expected one of dense, triton, blockwise, a tuning object (Triton",
        ),
        ({"implementation": "bockwise"}, "; did you mean 'blockwise'?"),
        ({"implementation": TritonTuning()}, "query=None, interpret=False) is no backend of decoding; expected one of"),
        ({"implementation": TritonDecodeTuning()}, "interpret=False) can't serve this call: runs on gpu, not on cpu"),
    ],
)
def test_arguments_that_dont_fit(change, message):
    arguments = {"query": jnp.ones((3, 1, 4, 8)), "cache": empty_cache("slab"), "mask": CAUSAL} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        decode_attention(**arguments)
