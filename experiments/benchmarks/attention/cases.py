"""The named inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.attention.bounds import BoundsName, count_pairs_within, draw_bounds
from kernels import Bounds, CausalMask, FullMask, LocalMask, Mask, count_allowed_pairs

Direction = Literal["forward", "forward_backward"]
Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Case:
    """The inputs of one attention.

    Attributes:
      length: number of queries, and of keys unless `kv_length` is given.
      document_length: of packed documents: the median of their lengths, in tokens; None for one document.
      document_spread: standard deviation of the lengths' logarithm; 0 for documents of one length.
      kv_length: number of keys; None for as many as queries.
      value_dim: head dim of values and outputs; None for `head_dim`.
      has_sinks: each query head has an attention sink.
      bounds: what the bounds describe, a name of `draw_bounds`; None for none.
    """

    batch: int
    length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mask: Mask
    dtype: str = "bfloat16"
    document_length: int | None = None
    document_spread: float = 0.0
    kv_length: int | None = None
    value_dim: int | None = None
    has_sinks: bool = False
    bounds: BoundsName | None = None

    def __post_init__(self):
        if self.kv_length is not None and not (self.mask.allows_all and self.document_length is None):
            raise ValueError(
                f"kv_length={self.kv_length} needs FullMask() and one document, got {self.mask!r} and "
                f"document_length={self.document_length}: systems align other masks differently; leave kv_length out"
            )

    @property
    def output_dim(self) -> int:
        """Head dim of values and outputs."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arrays that attention takes and is differentiated in."""
        return ("query", "key", "value", *(["sinks"] if self.has_sinks else []))

    def num_keys(self, num_queries: int) -> int:
        """The number of keys for a number of queries, in the case's own proportion."""
        return num_queries if self.kv_length is None else self.kv_length * num_queries // self.length


CAUSAL, WINDOW_1024, WINDOW_4096 = CausalMask(), LocalMask(1023, 0), LocalMask(4095, 0)

HOPPER = {
    "1x2x32768x32": Case(1, 32_768, 2, 2, 32, CAUSAL),
    "1x2x32768x64": Case(1, 32_768, 2, 2, 64, CAUSAL),
    "1x2x32768x128": Case(1, 32_768, 2, 2, 128, CAUSAL),
    "4x24x4096x64": Case(4, 4096, 24, 24, 64, CAUSAL),
    "4x24x4096x128": Case(4, 4096, 24, 24, 128, CAUSAL),
    "1x16x32768x128": Case(1, 32_768, 16, 16, 128, CAUSAL),
    "1x16x32768x128_full": Case(1, 32_768, 16, 16, 128, FullMask()),
    "1x32/8x32768x128": Case(1, 32_768, 32, 8, 128, CAUSAL),
    "1x12x32768x64": Case(1, 32_768, 12, 12, 64, CAUSAL),
    "1x16/2x32768x256": Case(1, 32_768, 16, 2, 256, CAUSAL),
    "1x16x32768x128_window_4096": Case(1, 32_768, 16, 16, 128, WINDOW_4096),
    "1x16x32768x128_documents_4096": Case(1, 32_768, 16, 16, 128, CAUSAL, document_length=4096),
    "1x16x32768x128_documents": Case(1, 32_768, 16, 16, 128, CAUSAL, document_length=4096, document_spread=0.5),
}
"""The shapes that are compared with other systems: batch × heads/key-value heads × length × head dim."""

