"""A key/value cache whose cells many sequences share.

Dimensions: Z sequences that the cache can tell apart, C cells, J blocks of cells, B batch of a call (each element one
sequence), T new tokens of each, K key/value heads, H and V head dims of key and value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from kernels.decode.blocks import DEFAULT_BLOCK_SIZE, BlockSummary
from kernels.decode.cell_table import CellTable
from kernels.decode.tokens import checked_tokens, empty_cells, integers, sequences_of_batch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UnifiedCache:
    """Keys and values of many sequences in one slab of cells, each of which knows which sequences see it.

    Sequences of any lengths share the memory. A prompt that several start with is kept once (`share`). A decoding step
    reads only the blocks that hold what a sequence may see. Make one with `UnifiedCache.empty`. Every method returns a
    new cache; under `jax.jit` with the old one donated, it is updated in place.

    The layers of a model share the table: allocate once for all (`table.allocate`), then `store` in each layer.

    Attributes:
      key, value: the cells.
      table: whose they are.
    """

    key: Float[Array, "C K H"]
    value: Float[Array, "C K V"]
    table: CellTable

    @staticmethod
    def empty(
        num_sequences: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: DTypeLike = jnp.bfloat16,
        block_size: int = DEFAULT_BLOCK_SIZE,
    ) -> UnifiedCache:
        """A cache without tokens.

        Args:
          num_sequences: Z; the most that can be alive at once.
          capacity: C, for all sequences together, a multiple of `block_size`. Each sequence leaves up to
            `block_size` − 1 cells of its newest block unused.
          num_kv_heads, head_dim, value_dim: K, H and V; V is H by default.
          dtype: of keys and values.
          block_size: cells that are given out, read and skipped together.

        Raises:
          ValueError: a size below 1, or a capacity that isn't whole blocks.

        >>> cache = UnifiedCache.empty(8, capacity=4096, num_kv_heads=4, head_dim=64)
        >>> prompt = jnp.ones((1, 100, 4, 64), jnp.bfloat16)
        >>> cache = cache.write(prompt, prompt, sequences=jnp.array([5])).share(5, 6, num_tokens=80)
        >>> cache.table.lengths.tolist()
        [0, 0, 0, 0, 0, 100, 80, 0]
        """
        table = CellTable.empty(num_sequences, capacity, block_size=block_size)
        return UnifiedCache(*empty_cells((capacity,), num_kv_heads, head_dim, value_dim, dtype), table)

    @property
    def num_sequences(self) -> int:
        """Sequences that the cache can tell apart."""
        return self.table.num_sequences

    @property
    def capacity(self) -> int:
        """Cells of all sequences together."""
        return self.table.capacity

    @property
    def lengths(self) -> Int[Array, " Z"]:
        """Tokens of each sequence so far: the position of its next one."""
        return self.table.lengths

    @property
    def block_size(self) -> int:
        """Cells that are given out, read and skipped together."""
        return self.table.block_size

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.table.num_blocks

    def write(
        self,
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K V"],
        *,
        sequences: Int[Array, " B"] | None = None,
        num_tokens: Int[Array, " B"] | None = None,
    ) -> UnifiedCache:
        """Appends tokens to sequences. Arguments and errors are those of `SlabCache.write`.

        Tokens that find no room are dropped and counted: ask `check_room` before.
        """
        key, value = checked_tokens(self, key, value)
        chosen = sequences_of_batch(sequences, key.shape[0], self.num_sequences, distinct=True)
        table, cells = self.table.allocate_to(chosen, key.shape[1], num_tokens)
        return self.store(table, cells, key, value)

    def store(
        self, table: CellTable, cells: Int[Array, "B T"], key: Float[Array, "B T K H"], value: Float[Array, "B T K V"]
    ) -> UnifiedCache:
        """Puts tokens into cells that `table.allocate` gave: the part of `write` that differs between layers.

        Args:
          table, cells: what `table.allocate` returned, as they are.
          key, value: of the new tokens.

        Raises:
          ValueError: shapes or dtypes that don't fit the cache, or a table of another size.
        """
        key, value = checked_tokens(self, key, value)
        places = integers("cells", cells)
        if table.capacity != self.capacity or places.shape != key.shape[:2]:
            raise ValueError(
                f"cells {list(places.shape)} of a table of {table.capacity} don't fit {list(key.shape[:2])} tokens "
                f"and {self.capacity} cells; give what the cache's own table.allocate returned"
            )
        places = places.astype(jnp.int32)
        # What no table gives, a negative cell, is left out as one past the end is; it doesn't count from the end.
        how: dict[str, Any] = {"mode": "drop", "unique_indices": True, "wrap_negative_indices": False}
        return UnifiedCache(self.key.at[places].set(key, **how), self.value.at[places].set(value, **how), table)

    def free(self, sequences: Int[Array, " n"] | Sequence[int] | int) -> UnifiedCache:
        """Ends sequences: they hold no tokens, and blocks that no other sequence sees are free.

        Raises:
          ValueError: the cache hasn't one of them; traced numbers that it hasn't end nothing.
        """
        return dataclasses.replace(self, table=self.table.free(sequences))

    def share(self, source: int, target: int, num_tokens: int | None = None) -> UnifiedCache:
        """Lets one sequence start with another's tokens, which stay where they are.

        Under `jax.jit` nothing is known of traced numbers: a count is clamped to the tokens that are there, and the
        cache stays as it is where source and target are one sequence, or it hasn't one of them.

        Args:
          source: the sequence whose tokens they are.
          target: the sequence that starts with them, in place of what it held.
          num_tokens: how many, from the first; by default all.

        Raises:
          ValueError: source and target are one sequence, the cache hasn't one of them, or fewer tokens are there.
        """
        return dataclasses.replace(self, table=self.table.share(source, target, num_tokens))

    def check_room(self, num_tokens: int | Sequence[int], *, sequences: Sequence[int] | None = None) -> None:
        """Checks, on the host, that sequences may grow. Arguments are those of `SlabCache.check_room`.

        Raises:
          CacheFull: there's no room, with the blocks needed and free, or a sequence not freed yet has lost tokens that
            found none.
          ValueError: traced arguments, sequences that the cache hasn't, counts below 0.
        """
        self.table.check_room(num_tokens, sequences=sequences)

    # What a decoding step asks of either form of cache.

    def blocks(self, sequences: Int[Array, " B"] | None) -> BlockSummary:
        """What each sequence finds in each block."""
        return self.table.blocks(sequences)

    def cells(
        self, sequences: Int[Array, " B"] | None, cells: Int[Array, "B c"] | None = None
    ) -> tuple[Int[Array, "#B c"], Bool[Array, "B c"]]:
        """Positions of some cells for each sequence, or of all, and whether it sees them."""
        return self.table.cells(sequences, cells)

    def read(
        self, sequences: Int[Array, " B"] | None, cells: Int[Array, "B c"] | None = None
    ) -> tuple[Float[Array, "#B c K H"], Float[Array, "#B c K V"]]:
        """Keys and values of some cells for each sequence, or of all, which are the same for every one."""
        return (self.key[None], self.value[None]) if cells is None else (self.key[cells], self.value[cells])
