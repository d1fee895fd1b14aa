"""Trees of new tokens behind a cached sequence, against attention of each token to its own branch, in NumPy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import (
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    MaskFn,
    MultiHeadMask,
    PrefixMask,
    SlabCache,
    TokenTree,
    UnifiedCache,
    decode_attention,
    slab_capacity,
)
from kernels.masks import TileKind
from kernels.decode.blocks import block_tile_kinds
from kernels.decode.call import make_decode_call
from tests.kernels.decode_session import poisoned, strided

SEQUENCES, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 3, 4, 2, 8, 12
LONGEST_PROMPT, TREE_SIZE, STEP = 30, 12, 4
CAPACITY = LONGEST_PROMPT + TREE_SIZE


def window(q, k):
    return (k <= q) & (k >= q - 7)


def first_tokens_and_window(q, k):
    return (k <= q) & ((k >= q - 3) | (k < 4))


# Each mask, and what it says of two positions.
MASKS = {
    "none": (None, lambda q, k: True),
    "causal": (CausalMask(), lambda q, k: k <= q),
    "window": (LocalMask(7, 0), window),
    "chunked": (ChunkedCausalMask(9), lambda q, k: (k <= q) & (k // 9 == q // 9)),
    "first tokens": (CausalMask() & (LocalMask(3, 0) | PrefixMask(4)), first_tokens_and_window),
    "function": (MaskFn(strided), strided),
    "per head": (MultiHeadMask([CausalMask(), FullMask(), LocalMask(7, 0), CausalMask()]), None),
}
OF_HEADS = [lambda q, k: k <= q, lambda q, k: True, window, lambda q, k: k <= q]


def random_parents(rng, size=TREE_SIZE):
    """A chain, siblings, a forest or anything between them: each parent one of the last few tokens."""
    reach = int(rng.integers(1, size + 1))
    parents = np.array([rng.integers(max(-1, node - reach), node) for node in range(size)])
    return parents if rng.random() < 0.8 else np.full(size, -1)


def branch_of(node, parents):
    branch = []
    while node >= 0:
        branch.append(node)
        node = int(parents[node])
    return branch[::-1]


class Sequences:
    """What was ever written to some sequences: prompts, and trees behind them."""

    def __init__(self, rng, capacity=CAPACITY, block_size=8):
        self.rng = rng
        self.prompts = rng.integers(1, LONGEST_PROMPT + 1, SEQUENCES)
        self.parents = np.stack([random_parents(rng) for _ in range(SEQUENCES)])
        cache = SlabCache.empty(
            SEQUENCES, capacity, KV_HEADS, HEAD_DIM, value_dim=VALUE_DIM, dtype=jnp.float64, block_size=block_size
        )
        self.num_written = np.zeros(SEQUENCES, int)  # of each tree
        self.key, self.value = self.draw(CAPACITY, KV_HEADS, HEAD_DIM), self.draw(CAPACITY, KV_HEADS, VALUE_DIM)
        self.cache = poisoned(write(cache, self.key[:, :LONGEST_PROMPT], self.value[:, :LONGEST_PROMPT], self.prompts))

    def draw(self, *shape):
        return self.rng.standard_normal((SEQUENCES, *shape))

    def add(self, counts):
        """Writes some more tokens of each tree. Returns queries of `STEP` tokens, and the index of each."""
        first = self.prompts + self.num_written
        at = np.minimum(first[:, None] + np.arange(STEP), CAPACITY - 1)[..., None, None]
        self.cache = write(
            self.cache, np.take_along_axis(self.key, at, 1), np.take_along_axis(self.value, at, 1), counts
        )
        self.num_written += counts
        return self.draw(STEP, HEADS, HEAD_DIM), (first[:, None] + np.arange(STEP)).astype(np.int32)

    def expected(self, query, index, allows, sinks, soft_cap):
        """Output of each new token that counts, by its branch alone."""
        output = np.full((SEQUENCES, STEP, HEADS, VALUE_DIM), np.nan)
        for sequence, token in np.ndindex(SEQUENCES, STEP):
            prompt, node = self.prompts[sequence], index[sequence, token] - self.prompts[sequence]
            if node >= self.num_written[sequence]:
                continue
            branch = [*range(prompt), *(prompt + n for n in branch_of(node, self.parents[sequence]))]
            for head in range(HEADS):
                allowed = OF_HEADS[head] if allows is None else allows
                seen = [at for position, at in enumerate(branch) if allowed(len(branch) - 1, position)]
                kv_head = head // (HEADS // KV_HEADS)
                logits = self.key[sequence, seen, kv_head] @ query[sequence, token, head] / np.sqrt(HEAD_DIM)
                if soft_cap is not None:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                p = np.exp(np.append(logits, sinks[head]))
                output[sequence, token, head] = p[:-1] @ self.value[sequence, seen, kv_head] / p.sum()
        return output


keep = jax.jit(lambda cache, path, start, counts: cache.keep_path(path, start, num_tokens=counts))
write = jax.jit(lambda cache, key, value, counts: cache.write(key, value, num_tokens=counts))


@functools.partial(jax.jit, static_argnames=("mask", "implementation"))
def attend(query, cache, index, parents, start, sinks, *, mask, implementation):
    return decode_attention(
        query,
        cache,
        mask,
        query_positions=index,
        tree=TokenTree.of_parents(parents, start),
        sinks=sinks,
        logits_soft_cap=3.0,
        implementation=implementation,
    )


pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.sample(5)
@pytest.mark.parametrize("implementation", ["blockwise", "dense"])
@pytest.mark.parametrize("name", MASKS)
def test_each_token_sees_its_own_branch(name, implementation, rng):
    """Trees that grow over several calls, other ones in each sequence, by one program."""
    mask, allows = MASKS[name]
    capacity = CAPACITY if mask is None else slab_capacity(mask, CAPACITY, tokens_per_step=TREE_SIZE)
    before = attend._cache_size()
    for _ in range(3):
        sequences, sinks = Sequences(rng, capacity), rng.standard_normal(HEADS)
        for _ in range(TREE_SIZE // STEP):
            query, index = sequences.add(rng.integers(0, STEP + 1, SEQUENCES))
            output = attend(
                query,
                sequences.cache,
                index,
                sequences.parents,
                sequences.prompts,
                sinks,
                mask=mask,
                implementation=implementation,
            )
            expected = sequences.expected(query, index, allows, sinks, 3.0)
            counts = ~np.isnan(expected)
            np.testing.assert_allclose(np.asarray(output)[counts], expected[counts], rtol=1e-12, atol=1e-12)
    assert attend._cache_size() == before + 1


@pytest.mark.parametrize("name", ["causal", "window"])
def test_a_kept_path_goes_on_as_if_it_had_been_written_alone(name, rng):
    mask, allows = MASKS[name]
    capacity = slab_capacity(mask, CAPACITY, tokens_per_step=TREE_SIZE)
    sequences = Sequences(rng, capacity)
    written = np.array([TREE_SIZE, *rng.integers(1, TREE_SIZE, 2)])
    for first in range(0, TREE_SIZE, STEP):
        sequences.add((written - first).clip(0, STEP))
    paths = [
        branch_of(int(rng.integers(count)), parents) for count, parents in zip(written, sequences.parents, strict=True)
    ]
    paths[2] = []  # nothing of the third tree is kept
    padded = np.array([path + [TREE_SIZE - 1] * (TREE_SIZE - len(path)) for path in paths])
    kept = np.array([len(path) for path in paths])
    cache = keep(sequences.cache, padded, sequences.prompts, kept)
    # The same tokens, written as chains.
    at = (sequences.prompts[:, None] + padded)[..., None, None]
    for name in ("key", "value"):
        tokens = getattr(sequences, name)
        moved = np.take_along_axis(tokens, at, 1)
        for sequence, (prompt, count) in enumerate(zip(sequences.prompts, kept, strict=True)):
            tokens[sequence, prompt : prompt + count] = moved[sequence, :count]
    sequences.cache, sequences.prompts = cache, sequences.prompts + kept
    np.testing.assert_array_equal(cache.lengths, sequences.prompts)
    sequences.num_written[:] = 0
    counts = np.minimum(STEP, CAPACITY - sequences.prompts)
    query, index = sequences.add(counts)
    sequences.parents = np.tile(np.arange(-1, TREE_SIZE - 1), (SEQUENCES, 1))
    expected = sequences.expected(query, index, allows, np.full(HEADS, -np.inf), None)
    is_written = ~np.isnan(expected)
    output = decode_attention(query, sequences.cache, mask, query_positions=index)
    np.testing.assert_allclose(np.asarray(output)[is_written], expected[is_written], rtol=1e-12, atol=1e-12)
