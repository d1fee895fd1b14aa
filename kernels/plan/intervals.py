"""Intervals of tokens and of tiles: what the tokens of a tile may meet."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from kernels.masks.intervals import Integers, tile_kind


class Intervals(NamedTuple):
    """For each tile of one sequence, an interval of indices in the other one, of tokens or of tiles.

    An empty interval has `stop ≤ start`.

    Attributes:
      start, stop: no token of the tile may attend to a token outside `start:stop`.
      full_start, full_stop: all of the tile's tokens may attend to all tokens at `full_start:full_stop`.
    """

    start: Int[Array, "B R"]
    stop: Int[Array, "B R"]
    full_start: Int[Array, "B R"]
    full_stop: Int[Array, "B R"]

    def in_tiles(self, block: int) -> Intervals:
        """The tiles of `block` tokens that overlap `start:stop`, and those that lie within `full_start:full_stop`."""
        return Intervals(
            self.start // block, -(-self.stop // block), -(-self.full_start // block), self.full_stop // block
        )


class Extents(NamedTuple):
    """Lowest and highest number of each tile: inclusive, int32."""

    lowest: Int[Array, "B tiles"]
    highest: Int[Array, "B tiles"]


def extents(tokens: Int[Array, "B L"] | None, block: int) -> Extents:
    """Lowest and highest number of each tile of `block` tokens, which are given."""
    assert tokens is not None
    # Repeating the last token doesn't change a tile's extent.
    filled = jnp.pad(tokens, [(0, 0), (0, -tokens.shape[1] % block)], mode="edge")
    by_tile = filled.reshape(tokens.shape[0], -1, block)
    return Extents(by_tile.min(-1), by_tile.max(-1))


def kind_of(tile: Integers, start: Integers, full_start: Integers, full_stop: Integers, stop: Integers) -> Integers:
    """`TileKind` of a tile that may lie in an interval, elementwise, also within kernels."""
    return tile_kind((start <= tile) & (tile < stop), (full_start <= tile) & (tile < full_stop))
