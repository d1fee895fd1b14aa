"""The mask of the tiles that one warpgroup computes: its rows stay while the other side's tiles stream past."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax

from kernels.backends.mosaic_gpu.machine import Hopper
from kernels.backends.mosaic_gpu.pairs import Side, Tokens, allowed_pairs, keep_allowed, resident_tokens, tile_tokens
from kernels.call import AttentionCall


class TileMask(NamedTuple):
    """Mask, documents and padding of a warpgroup's tiles.

    Attributes:
      call: the call, with the lengths before padding.
      machine: what runs the kernel.
      streamed: the side whose tiles stream past: "key_value", or "query" for transposed tiles.
      row_first: index of the warpgroup's first row among the queries, or among the keys.
      block_kv: the length of keys that padding fills.
      tokens, memory: references to the tokens' arrays, and to their tiles in shared memory.
      resident: the rows' own tokens.
    """

    call: AttentionCall
    machine: Hopper
    streamed: Side
    row_first: Any
    block_kv: int
    tokens: Tokens
    memory: Any
    resident: dict[str, jax.Array]

    @staticmethod
    def load(context: Any, streamed: Side, batch, rows, block_kv: int) -> TileMask:
        """Loads the tokens of a warpgroup's rows, `pl.ds(first, length)` of an element of the batch, in any kernel."""
        tokens, memory = context.gmem.tokens, context.smem.tokens
        resident = resident_tokens(tokens, streamed, (batch, rows))
        return TileMask(context.call, context.machine, streamed, rows.start, block_kv, tokens, memory, resident)

    def apply(self, logits, is_partial, column_first, slot) -> jax.Array:
        """Sets the logits of pairs that may not attend to −inf.

        Args:
          logits: of a tile, in registers.
          is_partial: whether the tile is PARTIAL: a bool or a traced one.
          column_first: index of the tile's first column among the keys, or among the queries.
          slot: the slot of the columns' tokens in shared memory.
        """
        transposed = self.streamed == "query"
        q_first, kv_first = (column_first, self.row_first) if transposed else (self.row_first, column_first)
        allowed = functools.partial(
            allowed_pairs,
            self.call,
            tile_tokens(self.tokens, self.memory, self.streamed, resident=self.resident, slot=slot),
            q_first,
            kv_first,
            kv_padded=self.call.kv_len % self.block_kv != 0,
            transposed=transposed,
            interpreted=self.machine.interpret is not None,
        )
        return keep_allowed(logits, is_partial, allowed)
