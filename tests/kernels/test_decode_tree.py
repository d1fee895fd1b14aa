"""Trees of new tokens behind a cached sequence, against attention of each token to its own branch, in NumPy."""

import dataclasses
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
    TritonDecodeTuning,
    UnifiedCache,
    decode_attention,
    slab_capacity,
)
from kernels.decode.blocks import block_tile_kinds
from kernels.decode.call import make_decode_call
from kernels.masks import TileKind
from tests.kernels.decode_session import poisoned, strided

SEQUENCES, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 3, 4, 2, 8, 12
# The first tokens behind a prompt don't branch.
LONGEST_PROMPT, TREE_SIZE, STEP, FIRST = 30, 12, 4, 2
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

    def __init__(self, rng, capacity=CAPACITY):
        self.rng = rng
        self.prompts = rng.integers(1, LONGEST_PROMPT + 1, SEQUENCES)
        below = np.stack([random_parents(rng, TREE_SIZE - FIRST) for _ in range(SEQUENCES)])
        self.parents = np.concatenate([np.tile(np.arange(FIRST) - 1, (SEQUENCES, 1)), below + FIRST], axis=1)
        cache = SlabCache.empty(
            SEQUENCES, capacity, KV_HEADS, HEAD_DIM, value_dim=VALUE_DIM, dtype=jnp.float64, block_size=8
        )
        self.num_written = np.zeros(SEQUENCES, int)  # of each tree
        self.key, self.value = self.draw(CAPACITY, KV_HEADS, HEAD_DIM), self.draw(CAPACITY, KV_HEADS, VALUE_DIM)
        self.cache = poisoned(write(cache, self.key[:, :LONGEST_PROMPT], self.value[:, :LONGEST_PROMPT], self.prompts))

    @property
    def tree(self):
        """The parents and the start of the part in which tokens branch: a call may hold tokens before it, too."""
        return np.maximum(self.parents[:, FIRST:] - FIRST, -1), self.prompts + FIRST

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
            nodes = branch_of(node, self.parents[sequence])
            own_position = prompt + len(nodes) - 1
            if node < FIRST:  # Where tokens don't branch, the mask alone says who sees whom.
                nodes = range(min(FIRST, self.num_written[sequence]))
            branch = [*range(prompt), *(prompt + node for node in nodes)]
            for head in range(HEADS):
                allowed = OF_HEADS[head] if allows is None else allows
                seen = [at for position, at in enumerate(branch) if allowed(own_position, position)]
                kv_head = head // (HEADS // KV_HEADS)
                logits = self.key[sequence, seen, kv_head] @ query[sequence, token, head] / np.sqrt(HEAD_DIM)
                if soft_cap is not None:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                p = np.exp(np.append(logits, sinks[head]))
                output[sequence, token, head] = p[:-1] @ self.value[sequence, seen, kv_head] / p.sum()
        return output


@jax.jit
def keep(cache, path, start, counts, sequences=None):
    return cache.keep_path(path, start, num_tokens=counts, sequences=sequences)


write = jax.jit(lambda cache, key, value, counts: cache.write(key, value, num_tokens=counts))


