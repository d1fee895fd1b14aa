"""The two forms of cache: which slots tokens go to, what the table knows of them, what has no room."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import (
    CacheFull,
    CausalMask,
    ChunkedCausalMask,
    LocalMask,
    MaskFn,
    MultiHeadMask,
    PrefixMask,
    SlabCache,
    UnifiedCache,
    decode_attention,
    slab_capacity,
)
from kernels.decode.blocks import BlockSummary

BLOCK = 4

# Compiled as wholes: most of a test's time would go into compiling their parts one by one.
write = jax.jit(lambda cache, tokens, rows, counts: cache.write(*tokens, sequences=rows, num_tokens=counts))
free, share = jax.jit(UnifiedCache.free), jax.jit(UnifiedCache.share)


@jax.jit
def look(cache, sequence):
    """Positions, keys and values of all slots, and whether a sequence sees them."""
    row, slots = sequence[None], jnp.arange(cache.capacity)[None]
    return [x.ravel() for x in (*cache.slots(row, slots), *cache.read(row, slots))]


def tokens(rng, rows: int, count: int):
    """Keys and values of new tokens, of one head with one number each."""
    return tuple(jnp.asarray(rng.standard_normal((rows, count, 1, 1)), jnp.float32) for _ in range(2))


ONES = (jnp.ones((2, 1, 1, 1)), jnp.ones((2, 1, 1, 1)))


@functools.cache
def filled() -> UnifiedCache:
    """Two sequences of four tokens in eight blocks."""
    cache = UnifiedCache.empty(2, 8 * BLOCK, 1, 1, dtype=jnp.float32, block_size=BLOCK)
    return write(cache, tuple(jnp.ones((2, 4, 1, 1)) for _ in range(2)), jnp.arange(2), jnp.array([4, 4]))


def held(cache, sequence: int) -> dict[int, tuple[float, float]]:
    """Position → (key, value) of what a sequence sees."""
    position, seen, key, value = map(np.asarray, look(cache, jnp.asarray(sequence)))
    assert len(set(position[seen])) == seen.sum(), "no position is held twice"
    return {int(position[slot]): (key[slot], value[slot]) for slot in np.flatnonzero(seen)}


def check_summary(cache: UnifiedCache):
    """Compares the table's summary of its blocks with its slots."""
    summary = BlockSummary(*map(np.asarray, cache.blocks(None)))
    for sequence in range(cache.num_sequences):
        position, seen, *_ = (np.asarray(x).reshape(-1, BLOCK) for x in look(cache, jnp.asarray(sequence)))
        np.testing.assert_array_equal(summary.some[sequence], seen.any(1))
        np.testing.assert_array_equal(summary.every[sequence], seen.all(1))
        for block in np.flatnonzero(seen.any(1)):
            assert summary.lowest[0, block] <= position[block][seen[block]].min()
            assert summary.highest[0, block] >= position[block][seen[block]].max()


def test_a_shared_cache_gives_and_takes_slots(rng):
    """A random life of many sequences, against a dict of what each wrote."""
    num_sequences, num_blocks = 37, 40  # More than one word of sequences.
    cache = UnifiedCache.empty(num_sequences, num_blocks * BLOCK, 1, 1, dtype=jnp.float32, block_size=BLOCK)
    expected: dict[int, dict] = {sequence: {} for sequence in range(num_sequences)}
    for _ in range(25):
        rows = rng.choice(num_sequences, 3, replace=False)
        counts = rng.integers(0, 7, 3)
        try:
            cache.check_room(counts, sequences=rows)
        except CacheFull:
            fullest = max(expected, key=lambda sequence: len(expected[sequence]))
            cache, expected[fullest] = free(cache, fullest), {}
            continue
        key, value = tokens(rng, 3, 6)
        cache = write(cache, (key, value), jnp.asarray(rows), jnp.asarray(counts))
        for row, sequence in enumerate(rows):
            start = len(expected[sequence])
            for token in range(counts[row]):
                expected[sequence][start + token] = (key[row, token, 0, 0], value[row, token, 0, 0])
        if rng.random() < 0.3:
            source, target = (int(x) for x in rng.choice(num_sequences, 2, replace=False))
            length = int(rng.integers(0, 12))
            cache = share(cache, source, target, length)
            expected[target] = {place: x for place, x in expected[source].items() if place < length}
    check_summary(cache)
    for sequence, past in expected.items():
        assert held(cache, sequence) == past
        assert cache.lengths[sequence] == len(past)


