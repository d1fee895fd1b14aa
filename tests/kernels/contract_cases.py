"""The attention contract as one table of cases, run by every backend."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from kernels import (
    Bounds,
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    Mask,
    MaskFn,
    MultiHeadMask,
    NumpyMask,
    PrefixMask,
)
from tests.seeds import seeded_rng


def _strided(q_pos, kv_pos):
    return (kv_pos <= q_pos) & ((q_pos - kv_pos) % 5 == 0)


@dataclass(frozen=True)
class Case:
    """One call of `dot_product_attention`, but for its random inputs."""

    name: str
    mask: Mask | None = None
    batch: int = 2
    q_len: int = 96
    kv_len: int = 96
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 16
    value_dim: int | None = None
    scale: float | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False
    uneven_logits: bool = False  # along the keys they rise by 24 for some queries, and fall for the others
    segments: str | None = None  # "packed" (sorted, one run per document) or "scattered"
    bounds: str | None = None  # see `draw_bounds`
    positions: str | None = None  # "offset" (one shard of a longer sequence) or "permuted"
    spoiled: bool = False  # NaN and infinities: see `_spoil`

    def inputs(self, rng: np.random.Generator, dtype=jnp.float32):
        """Fresh random arguments: query, key, value, sinks or None; keywords; cotangents of output and lse."""
        value_dim = self.value_dim or self.head_dim
        normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
        query = normal(self.batch, self.q_len, self.num_heads, self.head_dim)
        key = normal(self.batch, self.kv_len, self.num_kv_heads, self.head_dim)
        value = normal(self.batch, self.kv_len, self.num_kv_heads, value_dim)
        if self.uneven_logits:
            # Products with the vector of ones.
            query += 2 * rng.choice([-1, 1], (self.batch, self.q_len, self.num_heads, 1))
            key += np.linspace(-6, 6, self.kv_len)[:, None, None] / self.head_dim**0.5
            query, key = query.astype(dtype), key.astype(dtype)
        sinks = jnp.asarray(rng.standard_normal(self.num_heads), jnp.float32) if self.sinks else None
        keywords = {"scale": self.scale, "logits_soft_cap": self.logits_soft_cap}
        if self.segments is not None:
            draw = lambda length: rng.integers(0, 4, (self.batch, length))  # noqa: E731
            ids = [draw(self.q_len), draw(self.kv_len)]
            ids = [np.sort(x) if self.segments == "packed" else x for x in ids]
            if self.q_len == self.kv_len:
                ids[1] = ids[0]
            keywords["query_segment_ids"], keywords["key_value_segment_ids"] = map(jnp.asarray, ids)
        if self.positions == "offset":
            keywords["query_positions"] = jnp.arange(self.q_len) + (self.kv_len - self.q_len)
        elif self.positions == "permuted":
            keywords["query_positions"] = jnp.asarray(rng.permutation(self.q_len))
            keywords["key_value_positions"] = jnp.asarray(
                np.stack([rng.permutation(self.kv_len) for _ in range(self.batch)])
            )
        if self.bounds is not None:
            keywords["bounds"] = draw_bounds(rng, self.bounds, self.batch, self.q_len, self.kv_len)
        if self.spoiled:
            query, key, value, sinks = _spoil(rng, query, key, value, sinks)
        cotangents = (
            normal(self.batch, self.q_len, self.num_heads, value_dim),
            jnp.asarray(rng.standard_normal((self.batch, self.q_len, self.num_heads)), jnp.float32),
        )
        return (query, key, value, sinks), keywords, cotangents


def draw_bounds(rng: np.random.Generator, kind: str, batch: int, q_len: int, kv_len: int) -> Bounds:
    """Bounds of a kind: "tree", "prefix", "window", "blocks"; or of some names, crossing, empty and past the ends."""
    q_index, kv_index = np.arange(q_len), np.arange(kv_len)
    if kind == "tree":
        return Bounds(q_end=jnp.asarray(np.stack([_ends_of_a_tree(rng, kv_len) for _ in range(batch)])))
    if kind == "prefix":
        return Bounds(k_end=jnp.asarray(np.maximum(rng.integers(0, kv_len, (batch, 1)), q_index + 1)))
    if kind == "window":
        widths = rng.integers(1, kv_len, (batch, 1))
        return Bounds(k_start=jnp.asarray(q_index - widths), k_end=jnp.asarray(q_index + 1))
    if kind == "blocks":
        # Keys up to the query itself, and in some blocks of 10 up to the block's end.
        is_image = np.repeat(rng.random((batch, -(-q_len // 10))) < 0.5, 10, axis=1)[:, :q_len]
        return Bounds(k_end=jnp.asarray(np.where(is_image, (q_index // 10 + 1) * 10, q_index + 1)))
    drawn = {}
    for name in kind.split():
        own, other = (q_index, kv_len) if name.startswith("k") else (kv_index, q_len)
        along = other * own / len(own) + rng.integers(-other // 3, other // 3 + 1, (batch, 1))
        width = other / 2 * (1 if name.endswith("end") else -1)
        wild = (along + width + rng.normal(0, other / 8, (batch, len(own)))).astype(np.int64)
        far = rng.choice([-(2**31), 2**31 - 1, 0, other, -5, other + 5], wild.shape)
        drawn[name] = jnp.asarray(np.where(rng.random(wild.shape) < 0.1, far, wild).astype(np.int32))
    return Bounds(**drawn)


def _ends_of_a_tree(rng: np.random.Generator, length: int) -> np.ndarray:
    """The end of each token's subtree, in depth-first order: a node ends where its parent does, or before."""
    ends = np.zeros(length, np.int32)

    def grow(start: int, stop: int) -> None:
        while start < stop:
            end = int(rng.integers(start + 1, stop + 1))
            first_child = min(end, start + 1 + int(rng.integers(0, 12)))
            ends[start:first_child] = end
            grow(first_child, end)
            start = end

    grow(0, length)
    return ends


