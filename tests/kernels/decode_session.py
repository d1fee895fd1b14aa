"""A session of decoding, as every form of cache and attention runs it: what sequences got, against the reference."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels import (
    CausalMask,
    ChunkedCausalMask,
    LocalMask,
    MaskFn,
    MultiHeadMask,
    NumpyMask,
    PrefixMask,
    SlabCache,
    UnifiedCache,
    decode_attention,
    dot_product_attention,
)

NUM_SEQUENCES, LONGEST = 3, 60
HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 4, 2, 8, 12


def strided(q_pos, kv_pos):
    return (kv_pos <= q_pos) & ((q_pos - kv_pos) % 5 == 0)


CAUSAL, WINDOW = CausalMask(), CausalMask() & LocalMask(13, 0)
# None looks ahead: what a query may see later isn't in the cache yet.
MASKS = {
    "causal": CAUSAL,
    "causal_offset": CausalMask(-3),
    "window": WINDOW,
    "chunked": ChunkedCausalMask(20),
    "prefix": CAUSAL & PrefixMask(19),
    "sink_tokens": CAUSAL & (LocalMask(11, 0) | PrefixMask(4)),
    "complement": CAUSAL & ~LocalMask(20, -5),
    "function": MaskFn(strided),
    "per_head": MultiHeadMask([CAUSAL, WINDOW, ChunkedCausalMask(20), WINDOW]),
}


def random_mask(rng):
    """Half of the pairs that a causal mask allows."""
    return NumpyMask(np.tril(rng.random((LONGEST, LONGEST)) < 0.5))


# Compiled once for all masks. A row may hold fewer tokens than there's room for.
write = jax.jit(lambda cache, key, value, counts: cache.write(key, value, num_tokens=counts))
free = jax.jit(lambda cache, sequence: cache.free(sequence))
decode = jax.jit(decode_attention, static_argnames=("mask", "return_lse", "implementation"))
PROMPT_ROOM, STEP_ROOM = 24, 4


class Session:
    """Sequences that start, grow and end, with all that was ever computed for each, to be compared at the end.

    Each step attends with every one of some implementations.
    """

    def __init__(self, rng, cache, mask, *, implementations=("blockwise", "dense"), **options):
        self.rng, self.cache, self.mask, self.options = rng, cache, mask, options
        self.dtype, self.implementations = cache.key.dtype, implementations
        self.alive: dict[int, dict[str, list]] = {}
        self.ended: list[dict[str, list]] = []
        self.attend = jax.jit(self._attend)

    def append(self, counts: dict[int, int], room: int):
        """Writes fresh tokens of some sequences and keeps them. Returns all rows' queries and places."""
        shapes = {"query": (HEADS, HEAD_DIM), "key": (KV_HEADS, HEAD_DIM), "value": (KV_HEADS, VALUE_DIM)}
        new = {
            name: jnp.asarray(self.rng.standard_normal((NUM_SEQUENCES, room, *shape)), self.dtype)
            for name, shape in shapes.items()
        }
        before = self.cache.lengths
        by_row = jnp.asarray([counts.get(row, 0) for row in range(NUM_SEQUENCES)])
        self.cache = write(self.cache, new["key"], new["value"], by_row)
        for sequence, count in counts.items():
            for name, x in new.items():
                self.alive[sequence][name] += list(np.asarray(x, np.float32)[sequence, :count])
        return new["query"], before[:, None] + jnp.arange(room)

    def _attend(self, query, cache, query_positions):
        """Output and lse of each row's tokens, `[B, T, implementation, …]`."""
        results = [
            decode_attention(
                query,
                cache,
                self.mask,
                query_positions=query_positions,
                implementation=implementation,
                return_lse=True,
                **self.options,
            )
            for implementation in self.implementations
        ]
        return [jnp.stack(of_all, axis=2) for of_all in zip(*results, strict=True)]

    def start(self, prompts: dict[int, int]):
        """Sequences start with a prompt, whose own attention isn't the cache's business."""
        for sequence, count in prompts.items():
            self.alive[sequence] = {
                "query": [],
                "key": [],
                "value": [],
                "output": [None] * count,
                "lse": [None] * count,
            }
        self.append(prompts, PROMPT_ROOM)

    def step(self, counts: dict[int, int]):
        """Some sequences gain tokens, and these attend."""
        query, positions = self.append(counts, STEP_ROOM)
        output, lse = self.attend(query, self.cache, positions)
        for sequence, count in counts.items():
            self.alive[sequence]["output"] += list(np.asarray(output, np.float32)[sequence, :count])
            self.alive[sequence]["lse"] += list(np.asarray(lse)[sequence, :count])

    def end(self, sequence: int):
        self.ended.append(self.alive.pop(sequence))
        self.cache = free(self.cache, sequence)

    def compare(self, tolerance: float) -> int:
        """Compares every sequence that ever was with attention over the whole of it; returns the tokens compared."""
        pasts = [*self.ended, *self.alive.values()]
        whole = [
            jnp.stack(
                [np.pad(np.stack(past[name]), [(0, LONGEST - len(past[name])), (0, 0), (0, 0)]) for past in pasts]
            )
            for name in ("query", "key", "value")
        ]
        expected = dot_product_attention(*whole, self.mask, implementation="reference", return_lse=True, **self.options)
        num_compared = 0
        for row, past in enumerate(pasts):
            for name, of_all in zip(("output", "lse"), expected, strict=True):
                places = [place for place, x in enumerate(past[name]) if x is not None]
                got = np.stack([past[name][place] for place in places])
                wanted = np.broadcast_to(np.asarray(of_all)[row, places, None], got.shape)
                np.testing.assert_allclose(got, wanted, atol=tolerance, rtol=tolerance)
            num_compared += len(places)
        return num_compared


