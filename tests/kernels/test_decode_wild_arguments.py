"""Caches given any numbers at all: each call refuses them, or does what a model of plain lists does.

The model keeps each sequence as a list of its tokens and attends to it in float64. Freed slots keep what a sequence
left there, so a key that gets within another's reach shows in what comes out.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import CacheFull, CausalMask, SlabCache, UnifiedCache, decode_attention

ROWS, NEW, QUERIES, HEADS, HEAD_DIM, VALUE_DIM = 2, 3, 2, 2, 2, 3
RING, BLOCK = 10, 4
MOST = 2**31 - 1
CACHES = {
    "slab": lambda: SlabCache.empty(3, RING, 1, HEAD_DIM, value_dim=VALUE_DIM, dtype="float32", block_size=BLOCK),
    # A whole word of sequences: the number past the last is in a word that isn't there.
    "unified": lambda: UnifiedCache.empty(
        32, 12 * BLOCK, 1, HEAD_DIM, value_dim=VALUE_DIM, dtype="float32", block_size=BLOCK
    ),
}

write = jax.jit(lambda cache, new, rows, counts: cache.write(*new, sequences=rows, num_tokens=counts))
free = jax.jit(lambda cache, rows: cache.free(rows))
share = jax.jit(lambda cache, source, target, count: cache.share(source, target, count))


@jax.jit
def decode(query, cache, rows, positions):
    attend = functools.partial(
        decode_attention, query, cache, CausalMask(), sequences=rows, query_positions=positions, return_lse=True
    )
    return attend(implementation="blockwise"), attend(implementation="dense")


class Model:
    """Each sequence as the list of its tokens, of which a ring shows the last."""

    def __init__(self, num_sequences: int, ring: int | None):
        self.tokens: list[list] = [[] for _ in range(num_sequences)]
        self.ring = ring

    def has(self, sequence: int) -> bool:
        return 0 <= sequence < len(self.tokens)

    def growth(self, rows, counts) -> dict[int, tuple[int, int]]:
        """Sequence → its row and the tokens that it gains from traced arguments."""
        first = {sequence: row for row, sequence in reversed(list(enumerate(rows))) if self.has(sequence)}
        return {sequence: (row, min(max(counts[row], 0), NEW)) for sequence, row in first.items()}

    def share(self, source: int, target: int, count: int):
        if self.has(source) and self.has(target) and source != target:
            self.tokens[target] = self.tokens[source][: max(count, 0)]

    def attend(self, query, sequence: int, position: int):
        """Output and lse of one query of all heads."""
        past = self.tokens[sequence] if self.has(sequence) else []
        first = 0 if self.ring is None else max(len(past) - self.ring, 0)
        seen = [token for place, token in enumerate(past) if first <= place <= position]
        if not seen:
            return np.zeros((HEADS, VALUE_DIM)), np.full(HEADS, -np.inf)
        keys, values = (np.stack(x).astype(np.float64) for x in zip(*seen, strict=True))
        p = np.exp(query.astype(np.float64) @ keys.T / np.sqrt(HEAD_DIM))
        return p / p.sum(-1, keepdims=True) @ values, np.log(p.sum(-1))


class Life:
    """A cache and its model, and numbers that callers might give."""

    def __init__(self, rng, form: str):
        self.rng, self.cache = rng, CACHES[form]()
        self.last = self.cache.num_sequences - 1
        self.model = Model(self.last + 1, RING if form == "slab" else None)

    def sequence(self) -> int:
        wild = (-MOST - 1, -1, self.last + 1, self.last + 2, 33, 64, MOST)
        return int(self.rng.choice([0, 1, self.last] * 4 + list(wild)))

    def count(self) -> int:
        return int(self.rng.choice([0, 1, 2, 3] * 3 + [-MOST - 1, -1, NEW + 1, 100, MOST]))

    def vector(self, numbers: list[int]):
        """The numbers in a form that the host can read."""
        forms = [list, tuple, np.array, lambda x: np.array(x, np.int32), jnp.array]
        return forms[self.rng.integers(len(forms))](numbers)

    def scalar(self, number: int):
        forms = [int, np.int64, np.array, jnp.array]
        return forms[self.rng.integers(len(forms))](number)

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape, np.float32)

    def write(self, *, known: bool):
        rows, counts = [self.sequence() for _ in range(ROWS)], [self.count() for _ in range(ROWS)]
        new = self.normal(ROWS, NEW, 1, HEAD_DIM), self.normal(ROWS, NEW, 1, VALUE_DIM)
        if known:
            fits = all(map(self.model.has, rows)) and len(set(rows)) == ROWS
            if not (fits and all(0 <= count <= NEW for count in counts)):
                with pytest.raises(ValueError, match=r"sequences|num_tokens"):
                    self.cache.write(*new, sequences=self.vector(rows), num_tokens=self.vector(counts))
                return
        growth = self.model.growth(rows, counts)
        if isinstance(self.cache, UnifiedCache):
            try:
                self.cache.check_room([count for _, count in growth.values()], sequences=list(growth))
            except CacheFull:
                self.free()
                return
        self.cache = write(self.cache, new, jnp.array(rows), jnp.array(counts))
        for sequence, (row, count) in growth.items():
            self.model.tokens[sequence] += [(new[0][row, i, 0], new[1][row, i, 0]) for i in range(count)]

    def free(self, *, known: bool = False):
        rows = [self.sequence() for _ in range(ROWS)]
        if known and not all(map(self.model.has, rows)):
            with pytest.raises(ValueError, match="sequences"):
                self.cache.free(self.vector(rows))
            return
        self.cache = free(self.cache, jnp.array(rows))
        for sequence in filter(self.model.has, rows):
            self.model.tokens[sequence] = []

    def share(self, *, known: bool):
        source, target, count = self.sequence(), self.sequence(), self.count()
        if known:
            fits = self.model.has(source) and self.model.has(target) and source != target
            if not (fits and 0 <= count <= len(self.model.tokens[source])):
                with pytest.raises(ValueError, match=r"sequence|num_tokens"):
                    self.cache.share(*map(self.scalar, (source, target, count)))
                return
        self.cache = share(self.cache, source, target, count)
        self.model.share(source, target, count)

    def decode(self):
        rows = [self.sequence() for _ in range(ROWS)]
        positions = self.rng.choice([-MOST - 1, -1, 0, MOST, *range(20)], (ROWS, QUERIES))
        query = self.normal(ROWS, QUERIES, HEADS, HEAD_DIM)
        results = decode(query, self.cache, jnp.array(rows), jnp.asarray(positions, jnp.int32))
        for output, lse in results:
            for row, sequence in enumerate(rows):
                for i in range(QUERIES):
                    expected = self.model.attend(query[row, i], sequence, positions[row, i])
                    np.testing.assert_allclose(output[row, i], expected[0], atol=1e-5, rtol=1e-4)
                    np.testing.assert_allclose(lse[row, i], expected[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", CACHES)
def test_any_numbers_are_refused_or_reach_no_other_sequence(form, rng):
    life = Life(rng, form)
    calls = [life.write] * 4 + [life.free] + ([life.share] if form == "unified" else [])
    for _ in range(150):
        calls[rng.integers(len(calls))](known=rng.random() < 0.5)
        assert life.cache.lengths.tolist() == [len(tokens) for tokens in life.model.tokens]
        if rng.random() < 0.5:
            life.decode()


@pytest.mark.parametrize("form", CACHES)
def test_a_sequence_ends_at_the_last_position(form, rng):
    """Its length doesn't wrap, and what it holds stays."""
    cache = CACHES[form]()
    new = rng.standard_normal((ROWS, NEW, 1, HEAD_DIM)), rng.standard_normal((ROWS, NEW, 1, VALUE_DIM))
    new = tuple(jnp.asarray(x, jnp.float32) for x in new)
    at_the_end = jnp.full_like(cache.lengths, MOST - 2).at[1].set(MOST)
    if form == "slab":
        cache = dataclasses.replace(cache, lengths=at_the_end)
    else:
        cache = dataclasses.replace(cache, table=dataclasses.replace(cache.table, lengths=at_the_end))
    with pytest.raises(
        CacheFull, match="sequence 0 holds 2147483645 tokens and is to gain 3; a sequence holds at most"
    ):
        cache.check_room(3, sequences=[0])
    cache = write(cache, new, jnp.arange(2), jnp.array([3, 3]))
    assert cache.lengths[:2].tolist() == [MOST, MOST]
    position, seen = cache.slots(jnp.array([0]))
    assert sorted(np.asarray(position)[seen].tolist())[-2:] == [MOST - 2, MOST - 1]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_traced_numbers_of_any_width(dtype, rng):
    """They aren't wrapped where they become 32 bits, nor where they're compared with more than they can hold."""
    cache = SlabCache.empty(300, 2, 1, 1, dtype="float32")
    new = jnp.ones((2, 200, 1, 1))
    largest = np.iinfo(dtype).max
    rows, counts = np.array([3, largest], dtype), np.array([largest, 1], dtype)
    lengths = jax.jit(lambda *x: cache.write(new, new, sequences=x[0], num_tokens=x[1]).lengths)(rows, counts)
    expected = np.zeros(300, int)
    expected[3] = min(largest, 200)
    if largest < 300:
        expected[largest] = 1
    np.testing.assert_array_equal(lengths, expected)