def _spoil(rng: np.random.Generator, query, key, value, sinks):
    """Puts NaN or infinities into a token of each element of the batch but the first, and NaN into the first sink."""
    # One that a later query sees, three tokens on too.
    token = int(rng.integers(1, min(query.shape[1], key.shape[1]) - 3))
    key = key.at[1, token, :, 0].set(jnp.nan)
    # Of rows that see nothing else, too. The logits are +inf or −inf, as the query's sign says.
    key = key.at[2, jnp.array([0, token]), :, 0].set(jnp.inf)
    query = query.at[3, token].set(jnp.nan)
    query = query.at[4, token, :, 0].set(jnp.inf)
    value = value.at[5, token].set(jnp.array([jnp.nan, jnp.inf], value.dtype)[token % 2])
    return query, key, value, None if sinks is None else sinks.at[0].set(jnp.nan)


CAUSAL, WINDOW = CausalMask(), CausalMask() & LocalMask(20, 0)

EVERYTHING = Case(
    "everything",
    CAUSAL & (LocalMask(30, 0) | PrefixMask(5)),
    num_heads=6,
    num_kv_heads=2,
    q_len=61,
    kv_len=85,
    value_dim=8,
    scale=0.3,
    logits_soft_cap=3.0,
    sinks=True,
    segments="packed",
    positions="permuted",
)