@functools.partial(jax.jit, static_argnames=("mask", "implementation"))
def attend(query, cache, index, parents, start, sinks, *, mask, implementation, sequences=None):
    return decode_attention(
        query,
        cache,
        mask,
        sequences=sequences,
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
            tree = sequences.tree
            output = attend(query, sequences.cache, index, *tree, sinks, mask=mask, implementation=implementation)
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
    output = jax.jit(functools.partial(decode_attention, mask=mask))(query, sequences.cache, query_positions=index)
    np.testing.assert_allclose(np.asarray(output)[is_written], expected[is_written], rtol=1e-12, atol=1e-12)


def test_blocks_that_no_query_sees_are_not_read(rng):
    """All slots that none of a call's queries may see hold NaN."""
    sequences = Sequences(rng)
    for _ in range(TREE_SIZE // STEP):
        query, index = sequences.add(np.full(SEQUENCES, STEP))
    sees = np.zeros((SEQUENCES, STEP, CAPACITY + 6), bool)  # of whole blocks
    for sequence, token in np.ndindex(SEQUENCES, STEP):
        prompt = sequences.prompts[sequence]
        branch = branch_of(index[sequence, token] - prompt, sequences.parents[sequence])
        sees[sequence, token, [*range(prompt), *(prompt + node for node in branch)]] = True
    is_seen = sees[..., :CAPACITY].any(1)[..., None, None]
    cache = dataclasses.replace(
        sequences.cache,
        key=jnp.where(is_seen, sequences.cache.key, jnp.nan),
        value=jnp.where(is_seen, sequences.cache.value, jnp.nan),
    )
    outputs = [
        attend(query, cache, index, *sequences.tree, None, mask=None, implementation=name)
        for name in ("blockwise", "dense")
    ]
    np.testing.assert_allclose(*outputs, rtol=1e-12, atol=1e-12)
    assert np.isfinite(outputs[0]).all()

    @jax.jit
    def find_tile_kinds(query, cache, tree):
        nothing = dict.fromkeys(("sequences", "query_positions", "scale", "logits_soft_cap", "sinks"))
        inputs, call = make_decode_call(query, cache, None, tree=tree, **nothing)
        return block_tile_kinds(call.mask, inputs.query_positions, inputs.blocks())

    tile_kinds = find_tile_kinds(query, cache, TokenTree.of_parents(*sequences.tree))
    by_block = sees.reshape(SEQUENCES, STEP, -1, cache.block_size)
    np.testing.assert_array_equal(tile_kinds != TileKind.EMPTY, by_block.any((1, 3)))
    np.testing.assert_array_equal(tile_kinds == TileKind.FULL, by_block.all((1, 3)))


def test_a_batch_of_some_sequences(rng):
    sequences, chosen = Sequences(rng), rng.permutation(SEQUENCES)[:2]
    query, index = sequences.add(np.full(SEQUENCES, STEP))
    attend_causally = functools.partial(attend, mask=CausalMask(), implementation="dense")
    of_all = attend_causally(query, sequences.cache, index, *sequences.tree, None)
    some = [x[chosen] for x in (index, *sequences.tree)]
    of_some = attend_causally(query[chosen], sequences.cache, *some, None, sequences=chosen)
    np.testing.assert_allclose(of_some, of_all[chosen], rtol=1e-12, atol=1e-12)
    kept = keep(sequences.cache, np.zeros((2, 1), int), sequences.prompts[chosen], None, chosen)
    expected = sequences.prompts + STEP
    expected[chosen] = sequences.prompts[chosen] + 1
    np.testing.assert_array_equal(kept.lengths, expected)


def test_a_token_behind_the_last_of_the_tree_sees_nothing(rng):
    sequences = Sequences(rng)
    for _ in range(2):
        query, index = sequences.add(np.full(SEQUENCES, STEP))
    parents, start = sequences.tree
    output = attend(query, sequences.cache, index, parents[:, :STEP], start, None, mask=None, implementation="dense")
    is_behind = index >= start[:, None] + STEP
    np.testing.assert_array_equal((output == 0).all((2, 3)), is_behind)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenTree.of_parents([-1, 1], [3]), "parents[1]=1 must be from -1 to 0: a parent stands before its"),
        (lambda: TokenTree.of_parents([[-1, 0], [-1, -2]], [3, 3]), "parents[1, 1]=-2 must be from -1 to 0"),
        (
            lambda: TokenTree.of_parents([[-1]], [3, 4]),
            "parents must be integers [B, M] or [M], and start integers [B]",
        ),
        (lambda: TokenTree.of_parents([], [3]), "got [0] and [1]"),
        (lambda: TokenTree.of_parents([-0.5], [3]), "parents must be integers, got float64[1]"),
        (lambda: TokenTree.of_parents([-1], 3), "got [1] and []"),
        (lambda: attend_to_tree([-1, 0]), "tree must be a TokenTree, got list; use TokenTree.of_parents"),
        (lambda: attend_to_tree(of_three(1)), "tree is of 3 sequences and 1 tokens; expected a tree of 3 sequences"),
        (lambda: attend_to_tree(TokenTree.of_parents([-1, 0], [3])), "tree is of 1 sequences and 2 tokens"),
        (
            lambda: attend_to_tree(of_three(2), UnifiedCache.empty(3, 16, 2, 8, dtype=jnp.float32, block_size=16)),
            "a UnifiedCache takes no tree; use a SlabCache, or give each branch a sequence of its own",
        ),
        (lambda: empty_slab().keep_path([0, 1], [1, 1, 1]), "path must be integers [B, A], and start integers [B]"),
        (lambda: empty_slab().keep_path([[0]], [1]), "a batch of 1 for a cache of 3 sequences"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def empty_slab():
    return SlabCache.empty(3, 16, 2, 8, dtype=jnp.float32)


def of_three(size):
    return TokenTree.of_parents(np.arange(size) - 1, [1, 1, 1])


def attend_to_tree(tree, cache=None):
    return decode_attention(jnp.ones((3, 2, 2, 8), jnp.float32), cache or empty_slab(), tree=tree)


@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_triton_kernels(interpret, rng):
    """More new tokens than there are bits in a word; NaN and infinity stand where no token does."""
    package = pytest.importorskip("triton", reason="Triton's interpreter comes with Triton, for x86 Linux")
    if interpret and not package.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET=1 isn't set: the kernels are compiled, for a GPU")
    size, prompt = 33, rng.integers(1, 40, 1)
    parents = random_parents(rng, size)
    cache = SlabCache.empty(1, 80, 1, HEAD_DIM, dtype=jnp.float16, block_size=16)
    make = lambda: jnp.asarray(rng.standard_normal((1, 40, 1, HEAD_DIM)), jnp.float16)  # noqa: E731
    for count in (prompt, np.full(1, size)):
        cache = write(cache, make(), make(), count)
    cache, query = poisoned(cache), make()[:, :size]
    results = [
        attend(query, cache, None, parents, prompt, None, mask=LocalMask(30, 0), implementation=implementation)
        for implementation in (TritonDecodeTuning(num_programs=2, interpret=interpret), "dense")
    ]
    np.testing.assert_allclose(*results, atol=3e-3)
