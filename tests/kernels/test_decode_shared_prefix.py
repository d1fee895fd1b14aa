"""Slots that all sequences share: read once for all of them, they change nothing."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import CausalMask, ChunkedCausalMask, LocalMask, MultiHeadMask, PrefixMask, UnifiedCache, decode_attention
from kernels.decode import shared_prefix
from kernels.decode.call import make_decode_call
from tests.kernels.test_decode_caches import check_summary, held, tokens

BLOCK, LENGTH = 4, 27
WINDOW = CausalMask() & LocalMask(9, 0)


def context(rng, *, num_sequences=5, num_kv_heads=2, head_dim=8, capacity=128) -> UnifiedCache:
    """A sequence of LENGTH tokens in an empty cache."""
    cache = UnifiedCache.empty(num_sequences, capacity, num_kv_heads, head_dim, dtype=jnp.float32, block_size=BLOCK)
    key, value = (jnp.asarray(rng.normal(size=(1, LENGTH, num_kv_heads, head_dim)), jnp.float32) for _ in range(2))
    return cache.write(key, value, sequences=np.array([2]))


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize(
    "mask",
    [
        CausalMask(),
        WINDOW,
        ChunkedCausalMask(10),
        WINDOW | CausalMask() & PrefixMask(3),
        MultiHeadMask([CausalMask(), WINDOW, CausalMask(), WINDOW]),
    ],
    ids=repr,
)
def test_shared_slots_give_what_slots_of_each_sequence_give(mask, num_parts, rng, monkeypatch):
    monkeypatch.setattr(shared_prefix, "_num_parts", lambda *_: num_parts)
    cache = context(rng)
    new = [jnp.asarray(rng.normal(size=(5, 3, heads, 8)), jnp.float32) for heads in (4, 2, 2)]
    counts, sinks = np.array([3, 2, 3, 1, 3]), jnp.asarray(rng.normal(size=4), jnp.float32)
    positions = jnp.broadcast_to(LENGTH + jnp.arange(3), (5, 3))
    found = {}
    for num_shared in (0, 24):
        shared = cache.share_with_all(2, num_shared).write(*new[1:], num_tokens=counts)
        assert shared.table.num_shared == num_shared
        found[num_shared] = decode_attention(
            new[0], shared, mask, query_positions=positions, sinks=sinks, logits_soft_cap=4.0, return_lse=True
        )
    for sequence, count in enumerate(counts):
        for one, other in zip(found[0], found[24], strict=True):
            np.testing.assert_allclose(one[sequence, :count], other[sequence, :count], rtol=2e-5, atol=2e-6)


def test_all_sequences_begin_with_the_shared_tokens_and_grow_apart(rng):
    cache = UnifiedCache.empty(3, 16 * BLOCK, 1, 1, dtype=jnp.float32, block_size=BLOCK)
    cache = cache.write(*tokens(rng, 3, 6))  # what the others held is dropped
    cache = jax.jit(lambda cache, new: cache.write(*new, sequences=jnp.array([1]), from_start=True))(
        cache, tokens(rng, 1, 10)
    )
    assert cache.lengths.tolist() == [6, 10, 6]
    shared = cache.share_with_all(1)
    assert held(shared, 0) == held(shared, 1) == held(shared, 2) == held(cache, 1)
    check_summary(shared)
    grown = shared.write(*tokens(rng, 3, 5), num_tokens=np.array([5, 4, 0]))
    assert grown.lengths.tolist() == [15, 14, 10]
    check_summary(grown)
    for sequence in range(3):
        mine = held(grown, sequence)
        assert {position: mine[position] for position in range(10)} == held(shared, sequence)
    assert held(grown, 0)[10] != held(grown, 1)[10]
    assert (grown.table.num_dropped == 0).all()


def test_a_sequence_that_begins_anew_ends_the_sharing(rng):
    cache = context(rng).share_with_all(2, 24)
    key, value = (jnp.zeros((1, 2, 2, 8), jnp.float32) for _ in range(2))
    assert cache.write(key, value, sequences=np.array([1])).table.num_shared == 24
    for ended in (
        cache.free(4),
        cache.share(2, 3, num_tokens=5),
        cache.write(key, value, sequences=np.array([1]), from_start=True),
    ):
        assert ended.table.num_shared == 0
    untouched = cache.write(key, value, sequences=np.array([1]), num_tokens=np.array([0]), from_start=True)
    assert untouched.lengths.tolist() == [LENGTH] * 5


@pytest.mark.parametrize(
    ("source", "num_shared", "message"),
    [
        (2, 10, "num_shared=10 must be whole blocks of 4 slots, fewer than the 128 that there are; use 8"),
        (2, -4, "num_shared=-4 must be whole blocks of 4 slots, fewer than the 128 that there are; use 0"),
        (2, 128, "num_shared=128 must be whole blocks of 4 slots, fewer than the 128 that there are; use 124"),
        (2, 28, "slot 27 doesn't hold the token of sequence 2 at position 27; expected it in each of the first"),
        (1, 4, "slot 0 doesn't hold the token of sequence 1 at position 0"),
        (5, 0, "sequences [5] aren't all from 0 to 4"),
    ],
)
def test_only_slots_in_order_can_be_shared_with_all(source, num_shared, message, rng):
    with pytest.raises(ValueError, match=re.escape(message)):
        context(rng).share_with_all(source, num_shared)


def test_few_queries_on_a_gpu_split_the_shared_slots():
    cache = context(np.random.default_rng(0))
    query = jnp.zeros((5, 1, 16, 8), jnp.float32)
    _, call = make_decode_call(
        query, cache, None, sequences=None, query_positions=None, scale=None, logits_soft_cap=None, sinks=None
    )
    on_gpu = call._replace(target=dataclasses.replace(call.target, platform="gpu", num_multiprocessors=132))
    num_parts = {
        (batch, num_shared): shared_prefix._num_parts(on_gpu._replace(batch=batch), num_shared, 128)
        for batch in (100, 3200)
        for num_shared in (4096, 131_072 - 2048, 131_072)
    }
    # 16 heads and one tile of queries are 16 programs of 132; a part is at least 2,048 slots, and all are alike.
    assert num_parts == {
        (100, 4096): 2,
        (100, 129_024): 8,
        (100, 131_072): 8,
        (3200, 4096): 1,
        (3200, 129_024): 1,
        (3200, 131_072): 1,
    }
    assert shared_prefix._num_parts(call, 131_072, 128) == 1