CASES = [
    Case("no_mask"),
    Case("causal", CAUSAL),
    Case("window", WINDOW),
    Case("window_both_sides", LocalMask(9, 13)),
    Case("chunked", ChunkedCausalMask(25)),
    Case("prefix", PrefixMask(40)),
    Case("prefix_language_model", CAUSAL | PrefixMask(30)),
    Case("complement", ~WINDOW),
    Case("causal_offset", CausalMask(-7)),
    Case("mask_fn", MaskFn(_strided)),
    Case("numpy_mask", NumpyMask(seeded_rng("numpy_mask").random((96, 96)) < 0.3)),
    Case("per_head", MultiHeadMask([CAUSAL, WINDOW, CAUSAL, FullMask()])),
    Case("per_head_within_groups", MultiHeadMask([CAUSAL, WINDOW, WINDOW, WINDOW]), num_kv_heads=2),
    Case("grouped_query", CAUSAL, num_heads=6, num_kv_heads=2),
    Case("multi_query", CAUSAL, num_kv_heads=1),
    Case("one_head", CAUSAL, num_heads=1, num_kv_heads=1, batch=1),
    Case("wide_head", CAUSAL, head_dim=128, num_heads=2, num_kv_heads=1),
    Case("odd_head", CAUSAL, head_dim=20),
    Case("value_dim", CAUSAL, value_dim=24),
    Case("scale", CAUSAL, scale=0.4),
    Case("tiny_scale", CAUSAL, scale=2**-17),
    Case("negative_scale", WINDOW, scale=-0.4),
    Case("uneven_logits", batch=1, num_heads=2, num_kv_heads=1, kv_len=320, uneven_logits=True),
    Case("soft_cap", CAUSAL, logits_soft_cap=2.0),
    Case("sinks", WINDOW, sinks=True, num_kv_heads=2),
    Case("ragged", CAUSAL, q_len=83, kv_len=83),
    Case("ragged_no_mask", q_len=45, kv_len=77),
    Case("cross", CausalMask(50), q_len=40, kv_len=90),
    Case("more_queries_than_keys", CAUSAL, q_len=90, kv_len=40),
    Case("one_query", CausalMask(95), q_len=1),
    Case("one_token", CAUSAL, q_len=1, kv_len=1),
    Case("empty_rows", CausalMask(-30), sinks=True),
    Case("all_rows_empty", PrefixMask(0)),
    Case("packed", CAUSAL, segments="packed"),
    Case("packed_no_mask", segments="packed", q_len=70, kv_len=90),
    Case("scattered_segments", WINDOW, segments="scattered", num_kv_heads=2),
    Case("context_shard", WINDOW, q_len=32, positions="offset"),
    Case("chunked_shard", ChunkedCausalMask(25), q_len=32, positions="offset"),
    Case("permuted_positions", WINDOW | PrefixMask(10), positions="permuted"),
    EVERYTHING,
    Case("all_bounds", bounds="k_start k_end q_start q_end"),
    Case("bounds_of_queries", CAUSAL, bounds="k_start k_end", num_kv_heads=2, sinks=True),
    Case("bounds_of_keys", LocalMask(40, 30), bounds="q_start q_end", q_len=83, kv_len=97),
    Case("one_bound", WINDOW, bounds="q_start", num_heads=6, num_kv_heads=2),
    Case("tree", CAUSAL, bounds="tree", num_kv_heads=2),
    Case("tree_in_documents", WINDOW, bounds="tree", segments="packed", logits_soft_cap=2.0),
    Case("window_as_bounds", bounds="window"),
    Case("image_blocks", bounds="blocks", num_kv_heads=1),
    Case("bounds_of_a_gap", CAUSAL & ~LocalMask(50, -20), bounds="k_start q_end"),
    Case("bounds_per_head", MultiHeadMask([CAUSAL, WINDOW, CAUSAL, FullMask()]), bounds="k_start k_end q_start q_end"),
    dataclasses.replace(
        EVERYTHING, name="everything_bounded", mask=CAUSAL & LocalMask(30, 0), bounds="k_start k_end q_start q_end"
    ),
]


def named(*names: str) -> list[Case]:
    """Cases of the table by their names."""
    return [case for case in CASES if case.name in names]


def longer(case: Case) -> Case:
    """A case three times as long, for tiles of 128: it has several to a row, and tiles to skip."""
    return dataclasses.replace(case, q_len=3 * case.q_len + 1, kv_len=3 * case.kv_len + 1)


