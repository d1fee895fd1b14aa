"""Bounds that are timed, drawn anew for each problem."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np

from kernels import Bounds, Mask

BoundsName = Literal["tree", "forest", "images", "images_window_1024", "window_4096"]

_NUM_TREES = 200
_IMAGE = 256


def draw_bounds(name: BoundsName, length: int, rng: np.random.Generator) -> Bounds:
    """Bounds `[length]` of a kind.

    Args:
      name: `tree`: a prompt of half the length, and eight completions of it. `forest`: 200 trees of random sizes, each
        with random branches. `images`: blocks of 256 tokens in a text, which see their own block whole. `window_…`: of
        as many tokens; images see their own block beside it. All but `images` go with a causal mask.
    """
    index = np.arange(length)
    if name == "tree":
        completion = length // 16
        ends = np.where(index < length // 2, length, (index // completion + 1) * completion)
        return Bounds(q_end=jnp.asarray(ends, jnp.int32))
    if name == "forest":
        cuts = np.sort(rng.choice(np.arange(1, length), _NUM_TREES - 1, replace=False))
        ends = np.zeros(length, np.int32)
        for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), length], strict=True):
            _grow(ends, start, stop, rng)
        return Bounds(q_end=jnp.asarray(ends))
    starts = index - int(name.rpartition("_")[2]) + 1 if "window" in name else None
    if not name.startswith("images"):
        return Bounds(k_start=jnp.asarray(starts, jnp.int32))
    # Images and texts of as many tokens, at random.
    block = index // _IMAGE
    is_image = (rng.random(block[-1] + 1) < 0.5)[block]
    ends = np.where(is_image, (block + 1) * _IMAGE, index + 1)
    bounds = Bounds(k_end=jnp.asarray(ends, jnp.int32))
    if starts is None:
        return bounds
    starts = np.where(is_image, np.minimum(starts, block * _IMAGE), starts)
    return bounds._replace(k_start=jnp.asarray(starts, jnp.int32))


def _grow(ends: np.ndarray, start: int, stop: int, rng: np.random.Generator) -> None:
    """Ends of subtrees: a stem of some tokens, and up to four branches behind it."""
    todo = [(start, stop)]
    while todo:
        start, stop = todo.pop()
        stem = start + int(rng.integers(1, stop - start + 1))
        ends[start:stem] = stop
        num_branches = min(int(rng.integers(1, 5)), stop - stem)
        if num_branches:
            cuts = np.sort(rng.choice(np.arange(stem + 1, stop), num_branches - 1, replace=False)).tolist()
            todo += zip([stem, *cuts], [*cuts, stop], strict=True)


def count_pairs_within(bounds: Bounds, mask: Mask, length: int) -> int:
    """Pairs that bounds of one side, and a mask of distances, allow of a sequence."""
    assert mask.window is not None
    left, right = (length if side is None else side for side in mask.window)
    index = np.arange(length)
    by_query = {"k_start", "k_end"} & set(bounds.given)
    assert not (by_query and {"q_start", "q_end"} & set(bounds.given)), "bounds of one side"
    start, end = (bounds.k_start, bounds.k_end) if by_query else (bounds.q_start, bounds.q_end)
    before, behind = (left, right) if by_query else (right, left)
    lowest = np.maximum(index - before, 0 if start is None else np.asarray(start))
    highest = np.minimum(index + behind + 1, length if end is None else np.asarray(end))
    return int(np.maximum(np.minimum(highest, length) - np.maximum(lowest, 0), 0).sum())
