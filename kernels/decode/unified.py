"""A key/value cache whose slots many sequences share, and the table of the sequences that see each slot.

Dimensions: Z sequences that a table can tell apart, W = ⌈Z / 32⌉ words of a set of them, C slots, J blocks of slots,
B batch of a call (each element one sequence), T new tokens of each, K key/value heads, H and V head dims of key and
value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int, UInt32

from kernels.decode.blocks import DEFAULT_BLOCK_SIZE, BlockSummary
from kernels.decode.tokens import (
    MOST_TOKENS,
    CacheFull,
    check_sizes,
    checked_key_value,
    empty_slots,
    growth_on_host,
    integers,
    is_traced,
    numbered,
    sequence_numbers,
    sequences_of_batch,
    take_sequences,
    token_counts,
)

_WORD_BITS = 32
_NO_LOWEST = np.iinfo(np.int32).max  # `lowest` of a block without tokens.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UnifiedCache:
    """Keys and values of many sequences in one slab of slots, each of which knows which sequences see it.

    Sequences of any lengths share the memory. A prompt that several start with is kept once (`share`). A decoding step
    reads only the blocks that hold what a sequence may see. Make one with `UnifiedCache.empty`. Every method returns a
    new cache; under `jax.jit` with the old one donated, it is updated in place.

    The layers of a model share the table: allocate once for all (`table.allocate`), then `store` in each layer.

    Attributes:
      key, value: the slots.
      table: the sequences that see each slot.
      num_sequences, capacity, lengths, block_size, num_blocks: those of the table.
    """

    key: Float[Array, "C K H"]
    value: Float[Array, "C K V"]
    table: SlotTable

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
            `block_size` − 1 slots of its newest block unused.
          num_kv_heads, head_dim, value_dim: K, H and V; V is H by default.
          dtype: of keys and values.
          block_size: slots that are given out, read and skipped together.

        Raises:
          ValueError: a size below 1, or a capacity that isn't whole blocks.

        >>> cache = UnifiedCache.empty(8, capacity=4096, num_kv_heads=4, head_dim=64)
        >>> prompt = jnp.ones((1, 100, 4, 64), jnp.bfloat16)
        >>> cache = cache.write(prompt, prompt, sequences=jnp.array([5])).share(5, 6, num_tokens=80)
        >>> cache.table.lengths.tolist()
        [0, 0, 0, 0, 0, 100, 80, 0]
        """
        table = SlotTable.empty(num_sequences, capacity, block_size=block_size)
        return UnifiedCache(*empty_slots((capacity,), num_kv_heads, head_dim, value_dim, dtype), table)

    @property
    def num_sequences(self) -> int:
        return self.table.num_sequences

    @property
    def capacity(self) -> int:
        """Slots of all sequences together."""
        return self.table.capacity

    @property
    def lengths(self) -> Int[Array, " Z"]:
        """Tokens of each sequence so far: the position of its next one."""
        return self.table.lengths

    @property
    def block_size(self) -> int:
        return self.table.block_size

    @property
    def num_blocks(self) -> int:
        return self.table.num_blocks

    def write(
        self,
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K V"],
        *,
        sequences: Int[Array, " B"] | None = None,
        num_tokens: Int[Array, " B"] | None = None,
        from_start: bool = False,
    ) -> UnifiedCache:
        """Appends tokens to sequences, as `SlabCache.write` does, under `jax.jit` too.

        Tokens that find no room are dropped and counted: ask `check_room` before.
        """
        key, value = checked_key_value(self, key, value)
        chosen = sequences_of_batch(sequences, key.shape[0], self.num_sequences, distinct=True)
        table = self.table
        if from_start:
            table = table.free_written(chosen, key.shape[1], num_tokens)
        table, slots = table.allocate_to(chosen, key.shape[1], num_tokens)
        return self.store(table, slots, key, value)

    def store(
        self, table: SlotTable, slots: Int[Array, "B T"], key: Float[Array, "B T K H"], value: Float[Array, "B T K V"]
    ) -> UnifiedCache:
        """Puts tokens into slots that `table.allocate` gave: the part of `write` that differs between layers.

        Args:
          table, slots: the results of `table.allocate`, unchanged.
          key, value: of the new tokens.

        Raises:
          ValueError: shapes or dtypes that don't fit the cache, or a table of another size.
        """
        key, value = checked_key_value(self, key, value)
        indices = integers("slots", slots)
        if table.capacity != self.capacity or indices.shape != key.shape[:2]:
            raise ValueError(
                f"slots {list(indices.shape)} of a table of {table.capacity} don't fit {list(key.shape[:2])} tokens "
                f"and {self.capacity} slots; give what the cache's own table.allocate returned"
            )
        indices = indices.astype(jnp.int32)
        # No table gives a negative slot. It is left out like one past the end, and doesn't count from the end.
        how: dict[str, Any] = {"mode": "drop", "unique_indices": True, "wrap_negative_indices": False}
        return UnifiedCache(self.key.at[indices].set(key, **how), self.value.at[indices].set(value, **how), table)

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
          source: the sequence that holds the tokens.
          target: the sequence that starts with them; the tokens that it held are dropped.
          num_tokens: how many, from the first; by default all.

        Raises:
          ValueError: source and target are one sequence, the cache hasn't one of them, or fewer tokens are there.
        """
        return dataclasses.replace(self, table=self.table.share(source, target, num_tokens))

    def share_with_all(self, source: int, num_shared: int = 0) -> UnifiedCache:
        """Lets every other sequence start with all of one's tokens, which stay where they are.

        Args:
          source: the sequence that holds the tokens; what the others held is dropped.
          num_shared: the first slots, which `decode_attention` reads once for all sequences from now on, until one of
            them is freed: whole blocks, each slot with the source's token at the position of the slot's number, as the
            first sequence that is written to an empty cache has them. Static; under `jax.jit` it is taken on trust.

        Raises:
          ValueError: the cache hasn't the sequence, or those slots hold anything else.

        >>> cache = UnifiedCache.empty(3, capacity=1024, num_kv_heads=4, head_dim=64)
        >>> context = jnp.ones((1, 300, 4, 64), jnp.bfloat16)
        >>> cache = cache.write(context, context, sequences=jnp.array([0])).share_with_all(0, num_shared=256)
        >>> cache.lengths.tolist(), cache.table.num_shared
        ([300, 300, 300], 256)
        """
        return dataclasses.replace(self, table=self.table.share_with_all(source, num_shared))

    def without_shared(self) -> UnifiedCache:
        """The slots after those that all sequences share, for attention to them alone: nothing may be written here."""
        num_shared = self.table.num_shared
        if not num_shared:
            return self
        return UnifiedCache(self.key[num_shared:], self.value[num_shared:], self.table.without_shared())

    def check_room(self, num_tokens: int | Sequence[int], *, sequences: Sequence[int] | None = None) -> None:
        """Checks, on the host, that sequences may grow; `num_tokens` and `sequences` as in `SlabCache.check_room`.

        Raises:
          CacheFull: there's no room, with the blocks needed and free, or a sequence not freed yet has lost tokens that
            found none.
          ValueError: traced arguments, sequences that the cache hasn't, counts below 0.
        """
        self.table.check_room(num_tokens, sequences=sequences)

    # A decoding step calls these on either form of cache.

    def blocks(self, sequences: Int[Array, " B"] | None) -> BlockSummary:
        """The summary of each sequence's blocks."""
        return self.table.blocks(sequences)

    def slots(
        self, sequences: Int[Array, " B"] | None, slots: Int[Array, "B c"] | None = None
    ) -> tuple[Int[Array, "#B c"], Bool[Array, "B c"]]:
        """Positions of some slots for each sequence, or of all, and whether it sees them."""
        return self.table.slots(sequences, slots)

    def read(
        self, sequences: Int[Array, " B"] | None, slots: Int[Array, "B c"] | None = None
    ) -> tuple[Float[Array, "#B c K H"], Float[Array, "#B c K V"]]:
        """Keys and values of some slots for each sequence, or of all, which are the same for every one."""
        return (self.key[None], self.value[None]) if slots is None else (self.key[slots], self.value[slots])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotTable:
    """The sequences that see each slot of a unified cache, and its position: one table serves all layers of a model.

    Slots are given out in blocks: a sequence fills up its newest block, then takes the first free one. A block is free
    again once no sequence sees any of its slots. All of this happens on the device, so that a step that writes can run
    inside a compiled loop; `check_room` asks ahead, on the host, whether the tokens to come will fit.

    Attributes:
      positions: of the token in each slot; −1 where there's none.
      owners: the set of sequences that see each slot, as bits; none for an empty slot.
      lowest, highest: bounds of the positions in each block.
      some_slot, every_slot: the sequences that see some slot of a block, and those that see all of its slots.
      lengths: tokens of each sequence so far: the position of its next one.
      last_slots: slot of the newest token that a sequence wrote itself; −1 if there's none.
      num_dropped: tokens of each sequence for which there was no free block. They are lost, and `check_room` says so
        until the sequence ends.
      block_size: slots of a block.
      num_shared: the first slots, whole blocks, in which all sequences have the tokens at the same positions.
    """

    positions: Int[Array, " C"]
    owners: UInt32[Array, "C W"]
    lowest: Int[Array, " J"]
    highest: Int[Array, " J"]
    some_slot: UInt32[Array, "J W"]
    every_slot: UInt32[Array, "J W"]
    lengths: Int[Array, " Z"]
    last_slots: Int[Array, " Z"]
    num_dropped: Int[Array, " Z"]
    block_size: int = field(metadata={"static": True})
    num_shared: int = field(default=0, metadata={"static": True})

    @staticmethod
    def empty(num_sequences: int, capacity: int, *, block_size: int = DEFAULT_BLOCK_SIZE) -> SlotTable:
        """A table of empty slots. See `UnifiedCache.empty`."""
        check_sizes(num_sequences=num_sequences, capacity=capacity, block_size=block_size)
        if capacity % block_size:
            raise ValueError(
                f"capacity={capacity} is not a multiple of block_size={block_size}; "
                f"use {-(-capacity // block_size) * block_size}"
            )
        num_blocks, num_words = capacity // block_size, -(-num_sequences // _WORD_BITS)
        return SlotTable(
            positions=jnp.full(capacity, -1, jnp.int32),
            owners=jnp.zeros((capacity, num_words), jnp.uint32),
            lowest=jnp.full(num_blocks, _NO_LOWEST, jnp.int32),
            highest=jnp.full(num_blocks, -1, jnp.int32),
            some_slot=jnp.zeros((num_blocks, num_words), jnp.uint32),
            every_slot=jnp.zeros((num_blocks, num_words), jnp.uint32),
            lengths=jnp.zeros(num_sequences, jnp.int32),
            last_slots=jnp.full(num_sequences, -1, jnp.int32),
            num_dropped=jnp.zeros(num_sequences, jnp.int32),
            block_size=int(block_size),
        )

    @property
    def num_sequences(self) -> int:
        """Sequences that the table can tell apart."""
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.positions.shape[0]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.lowest.shape[0]

    def allocate(
        self, num_new: int, *, sequences: Int[Array, " B"] | None = None, num_tokens: Int[Array, " B"] | None = None
    ) -> tuple[SlotTable, Int[Array, "B T"]]:
        """Gives slots to new tokens. See `UnifiedCache.write`.

        Returns:
          The new table, and the slot of each token: one past the end for a token that doesn't count or found no room.

        Raises:
          ValueError: `num_new` below 1, sequences that the table hasn't, or counts of tokens that aren't there.
        """
        check_sizes(num_new=num_new)
        chosen = None if sequences is None else sequence_numbers(sequences, self.num_sequences, distinct=True)
        return self.allocate_to(chosen, num_new, num_tokens)

    def allocate_to(
        self, sequences: Int[Array, " B"] | None, num_new: int, num_tokens: Any
    ) -> tuple[SlotTable, Int[Array, "B T"]]:
        """As `allocate`, with sequence numbers that have been checked."""
        length, last_slot = take_sequences(self.lengths, sequences), take_sequences(self.last_slots, sequences)
        counts = token_counts(num_tokens, num_new, length)
        if sequences is not None:
            counts = jnp.where(sequences < self.num_sequences, counts, 0)
        size, capacity, no_block = self.block_size, self.capacity, self.num_blocks

        # Each sequence's blocks: first the one that it is filling up (full where there is none), then free ones.
        num_used = last_slot % size + 1
        num_taken = (num_used + counts - 1) // size
        most_taken = (size + num_new - 1) // size
        rank = jnp.arange(most_taken, dtype=jnp.int32)[None]
        # The n-th free block comes after all blocks up to which there are fewer than n; past the end if n aren't free.
        num_free_so_far = jnp.cumsum((self.some_slot == 0).all(-1), dtype=jnp.int32)
        nth = (jnp.cumsum(num_taken) - num_taken)[:, None] + rank + 1
        taken = (num_free_so_far < nth[..., None]).sum(-1, dtype=jnp.int32)
        taken = jnp.where(rank < num_taken[:, None], taken, no_block)
        filling = jnp.where(last_slot < 0, no_block, last_slot // size)
        blocks = jnp.concatenate([filling[:, None], taken], axis=1).astype(jnp.int32)

        token = jnp.arange(num_new, dtype=jnp.int32)[None]
        offset = num_used[:, None] + token
        block = jnp.take_along_axis(blocks, offset // size, axis=1)
        counted = token < counts[:, None]
        fits = counted & (block < no_block)
        # The writes are cheap where all slots are promised to differ, so those past the end differ too.
        past_end = capacity + jnp.arange(offset.size, dtype=jnp.int32).reshape(offset.shape)
        slots = jnp.where(fits, block * size + offset % size, past_end)

        newest = jnp.take_along_axis(slots, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
        newest = jnp.where(counts > 0, jnp.where(newest < capacity, newest, -1), last_slot)
        position, lost = length[:, None] + token, (counted & ~fits).sum(1, dtype=jnp.int32)
        owner = self._sets(numbered(sequences, self.num_sequences))
        owner = jnp.broadcast_to(owner[:, None], (*slots.shape, owner.shape[-1]))
        table = dataclasses.replace(
            self,
            positions=self.positions.at[slots].set(position, mode="drop", unique_indices=True),
            owners=self.owners.at[slots].set(owner, mode="drop", unique_indices=True),
            lengths=length + counts if sequences is None else self.lengths.at[sequences].add(counts, mode="drop"),
            last_slots=newest if sequences is None else self.last_slots.at[sequences].set(newest, mode="drop"),
            num_dropped=self.num_dropped + lost
            if sequences is None
            else self.num_dropped.at[sequences].add(lost, mode="drop"),
        )
        return table._summarized(blocks.reshape(-1)), slots

    def free(self, sequences: Int[Array, " n"] | Sequence[int] | int) -> SlotTable:
        """Ends sequences. See `UnifiedCache.free`."""
        return self._free(sequence_numbers(sequences, self.num_sequences))

    def _free(self, numbers: Int[Array, " n"]) -> SlotTable:
        sets = jnp.where((numbers < self.num_sequences)[:, None], self._sets(numbers), 0)
        ended = jnp.bitwise_or.reduce(sets, axis=0)
        owners = self.owners & ~ended
        table = dataclasses.replace(
            self,
            positions=jnp.where((owners == 0).all(-1), -1, self.positions),
            owners=owners,
            lengths=self.lengths.at[numbers].set(0, mode="drop"),
            last_slots=self.last_slots.at[numbers].set(-1, mode="drop"),
            num_dropped=self.num_dropped.at[numbers].set(0, mode="drop"),
            num_shared=0,
        )
        return table._summarized()

    def free_written(self, sequences: Int[Array, " B"] | None, num_new: int, num_tokens: Any) -> SlotTable:
        """Ends those of some sequences, whose numbers have been checked, that are about to get tokens."""
        numbers = numbered(sequences, self.num_sequences)
        counts = token_counts(num_tokens, num_new, jnp.zeros_like(numbers))
        return self._free(jnp.where(counts > 0, numbers, self.num_sequences))

    def share(self, source: int, target: int, num_tokens: int | None = None) -> SlotTable:
        """Lets one sequence start with another's tokens. See `UnifiedCache.share`."""
        numbers = integers("source", source, ()), integers("target", target, ())
        givers, takers = (sequence_numbers(number, self.num_sequences) for number in numbers)
        if is_traced(numbers):
            # Unless they are two of the table's sequences, both numbers go past the end, and nothing changes.
            are_two = (givers != takers) & (givers < self.num_sequences) & (takers < self.num_sequences)
            givers, takers = (jnp.where(are_two, x, self.num_sequences) for x in (givers, takers))
        elif numbers[0] == numbers[1]:
            raise ValueError(f"sequence {source} can't be replaced by its own start; give two different sequences")
        length, lost = take_sequences(self.lengths, givers), take_sequences(self.num_dropped, givers)
        if num_tokens is not None:
            count = integers("num_tokens", num_tokens, ())
            if isinstance(count, np.ndarray):
                if count < 0:
                    raise ValueError(f"num_tokens={count} must be at least 0")
                if not is_traced(length) and count > (held := length.item()):
                    raise ValueError(f"sequence {source} holds {held} tokens, not num_tokens={count}; share fewer")
                count = np.minimum(count, MOST_TOKENS).astype(np.int32)
            length = jnp.clip(count, 0, length)
        table = self._free(takers)
        shared = self._sees(table.owners, givers)[0] & (table.positions < length)
        table = dataclasses.replace(
            table,
            owners=jnp.where(shared[:, None], table.owners | self._sets(takers), table.owners),
            lengths=table.lengths.at[takers].set(length, mode="drop"),
            num_dropped=table.num_dropped.at[takers].set(lost, mode="drop"),
        )
        return table._summarized()

    def share_with_all(self, source: int, num_shared: int = 0) -> SlotTable:
        """Lets every other sequence start with all of one's tokens. See `UnifiedCache.share_with_all`."""
        number = sequence_numbers(integers("source", source, ()), self.num_sequences)
        seen = self._sees(self.owners, number)[0]
        if num_shared % self.block_size or not 0 <= num_shared < self.capacity:
            most = min(max(num_shared, 0), self.capacity - self.block_size)
            raise ValueError(
                f"num_shared={num_shared} must be whole blocks of {self.block_size} slots, fewer than the "
                f"{self.capacity} that there are; use {most // self.block_size * self.block_size}"
            )
        if not is_traced((seen, self.positions)):
            held = np.where(seen, self.positions, -1)[:num_shared]
            if (wrong := np.flatnonzero(held != np.arange(num_shared))).size:
                raise ValueError(
                    f"slot {wrong[0]} doesn't hold the token of sequence {source} at position {wrong[0]}; expected it "
                    f"in each of the first num_shared={num_shared} slots; write the sequence to an empty cache first, "
                    "or share fewer"
                )
        everyone = jnp.bitwise_or.reduce(self._sets(jnp.arange(self.num_sequences, dtype=jnp.int32)), axis=0)
        all_of_them = jnp.ones_like(self.lengths)
        is_source = jnp.arange(self.num_sequences, dtype=jnp.int32) == number
        table = dataclasses.replace(
            self,
            positions=jnp.where(seen, self.positions, -1),
            owners=jnp.where(seen[:, None], everyone, 0),
            lengths=all_of_them * take_sequences(self.lengths, number),
            last_slots=jnp.where(is_source, self.last_slots, -1),
            num_dropped=all_of_them * take_sequences(self.num_dropped, number),
            num_shared=int(num_shared),
        )
        return table._summarized()

    def without_shared(self) -> SlotTable:
        """The part of the table after the slots that all sequences share. See `UnifiedCache.without_shared`."""
        slot, block = self.num_shared, self.num_shared // self.block_size
        return dataclasses.replace(
            self,
            positions=self.positions[slot:],
            owners=self.owners[slot:],
            lowest=self.lowest[block:],
            highest=self.highest[block:],
            some_slot=self.some_slot[block:],
            every_slot=self.every_slot[block:],
            num_shared=0,
        )

    def check_room(self, num_tokens: int | Sequence[int], *, sequences: Sequence[int] | None = None) -> None:
        """Checks that there are free blocks enough. See `UnifiedCache.check_room`."""
        chosen, _, growth = growth_on_host(self.lengths, num_tokens, sequences)
        lost = np.asarray(self.num_dropped)[chosen]
        if lost.any():
            raise CacheFull(
                f"{lost.sum()} tokens of sequences {chosen[lost > 0].tolist()} found no room in {self.capacity} slots "
                "and are lost; free these sequences, and ask check_room before tokens are written"
            )
        num_used = np.asarray(self.last_slots)[chosen] % self.block_size + 1
        num_needed = int(((num_used + growth - 1) // self.block_size).sum())
        num_free = int((np.asarray(self.some_slot) == 0).all(-1).sum())
        if num_needed > num_free:
            raise CacheFull(
                f"{growth.sum()} more tokens of {len(chosen)} sequences need {num_needed} free blocks of "
                f"{self.block_size} slots, but {num_free} of {self.num_blocks} are free; free a sequence, or make the "
                f"cache with capacity={self.capacity + (num_needed - num_free) * self.block_size}"
            )

    def blocks(self, sequences: Int[Array, " B"] | None) -> BlockSummary:
        """The summary of each sequence's blocks."""
        numbers = numbered(sequences, self.num_sequences)
        some, every = (self._sees(sets, numbers) for sets in (self.some_slot, self.every_slot))
        return BlockSummary(self.lowest[None], self.highest[None], some, every)

    def slots(
        self, sequences: Int[Array, " B"] | None, slots: Int[Array, "B c"] | None = None
    ) -> tuple[Int[Array, "#B c"], Bool[Array, "B c"]]:
        """Positions of some slots for each sequence, or of all, and whether it sees them."""
        seen = self._sees(self.owners, numbered(sequences, self.num_sequences), slots)
        return self.positions[None] if slots is None else self.positions[slots], seen

    def _sets(self, sequences: Int[Array, " n"]) -> UInt32[Array, "n W"]:
        """Each sequence as a set of its own."""
        word, bit = sequences // _WORD_BITS, (sequences % _WORD_BITS).astype(jnp.uint32)
        is_its_word = jnp.arange(self.owners.shape[-1], dtype=jnp.int32) == word[:, None]
        return jnp.where(is_its_word, jnp.uint32(1) << bit[:, None], jnp.uint32(0))

    def _sees(
        self, sets: UInt32[Array, "n W"], sequences: Int[Array, " B"], slots: Int[Array, "B c"] | None = None
    ) -> Bool[Array, "B c"]:
        """True where a sequence is in a set: in each of the sets, or in those at its slots. A number past the end is in
        none."""
        word, bit = sequences // _WORD_BITS, (sequences % _WORD_BITS).astype(jnp.uint32)
        words = sets.T[word] if slots is None else sets[slots, word[:, None]]
        return ((words >> bit[:, None]) & 1).astype(bool) & (sequences < self.num_sequences)[:, None]

    def _summarized(self, blocks: Int[Array, " n"] | None = None) -> SlotTable:
        """The table with a new summary of some blocks, or of all; numbers past the last block are left out."""
        blocks = jnp.arange(self.num_blocks, dtype=jnp.int32) if blocks is None else blocks
        positions, owners = (
            x.reshape(self.num_blocks, self.block_size, *x.shape[1:]).at[blocks].get(mode="clip")
            for x in (self.positions, self.owners)
        )
        return dataclasses.replace(
            self,
            lowest=self.lowest.at[blocks].set(jnp.where(positions >= 0, positions, _NO_LOWEST).min(-1), mode="drop"),
            highest=self.highest.at[blocks].set(positions.max(-1), mode="drop"),
            some_slot=self.some_slot.at[blocks].set(jnp.bitwise_or.reduce(owners, axis=1), mode="drop"),
            every_slot=self.every_slot.at[blocks].set(jnp.bitwise_and.reduce(owners, axis=1), mode="drop"),
        )