LONG = [
    longer(case)
    for case in named(
        "causal", "window", "chunked", "complement", "mask_fn", "per_head", "prefix_language_model", "cross",
        "empty_rows", "packed", "scattered_segments", "context_shard", "permuted_positions", "everything", "value_dim",
        "all_bounds", "bounds_of_keys", "tree", "tree_in_documents", "image_blocks", "bounds_of_a_gap",
        "bounds_per_head", "everything_bounded",
    )
]  # fmt: skip
# Rows have holes, and tiles without a mask.
BOUNDED = [longer(case) for case in CASES if case.bounds is not None]
OTHERS_BOUNDED = [case for case in BOUNDED if case not in LONG]

# Where the definition gives NaN, so does every backend; `assert_close` isn't for these.
SPOILED = [
    Case("spoiled", CausalMask(-3), batch=6, q_len=40, kv_len=40, num_heads=2, num_kv_heads=1, segments="packed",
         spoiled=True),
    Case("spoiled_sink", CausalMask(-3), batch=6, q_len=40, kv_len=40, num_heads=2, num_kv_heads=1, sinks=True,
         spoiled=True),
    Case("spoiled_and_capped", CausalMask(-3), batch=6, q_len=40, kv_len=40, num_heads=2, num_kv_heads=2,
         logits_soft_cap=2.0, spoiled=True),
    Case("spoiled_causal", CAUSAL, batch=6, q_len=128, kv_len=128, num_heads=2, num_kv_heads=1, head_dim=64,
         spoiled=True),
]  # fmt: skip

# Values wider than a tile in every way that the kernels tell apart.
WIDE = [
    Case("wide_window", WINDOW, q_len=700, kv_len=700, head_dim=64, num_kv_heads=2),
    Case("wide_packed", CAUSAL, q_len=1000, kv_len=1000, head_dim=128, num_kv_heads=1, segments="packed"),
    Case("wide_values", CAUSAL, q_len=300, kv_len=500, head_dim=64, value_dim=128),
    Case("narrow_values", CAUSAL, q_len=500, kv_len=300, head_dim=96, value_dim=40, sinks=True),
    Case("wide_uneven_logits", CAUSAL, q_len=1500, kv_len=1500, head_dim=64, num_kv_heads=2, uneven_logits=True),
    # At a tile's edge: a block's first rows have no pair in its PARTIAL tiles, and their first one in a FULL tile.
    Case("full_tile_first", CausalMask(-129), batch=1, q_len=600, kv_len=600, num_heads=2, num_kv_heads=1),
    # A head dim of 192 beside one of 128, as in multi-head latent attention.
    Case("latent", CAUSAL, q_len=333, kv_len=333, head_dim=192, value_dim=128),
    Case("latent_packed", WINDOW, q_len=520, kv_len=520, head_dim=192, value_dim=128, segments="packed"),
    Case(
        "latent_shard", CAUSAL, q_len=200, kv_len=330, head_dim=160, value_dim=72, segments="packed", positions="offset"
    ),
    Case(
        "latent_values", CAUSAL, q_len=264, kv_len=264, head_dim=80, value_dim=192, num_kv_heads=2, logits_soft_cap=5.0
    ),
    Case("widest", CAUSAL, q_len=520, kv_len=520, head_dim=256, num_heads=4, num_kv_heads=2),
    Case("widest_packed", CAUSAL, q_len=330, kv_len=330, head_dim=256, num_kv_heads=2, segments="packed"),
    Case("widest_shard", CAUSAL, q_len=200, kv_len=330, head_dim=192, segments="packed", positions="offset"),
    Case("widest_ragged", WINDOW, q_len=333, kv_len=444, head_dim=200, value_dim=160, logits_soft_cap=5.0, sinks=True),
]


def has_fused_backward(head_dim: int, value_dim: int) -> bool:
    """Whether a warpgroup's registers hold dK and dV of 64 keys, so that `mosaic_gpu` can add dQ in the same kernel."""
    narrower, wider = sorted((head_dim, value_dim))
    return wider <= 128 or (wider <= 192 and narrower <= 128)
