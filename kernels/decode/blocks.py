"""Which blocks of a cache a decoding step reads: the mask, classified on the corners of a summary.

A cache's cells are cut into blocks. The summary says of each block which positions lie in it and whether a sequence
sees some or all of its cells, so that choosing blocks needs no pass over the cache.

Dimensions: B sequences of a call, T new tokens of each, J blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kernels.masks import Mask, TileKind
from kernels.masks.intervals import kleene_and, tile_kind

DEFAULT_BLOCK_SIZE = 128


class BlockSummary(NamedTuple):
    """What each sequence finds in each block of its cache.

    Attributes:
      lowest, highest: bounds of the positions that cells of the block hold; anything where no cell is seen.
      some: whether the sequence may see a cell.
      every: whether it sees all of the block's cells.
    """

    lowest: Int[Array, "B J"]
    highest: Int[Array, "B J"]
    some: Bool[Array, "B J"]
    every: Bool[Array, "B J"]


class Visits(NamedTuple):
    """The blocks that each sequence reads.

    Attributes:
      blocks: their numbers, FULL ones first, and anything after them.
      counts: how many are FULL, and how many there are.
    """

    blocks: Int[Array, "B J"]
    counts: Int[Array, "B 2"]


def block_kinds(mask: Mask, query_positions: Int[Array, "B T"], summary: BlockSummary) -> Int[Array, "B J"]:
    """What the mask makes of each block, for all of a sequence's queries and heads together, as `TileKind` values.

    EMPTY: no query of the sequence may attend to any cell. FULL: each query of each head may attend to every cell.
    """
    q_lo, q_hi = query_positions.min(-1, keepdims=True), query_positions.max(-1, keepdims=True)
    kinds = mask.classify(q_lo, q_hi, summary.lowest, summary.highest)
    if mask.num_heads is not None:
        kinds = tile_kind((kinds != TileKind.EMPTY).any(0), (kinds == TileKind.FULL).all(0))
    return kleene_and(jnp.broadcast_to(kinds, summary.some.shape), tile_kind(summary.some, summary.every))


def list_visits(kinds: Int[Array, "B J"]) -> Visits:
    """Lists the blocks that aren't EMPTY, FULL ones first, each in order."""
    blocks = jnp.argsort(-kinds, axis=-1, stable=True).astype(jnp.int32)
    counts = [(kinds >= kind).sum(-1, dtype=jnp.int32) for kind in (TileKind.FULL, TileKind.PARTIAL)]
    return Visits(blocks, jnp.stack(counts, axis=-1))