def test_a_shared_prompt_outlives_the_sequence_it_came_from(rng):
    cache = UnifiedCache.empty(3, 8 * BLOCK, 1, 1, dtype=jnp.float32, block_size=BLOCK)
    cache = write(cache, tokens(rng, 1, 6), jnp.array([0]), None)
    cache = share(share(cache, 0, 1, 6), 0, 2, 5)
    whole = held(cache, 0)
    for sequence in range(3):
        cache = write(cache, tokens(rng, 1, 2), jnp.array([sequence]), None)
    cache = free(cache, 0)
    assert held(cache, 0) == {}
    assert {place: x for place, x in held(cache, 1).items() if place < 6} == whole
    assert {place: x for place, x in held(cache, 2).items() if place < 5} == {place: whole[place] for place in range(5)}
    assert cache.lengths.tolist() == [0, 8, 7]
    check_summary(cache)
    # The prompt's two blocks hold what the others still see, and each of them wrote a block of its own.
    assert (cache.table.some_slot == 0).all(-1).sum() == 8 - 4
    assert (free(free(cache, 1), 2).table.some_slot == 0).all()


def test_layers_share_one_table(rng):
    cache = UnifiedCache.empty(2, 4 * BLOCK, 1, 1, dtype=jnp.float32, block_size=BLOCK)
    table, slots = jax.jit(lambda table: table.allocate(3))(cache.table)
    layers = [cache.store(table, slots, *tokens(rng, 2, 3)) for _ in range(2)]
    alone = write(cache, tokens(rng, 2, 3), None, None)
    for layer in layers:
        assert held(layer, 1).keys() == held(alone, 1).keys() == {0, 1, 2}
    assert held(layers[0], 1) != held(layers[1], 1)


@pytest.mark.parametrize("capacity", [5, 64])
def test_a_ring_holds_the_newest_tokens(capacity, rng):
    cache = SlabCache.empty(3, capacity, 1, 1, dtype=jnp.float32, block_size=BLOCK)
    expected = [{}, {}, {}]
    for longest in (12, 1, 1, 3):
        key, value = tokens(rng, 3, longest)
        counts = rng.integers(0, longest + 1, 3)
        cache = write(cache, (key, value), None, jnp.asarray(counts))
        for row in range(3):
            start = 1 + max(expected[row], default=-1)
            expected[row] |= {start + i: (key[row, i, 0, 0], value[row, i, 0, 0]) for i in range(counts[row])}
            kept = sorted(expected[row])[-capacity:]
            assert held(cache, row) == {place: expected[row][place] for place in kept}
    assert held(cache.free(1), 1) == {}


def test_tokens_written_one_by_one_are_those_of_one_write(rng):
    """One token of one sequence takes a path of its own, round a ring of five slots."""
    empty, (key, value) = SlabCache.empty(1, 5, 1, 1, dtype=jnp.float32), tokens(rng, 1, 13)
    one_by_one = empty
    for at in range(13):
        one_by_one = write(one_by_one, (key[:, at : at + 1], value[:, at : at + 1]), None, None)
    expected = write(empty, (key, value), None, None)
    jax.tree.map(np.testing.assert_array_equal, one_by_one, expected)
    nothing = write(one_by_one, (key[:, :1], value[:, :1]), None, jnp.array([0]))
    jax.tree.map(np.testing.assert_array_equal, nothing, expected)