def run_session(session: Session):
    """Prompts of several lengths; one sequence ends, and another takes its place; several tokens in one step."""
    session.cache = poisoned(session.cache)
    session.start({0: 17, 2: 3})
    for _ in range(6):
        session.step({0: 1, 2: 1})
    session.start({1: PROMPT_ROOM})
    session.step({0: 1, 1: 1, 2: 1})
    session.end(0)
    session.cache = poisoned(session.cache)
    session.step({1: 1, 2: 1})
    session.start({0: 11})
    for _ in range(6):
        session.step({0: 1, 1: 1, 2: 1})
    session.step({0: 3, 1: STEP_ROOM, 2: 2})


NUM_COMPARED = 6 * 2 + 3 + 2 + 6 * 3 + 9


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("capacity", "block_size"))
def empty_cache(form: str, dtype=jnp.float32, *, capacity: int = LONGEST, block_size: int = 8):
    """A cache of either form, without tokens."""
    sizes = {"value_dim": VALUE_DIM, "dtype": dtype, "block_size": block_size}
    if form == "slab":
        return SlabCache.empty(NUM_SEQUENCES, capacity, KV_HEADS, HEAD_DIM, **sizes)
    return UnifiedCache.empty(NUM_SEQUENCES, 192, KV_HEADS, HEAD_DIM, **sizes)


@jax.jit
def poisoned(cache):
    """The cache with NaN and infinity in every slot that holds no sequence's token."""
    if isinstance(cache, SlabCache):
        rows = jnp.arange(cache.num_sequences)
        held = cache.slots(rows, jnp.broadcast_to(jnp.arange(cache.capacity), (len(rows), cache.capacity)))[1]
    else:
        held = cache.table.positions >= 0
    held = held[..., None, None]
    return dataclasses.replace(
        cache, key=jnp.where(held, cache.key, jnp.nan), value=jnp.where(held, cache.value, jnp.inf)
    )


def with_nan_key(cache, sequence: int):
    """The cache with NaN in the first head's key of a sequence's newest token."""
    position, seen = cache.slots(jnp.asarray([sequence]))
    newest = (seen & (position == cache.lengths[sequence] - 1))[0].argmax()
    place = (sequence, newest, 0) if isinstance(cache, SlabCache) else (newest, 0)
    return dataclasses.replace(cache, key=cache.key.at[place].set(jnp.nan))
