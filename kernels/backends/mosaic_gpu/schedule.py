"""Which blocks of query rows a program of the forward kernel makes, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax

_T = TypeVar("_T")


class Block(NamedTuple):
    """A block of query rows, within a kernel.

    Attributes:
      batch, head: element of the batch, and query head.
      row: number of the block among its head's.
    """

    batch: jax.Array
    head: jax.Array
    row: jax.Array


@dataclass(frozen=True)
class Schedule:
    """Divides blocks among programs: those of all heads before any head's next, the last rows first.

    Under a causal mask the last rows have most to do. A head's blocks of neighbouring rows, made at about the same
    time, share its keys and values in the L2 cache.

    Attributes:
      batch, num_heads, num_rows: elements of the batch, query heads, and blocks of each.
      num_multiprocessors: None for a program per block. Else at most so many programs take the blocks turn by turn; the
        last program of one turn is the first of the next, which evens out what they have to do.
    """

    batch: int
    num_heads: int
    num_rows: int
    num_multiprocessors: int | None

    @property
    def num_blocks(self) -> int:
        """Blocks of all programs."""
        return self.batch * self.num_heads * self.num_rows

    @property
    def num_programs(self) -> int:
        """Programs to start."""
        return self.num_blocks if self.num_multiprocessors is None else min(self.num_blocks, self.num_multiprocessors)

    def for_each_block(self, program, body: Callable[[Block, _T], _T], start: _T) -> _T:
        """Calls `body(block, carried)` for one block of a program after another, and returns what the last one did."""

        def block(index):
            num_pairs = self.batch * self.num_heads
            rank, pair = jax.lax.div(index, num_pairs), jax.lax.rem(index, num_pairs)
            batch, head = jax.lax.div(pair, self.num_heads), jax.lax.rem(pair, self.num_heads)
            return Block(batch, head, self.num_rows - 1 - rank)

        if self.num_programs == self.num_blocks:
            return body(block(program), start)

        def index(turn):
            place = jax.lax.select(jax.lax.rem(turn, 2) == 0, program, self.num_programs - 1 - program)
            return turn * self.num_programs + place

        num_whole_turns = self.num_blocks // self.num_programs
        num_turns = num_whole_turns + (index(num_whole_turns) < self.num_blocks).astype("int32")
        return jax.lax.fori_loop(0, num_turns, lambda turn, carried: body(block(index(turn)), carried), start)