FA3 = {
    "1x16x32768x128": HOPPER["1x16x32768x128"],
    "1x16x32768x128_full": HOPPER["1x16x32768x128_full"],
    "1x32/8x32768x128": HOPPER["1x32/8x32768x128"],
    "1x64/8x32768x128": Case(1, 32_768, 64, 8, 128, CAUSAL),
    "1x12x32768x64": HOPPER["1x12x32768x64"],
    "4x24x4096x64": HOPPER["4x24x4096x64"],
    "1x16/2x32768x256": HOPPER["1x16/2x32768x256"],
    "4x48x4096x128": Case(4, 4096, 48, 48, 128, CAUSAL),
    "4x48x8192x128": Case(4, 8192, 48, 48, 128, CAUSAL),
    "1x2x32768x128": HOPPER["1x2x32768x128"],
    "16x16x1024x128": Case(16, 1024, 16, 16, 128, CAUSAL),
    "32x12x512x64": Case(32, 512, 12, 12, 64, CAUSAL),
    "1x16x32768x128_window_4096": HOPPER["1x16x32768x128_window_4096"],
    "1x64/8x16384x64_sinks": Case(1, 16_384, 64, 8, 64, CAUSAL, has_sinks=True),
    "1x64/8x16384x64_window_128_sinks": Case(1, 16_384, 64, 8, 64, LocalMask(127, 0), has_sinks=True),
    "1x16x32768x128_documents": HOPPER["1x16x32768x128_documents"],
    "1x16x32768x128_short_documents": Case(1, 32_768, 16, 16, 128, CAUSAL, document_length=1000, document_spread=1.0),
    "1x32/8x32768x128_documents": Case(1, 32_768, 32, 8, 128, CAUSAL, document_length=4096, document_spread=0.5),
    "1x32/8x32768x128_short_documents": Case(1, 32_768, 32, 8, 128, CAUSAL, document_length=1000, document_spread=1.0),
    "1x8x4096/20000x128_full": Case(1, 4096, 8, 8, 128, FullMask(), kv_length=20_000),
    "1x8x16384x192/128": Case(1, 16_384, 8, 8, 192, CAUSAL, value_dim=128),
}
"""The shapes that are compared with FlashAttention-3: pretraining's, gpt-oss's layers with sinks, packed documents,
keys that are more than the queries, and multi-head latent attention's two head dims."""

BOUNDS = {
    "1x16x32768x128": HOPPER["1x16x32768x128"],
    "1x16x32768x128_tree": Case(1, 32_768, 16, 16, 128, CAUSAL, bounds="tree"),
    "1x16x131072x128_forest": Case(1, 131_072, 16, 16, 128, CAUSAL, bounds="forest"),
    "1x16x32768x128_images": Case(1, 32_768, 16, 16, 128, FullMask(), bounds="images"),
    "1x16x32768x128_window_1024": Case(1, 32_768, 16, 16, 128, WINDOW_1024),
    "1x16x32768x128_images_window_1024": Case(1, 32_768, 16, 16, 128, FullMask(), bounds="images_window_1024"),
    "1x16x32768x128_window_4096": HOPPER["1x16x32768x128_window_4096"],
    "1x16x32768x128_bounds_window_4096": Case(1, 32_768, 16, 16, 128, CAUSAL, bounds="window_4096"),
}
"""Masks as data, each behind the static mask that it is compared with: a prompt with completions, a forest of random
trees, images in a text, and a window."""

WINDOWS = {
    **{
        f"1x16x32768x128_window_{size}": Case(1, 32_768, 16, 16, 128, LocalMask(size - 1, 0))
        for size in (128, 256, 512, 1024)
    },
    "1x12x32768x64_window_1024": Case(1, 32_768, 12, 12, 64, WINDOW_1024),
    "1x64/8x16384x64_window_128_sinks": FA3["1x64/8x16384x64_window_128_sinks"],
}
"""Narrow windows: bound by memory as much as by the tensor cores."""

TRITON = {
    **{f"1x2x32768x{dim}": Case(1, 32_768, 2, 2, dim, CAUSAL) for dim in (32, 64, 128)},
    **{f"4x24x4096x{dim}": Case(4, 4096, 24, 24, dim, CAUSAL) for dim in (32, 64, 128)},
    **{f"16x24x328x{dim}": Case(16, 328, 24, 24, dim, CAUSAL) for dim in (32, 64, 128)},
    "1x16x32768x128": HOPPER["1x16x32768x128"],
    "1x16x32768x128_window_4096": HOPPER["1x16x32768x128_window_4096"],
}
"""The shapes at which the Triton kernels are compared with other Triton kernels."""