def test_writing_in_place(rng):
    """A donated cache is updated where it lies."""
    for cache in (SlabCache.empty(2, 64, 1, 1), UnifiedCache.empty(2, 256, 1, 1)):
        new = jnp.ones((2, 1, 1, 1), jnp.bfloat16)
        step = jax.jit(lambda cache, new: cache.write(new, new), donate_argnums=0).lower(cache, new).compile()
        memory = step.memory_analysis()
        assert memory.alias_size_in_bytes >= cache.key.nbytes + cache.value.nbytes


def test_a_full_shared_cache(rng):
    cache = UnifiedCache.empty(2, 3 * BLOCK, 1, 1, dtype=jnp.float32, block_size=BLOCK)
    cache = write(cache, tokens(rng, 2, 5), None, jnp.array([5, 2]))
    cache.check_room(2)
    message = (
        "8 more tokens of 2 sequences need 1 free blocks of 4 slots, but 0 of 3 are free; "
        "free a sequence, or make the cache with capacity=16"
    )
    with pytest.raises(CacheFull, match=re.escape(message)):
        cache.check_room([3, 5])
    cache.check_room(3, sequences=[0])
    kept = held(cache, 1)
    cache = write(cache, tokens(rng, 2, 5), None, jnp.array([5, 5]))
    assert held(cache, 1).items() >= kept.items(), "what was there stays"
    with pytest.raises(CacheFull, match=r"5 tokens of sequences \[0, 1\] found no room in 12 slots and are lost; free"):
        cache.check_room(0)


def test_a_sequence_that_lost_tokens_is_refused_until_it_ends(rng):
    cache = UnifiedCache.empty(4, 3 * BLOCK, 1, 1, dtype=jnp.float32, block_size=BLOCK)
    cache = write(cache, tokens(rng, 1, 3 * BLOCK + 2), jnp.array([2]), None)
    cache.check_room(0, sequences=[0, 1])
    cache = share(cache, 2, 3)
    for sequence in (2, 3):
        with pytest.raises(CacheFull, match=rf"2 tokens of sequences \[{sequence}\] found no room"):
            cache.check_room(0, sequences=[sequence])
        cache = free(cache, sequence)
    cache.check_room(BLOCK, sequences=[1, 2, 3])


def test_slots_that_no_table_gives_are_left_out(rng):
    cache = filled()
    stored = cache.store(cache.table, jnp.array([[-1], [cache.capacity]]), *tokens(rng, 2, 1))
    jax.tree.map(np.testing.assert_array_equal, stored, cache)


def test_a_slab_that_is_no_ring_for_the_mask(rng):
    cache = SlabCache.empty(2, 10, 1, 1, dtype=jnp.float32)
    cache = write(cache, tokens(rng, 2, 8), None, jnp.array([8, 3]))
    cache.check_room(2, CausalMask())
    cache.check_room(100, LocalMask(6, 0), tokens_per_step=4)
    message = (
        "sequence 0 holds 8 tokens and is to gain 3, for which this mask needs 11 slots of its 10; "
        "end the sequence, or make the cache with capacity=11"
    )
    with pytest.raises(CacheFull, match=re.escape(message)):
        cache.check_room(3, CausalMask())
    with pytest.raises(CacheFull, match="needs 11 slots"):
        cache.check_room([0, 100], LocalMask(6, 0), tokens_per_step=5)


