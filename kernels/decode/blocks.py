"""Which blocks of a cache a decoding step reads: a plan with one row for each sequence; its tiles are blocks.

`kernels.plan` finds a tile's lowest and highest position from its tokens. A cache keeps those of each block from step
to step, and which sequences see some or all of its slots, so that planning reads no slot.

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
    """A summary of each block of a cache, for each sequence.

    Attributes:
      lowest, highest: bounds of the positions that slots of the block hold; anything where no slot is seen.
      some: True if the sequence may see a slot of the block.
      every: True if the sequence sees all slots of the block.
    """

    lowest: Int[Array, "B J"]
    highest: Int[Array, "B J"]
    some: Bool[Array, "B J"]
    every: Bool[Array, "B J"]


def block_tile_kinds(mask: Mask, query_positions: Int[Array, "B T"], summary: BlockSummary) -> Int[Array, "B J"]:
    """The `TileKind` of each block, for all of a sequence's queries and heads together."""
    q_lo, q_hi = query_positions.min(-1, keepdims=True), query_positions.max(-1, keepdims=True)
    tile_kinds = mask.classify(q_lo, q_hi, summary.lowest, summary.highest)
    if mask.num_heads is not None:
        tile_kinds = tile_kind((tile_kinds != TileKind.EMPTY).any(0), (tile_kinds == TileKind.FULL).all(0))
    return kleene_and(jnp.broadcast_to(tile_kinds, summary.some.shape), tile_kind(summary.some, summary.every))