CASES = {
    "causal": Case(1, 32_768, 4, 4, 64, CAUSAL, "float32"),
    "window_1024": Case(1, 32_768, 4, 4, 64, WINDOW_1024, "float32"),
    "window_1024_131k": Case(1, 131_072, 4, 4, 64, WINDOW_1024, "float32"),
    "gpt2_causal": Case(1, 32_768, 12, 12, 64, CAUSAL),
    "gpt2_window_1024": Case(1, 32_768, 12, 12, 64, WINDOW_1024),
    "gpt2_documents": Case(1, 32_768, 12, 12, 64, CAUSAL, document_length=4096, document_spread=0.5),
    "4x16/2x4096x256": Case(4, 4096, 16, 2, 256, CAUSAL),
    "1x16x32768x192/128": Case(1, 32_768, 16, 16, 192, CAUSAL, value_dim=128),
    **HOPPER,
    **FA3,
    **WINDOWS,
    **TRITON,
    **BOUNDS,
}


@dataclass(frozen=True)
class Problem:
    """A case with fresh random inputs.

    Attributes:
      arrays: query, key, value, d_output and, of a case that has them, sinks.
      segment_ids: int32 `[batch, length]`, or None for one document.
      bounds: of the batch; None for none.
      num_pairs: pairs that mask, documents and bounds allow, over all heads and the batch.
    """

    case: Case
    length: int
    arrays: Arrays
    segment_ids: jax.Array | None
    bounds: Bounds | None
    num_pairs: int

    @property
    def tokens(self) -> tuple[jax.Array | None, Bounds | None]:
        """What a program takes beside `arrays`."""
        return self.segment_ids, self.bounds

    def flops(self, direction: str) -> float:
        """FLOPs of the allowed pairs in a direction, such as "forward_backward"; a backward counts as 2.5 forwards."""
        factor = {"forward": 1.0, "backward": 2.5, "forward_backward": 3.5}[direction]
        return factor * 2 * (self.case.head_dim + self.case.output_dim) * self.num_pairs


def make_problem(case: Case, length: int | None = None) -> Problem:
    """Draws the inputs of a case, at its own length or another."""
    length = case.length if length is None else length
    rng = np.random.default_rng()
    arrays, bounds = draw_arrays(case, length, rng), None
    if case.bounds is not None:
        bounds, segment_ids = draw_bounds(case.bounds, length, rng), None
        num_pairs = case.batch * count_pairs_within(bounds, case.mask, length)
    elif case.document_length is None:
        num_pairs, segment_ids = case.batch * count_allowed_pairs(case.mask, length, case.num_keys(length)), None
    else:
        documents = [_document_lengths(case, length, rng) for _ in range(case.batch)]
        segment_ids = jnp.asarray([np.repeat(np.arange(len(x)), x) for x in documents], jnp.int32)
        # The masks of these cases depend on distances alone, so that each document is a sequence of its own.
        assert case.mask.translation_invariant
        num_pairs = sum(count_allowed_pairs(case.mask, int(n), int(n)) for x in documents for n in x)
    return Problem(case, length, arrays, segment_ids, bounds, num_pairs * case.num_heads)


def draw_arrays(case: Case, length: int, rng: np.random.Generator) -> Arrays:
    """Random query, key, value, d_output and, of a case that has them, sinks in float32."""
    shapes = {
        "query": (case.batch, length, case.num_heads, case.head_dim),
        "key": (case.batch, case.num_keys(length), case.num_kv_heads, case.head_dim),
        "value": (case.batch, case.num_keys(length), case.num_kv_heads, case.output_dim),
        "d_output": (case.batch, length, case.num_heads, case.output_dim),
    }
    arrays = {name: _normal(rng, shape, case.dtype) for name, shape in shapes.items()}
    return arrays | ({"sinks": _normal(rng, (case.num_heads,), "float32")} if case.has_sinks else {})


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    key = jax.random.key(int(rng.integers(1 << 31)))
    return jax.random.normal(key, shape, jnp.dtype(dtype))


def _document_lengths(case: Case, length: int, rng: np.random.Generator) -> np.ndarray:
    """Lengths that fill a sequence; the last document is cut off."""
    assert case.document_length is not None
    drawn = np.exp(rng.normal(math.log(case.document_length), case.document_spread, length)).astype(np.int64)
    ends = np.minimum(np.cumsum(np.maximum(drawn, 1)), length)
    return np.diff(np.unique(np.concatenate([[0], ends])))


def describe(case: Case) -> dict[str, Any]:
    """A case as JSON."""
    return {**{name: getattr(case, name) for name in case.__dataclass_fields__}, "mask": repr(case.mask)}