@pytest.mark.parametrize(
    ("mask", "capacity"),
    [
        (None, 500),
        (CausalMask(), 500),
        (LocalMask(9, 0), 13),
        (ChunkedCausalMask(20), 23),
        (CausalMask() & LocalMask(9, 0) & PrefixMask(5), 13),
        (CausalMask() | LocalMask(9, 0), 500),
        (ChunkedCausalMask(20) | LocalMask(9, 0), 23),
        (MaskFn(lambda q, kv: kv <= q) & LocalMask(9, 0), 13),
        (MultiHeadMask([LocalMask(9, 0), LocalMask(30, 0)]), 34),
        (~LocalMask(9, 0), 500),
        (LocalMask(9_000, 0), 500),
    ],
    ids=repr,
)
def test_slab_capacity(mask, capacity):
    assert slab_capacity(mask, 500, tokens_per_step=4) == capacity


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlabCache.empty(2, 0, 1, 1), "capacity=0 must be at least 1"),
        (lambda: UnifiedCache.empty(2, 100, 1, 1), "capacity=100 is not a multiple of block_size=128; use 128"),
        (lambda: slab_capacity(None, 0), "max_length=0 must be at least 1"),
        (lambda: UnifiedCache.empty(2, 128, 1, 1).share(1, 1), "sequence 1 can't be replaced by its own start"),
        (
            lambda: SlabCache.empty(2, 8, 1, 4).write(jnp.ones((2, 1, 1, 3)), jnp.ones((2, 1, 1, 4))),
            "key must be [batch, tokens, 1, 4] for this cache, got (2, 1, 1, 3)",
        ),
        (
            lambda: SlabCache.empty(2, 8, 1, 4).write(jnp.ones((2, 1, 1, 4)), jnp.ones((2, 1, 1, 4))),
            "key is float32, but the cache holds bfloat16; cast it",
        ),
        (
            lambda: UnifiedCache.empty(2, 128, 1, 1).share(0, 2),
            "sequences [2] aren't all from 0 to 1, which the cache has",
        ),
        (lambda: UnifiedCache.empty(2, 128, 1, 1).share(0, 1, 3), "sequence 0 holds 0 tokens, not num_tokens=3"),
        (lambda: SlabCache.empty(2, 8, 1, 4).free([-1]), "sequences [-1] aren't all from 0 to 1"),
        (lambda: UnifiedCache.empty(2, 128, 1, 1).check_room(1, sequences=[0, 5]), "sequences [0, 5] aren't all from"),
        (
            lambda: SlabCache.empty(2, 8, 1, 4, dtype="float32").write(
                jnp.ones((2, 1, 1, 4)), jnp.ones((2, 1, 1, 4)), sequences=jnp.array([1, 1])
            ),
            "sequences [1, 1] must differ",
        ),
        (
            lambda: decode_attention(
                jnp.ones((1, 1, 1, 4), jnp.bfloat16), SlabCache.empty(2, 8, 1, 4), sequences=jnp.array([2])
            ),
            "sequences [2] aren't all from 0 to 1",
        ),
        (
            lambda: UnifiedCache.empty(2, 128, 1, 1).table.allocate(1, num_tokens=jnp.ones(3, int)),
            "num_tokens must be integers [2]",
        ),
        (
            lambda: jax.jit(lambda cache: cache.check_room(1))(UnifiedCache.empty(2, 128, 1, 1)),
            "check_room reads the cache and its arguments on the host; call it outside jax.jit",
        ),
        (lambda: filled().write(*ONES, num_tokens=[2, 1]), "num_tokens=[2, 1] must all be from 0 to 1, the tokens"),
        (lambda: filled().write(*ONES, num_tokens=jnp.array([-1, 1])), "num_tokens=[-1, 1] must all be from 0 to 1"),
        (lambda: filled().write(*ONES, num_tokens=[2**32 + 1, 1]), "num_tokens=[4294967297, 1] must all be from 0"),
        (lambda: filled().write(*ONES, num_tokens=[True, False]), "num_tokens must be integers, got bool[2]"),
        (lambda: filled().write(*ONES, num_tokens=np.ones(2)), "num_tokens must be integers, got float64[2]"),
        (
            lambda: filled().write(*ONES, num_tokens=1),
            "num_tokens must be integers [2], one for each batch element, got int64[]",
        ),
        (lambda: filled().write(*ONES, sequences=[0.0, 1.0]), "sequences must be integers, got float64[2]"),
        (lambda: filled().write(*ONES, sequences=[0, 2**70]), "sequences must be integers, got object[2]"),
        (
            lambda: filled().write(*ONES, sequences=1),
            "sequences must be integers [2], one for each batch element, got int64[]",
        ),
        (lambda: filled().write(*(x[:, :0] for x in ONES)), "key of shape (2, 0, 1, 1) holds no tokens"),
        (lambda: filled().table.allocate(-1), "num_new=-1 must be at least 1"),
        (lambda: filled().table.allocate(True), "num_new must be integers, got bool[]"),
        (lambda: filled().table.allocate(1, num_tokens=[0, 3]), "num_tokens=[0, 3] must all be from 0 to 1"),
        (lambda: filled().table.share(1, 1), "sequence 1 can't be replaced by its own start"),
        (lambda: filled().share(np.int64(1), 1), "sequence 1 can't be replaced by its own start"),
        (lambda: filled().share(np.array(0), jnp.array(0)), "sequence 0 can't be replaced by its own start"),
        (lambda: filled().share(0, 1, -3), "num_tokens=-3 must be at least 0"),
        (lambda: filled().share(0, 1, jnp.array(-3)), "num_tokens=-3 must be at least 0"),
        (lambda: jax.jit(lambda cache: cache.share(0, 1, -3))(filled()), "num_tokens=-3 must be at least 0"),
        (lambda: filled().share(0, 1, 2.0), "num_tokens must be integers, got float64[]"),
        (lambda: filled().share(0, 1, [2]), "num_tokens must be one integer, got int64[1]"),
        (lambda: filled().share([0], 1), "source must be one integer, got int64[1]"),
        (lambda: filled().share(False, 1), "source must be integers, got bool[]"),
        (lambda: filled().free([True, False]), "sequences must be integers, got bool[2]"),
        (lambda: filled().free([[0]]), "sequences must be one number or a vector of them, got shape [1, 1]"),
        (lambda: filled().free("all"), "sequences must be integers, got <U3[]"),
        (
            lambda: filled().check_room(-1),
            "num_tokens must be one integer of at least 0, or one for each of 2 sequences",
        ),
        (lambda: filled().check_room([1, 2, 3]), "or one for each of 2 sequences, got [1, 2, 3]"),
        (lambda: filled().check_room(1.5), "num_tokens must be integers, got float64[]"),
        (
            lambda: filled().check_room(2**31 - 1),
            "sequence 0 holds 4 tokens and is to gain 2147483647; a sequence holds at most 2147483647",
        ),
        (lambda: filled().check_room(2**63 - 1, sequences=[1]), "a sequence holds at most 2147483647"),
        (
            lambda: jax.jit(lambda count: filled().check_room(count))(1),
            "check_room reads the cache and its arguments on the host; call it outside jax.jit",
        ),
        (
            lambda: filled().store(UnifiedCache.empty(2, 128, 1, 1).table, jnp.zeros((2, 1), int), *ONES),
            "slots [2, 1] of a table of 128 don't fit [2, 1] tokens and 32 slots",
        ),
        (
            lambda: filled().store(filled().table, jnp.zeros(2, int), *ONES),
            "slots [2] of a table of 32 don't fit [2, 1]",
        ),
        (
            lambda: decode_attention(ONES[0], filled(), query_positions=[[2**31], [0]]),
            "query_positions reaches from 0 to 2147483648, beyond int32; subtract",
        ),
        (
            lambda: decode_attention(ONES[0], filled(), query_positions=[[0.0], [1.0]]),
            "query_positions must be integers [2, 1] or [1], got float64(2, 1)",
        ),
        (
            lambda: jax.jit(lambda x: decode_attention(ONES[0], filled(), query_positions=x))(
                np.zeros((2, 1), "uint32")
            ),
            "query_positions is traced uint32, whose values may be beyond int32; pass query_positions.astype",
        ),
        (lambda: decode_attention(ONES[0], filled(), sequences=[True, False]), "sequences must be integers, got bool"),
        (lambda: UnifiedCache.empty(2.0, 128, 1, 1), "num_sequences must be integers, got float64[]"),
        (
            lambda: SlabCache.empty(1, 8, 1, 8, dtype="int32"),
            "dtype must be one of float16, bfloat16, float32, float64, got int32",
        ),
        (lambda: slab_capacity("causal", 5), "mask must be a kernels.Mask such as CausalMask(), got str"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
