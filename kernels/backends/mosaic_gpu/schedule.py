"""Which blocks of rows a program makes, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

_T = TypeVar("_T")


class Block(NamedTuple):
    """A block of query rows or of keys, within a kernel.

    Attributes:
      batch, head: element of the batch, and head: of the queries, or of the keys.
      row: number of the block among its head's.
    """

    batch: jax.Array
    head: jax.Array
    row: jax.Array


@dataclass(frozen=True)
class Schedule:
    """Divides blocks among programs: those of some heads before all others, of these heads row by row.

    A head's blocks of neighbouring rows, made at about the same time, share what streams past them in the L2 cache. The
    more heads at once, the fewer blocks share; the fewer, the more uneven is what blocks have to do in the end.

    Attributes:
      batch, num_heads, num_rows: elements of the batch, heads, and blocks of each.
      heads_at_once: of the heads of all elements of the batch.
      last_rows_first: under a causal mask the last queries have most to do, and the first keys.
      num_multiprocessors: None for a program per block. Else at most so many programs, each of which takes one block
        after another.
    """

    batch: int
    num_heads: int
    num_rows: int
    heads_at_once: int
    last_rows_first: bool = True
    num_multiprocessors: int | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of all programs."""
        return self.batch * self.num_heads * self.num_rows

    @property
    def num_programs(self) -> int:
        """Programs to start."""
        return self.num_blocks if self.num_multiprocessors is None else min(self.num_blocks, self.num_multiprocessors)

    def block(self, index) -> Block:
        """The index-th block."""
        num_pairs = self.batch * self.num_heads
        at_once = min(self.heads_at_once, num_pairs)
        group, place = (0, index) if at_once == num_pairs else _div_rem(index, at_once * self.num_rows)
        # The last group may have fewer heads.
        size = at_once if num_pairs % at_once == 0 else jnp.minimum(at_once, num_pairs - group * at_once)
        rank, member = _div_rem(place, size)
        batch, head = _div_rem(group * at_once + member, self.num_heads)
        return Block(batch, head, self.num_rows - 1 - rank if self.last_rows_first else rank)

    def for_each_block(
        self,
        program,
        body: Callable[[Block, _T], _T],
        start: _T,
        next_index: Callable[[jax.Array], jax.Array] | None = None,
    ) -> _T:
        """Calls `body(block, carried)` for one block of a program after another, and returns what the last one did.

        Args:
          program: which one; its first block is the one of the same index.
          next_index: (how many blocks it has made before the last one) → the index of its next one, which is beyond
            the blocks' if there is none; None for programs that take them turn by turn.
        """
        if self.num_programs == self.num_blocks:
            return body(self.block(program), start)

        def visit(state):
            index, turn, carried = state
            carried = body(self.block(index), carried)
            index = index + self.num_programs if next_index is None else next_index(turn)
            return index, turn + 1, carried

        return jax.lax.while_loop(lambda state: state[0] < self.num_blocks, visit, (program, jnp.int32(0), start))[2]


def _div_rem(a, b):
    return jax.lax.div(a, b), jax.lax.rem(a, b)
