"""A key/value cache with one slab of slots per sequence.

Dimensions: Z sequences of the cache, S slots of each, B batch of a call (each element one sequence), T new tokens of
each, K key/value heads, H and V head dims of key and value, J blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from kernels.decode.blocks import DEFAULT_BLOCK_SIZE, BlockSummary
from kernels.decode.tokens import (
    CacheFull,
    check_sizes,
    checked_key_value,
    empty_slots,
    growth_on_host,
    integers,
    numbered,
    sequence_numbers,
    sequences_of_batch,
    take_sequences,
    token_counts,
)
from kernels.masks import Mask, require_mask


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlabCache:
    """Keys and values of some sequences, each in slots of its own.

    The token at position p of a sequence lies in its slot p % S. A slab is thus a ring: a sequence longer than its slab
    keeps its last S tokens, all that a local layer needs. Make one with `SlabCache.empty`. Every method returns a new
    cache; under `jax.jit` with the old one donated, it is updated in place.

    Attributes:
      key, value: the slots.
      lengths: number of tokens written so far: the position of the next one.
      block_size: slots that a decoding step reads or skips together.
    """

    key: Float[Array, "Z S K H"]
    value: Float[Array, "Z S K V"]
    lengths: Int[Array, " Z"]
    block_size: int = field(default=DEFAULT_BLOCK_SIZE, metadata={"static": True})

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
    ) -> SlabCache:
        """A cache without tokens.

        Args:
          num_sequences, capacity: Z and S; `slab_capacity` says how many slots a mask needs.
          num_kv_heads, head_dim, value_dim: K, H and V; V is H by default.
          dtype: of keys and values.
          block_size: slots that are read or skipped together.

        Raises:
          ValueError: a size below 1.

        >>> cache = SlabCache.empty(2, capacity=1024, num_kv_heads=4, head_dim=64)
        >>> token = jnp.ones((2, 1, 4, 64), jnp.bfloat16)
        >>> cache.write(token, token).lengths.tolist()
        [1, 1]
        """
        check_sizes(num_sequences=num_sequences, capacity=capacity, block_size=block_size)
        key, value = empty_slots((num_sequences, capacity), num_kv_heads, head_dim, value_dim, dtype)
        return SlabCache(key, value, lengths=jnp.zeros(num_sequences, jnp.int32), block_size=int(block_size))

    @property
    def num_sequences(self) -> int:
        """Sequences that the cache has slots for."""
        return self.key.shape[0]

    @property
    def capacity(self) -> int:
        """Slots of each sequence."""
        return self.key.shape[1]

    @property
    def num_blocks(self) -> int:
        """Blocks of each sequence's slots; the last may be cut short."""
        return -(-self.capacity // self.block_size)

    def write(
        self,
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K V"],
        *,
        sequences: Int[Array, " B"] | None = None,
        num_tokens: Int[Array, " B"] | None = None,
        from_start: bool = False,
    ) -> SlabCache:
        """Appends tokens to sequences.

        A sequence holds at most 2³¹ − 1 tokens. Under `jax.jit` nothing is known of traced numbers: counts are clamped
        to the tokens that are there, and a batch element is left out if the cache hasn't its sequence, or if an earlier
        element names it too. Other numbers are checked, and those in JAX arrays read from the device for it.

        Args:
          key, value: of the new tokens, in the cache's dtype; any number T, a whole prompt too.
          sequences: the sequence of each batch element, no two the same; by default element i is sequence i.
          num_tokens: how many of each element's tokens count, from the first; by default all. 0 leaves a sequence as it
            is.
          from_start: the tokens replace those that their sequences held.

        Raises:
          ValueError: shapes or dtypes that don't fit the cache, sequences that it hasn't, or counts of tokens that
            aren't there.
        """
        key, value = checked_key_value(self, key, value)
        batch, num_new, capacity = *key.shape[:2], self.capacity
        chosen = sequences_of_batch(sequences, batch, self.num_sequences, distinct=True)
        before = take_sequences(self.lengths, chosen)
        start = jnp.zeros_like(before) if from_start else before
        counts = token_counts(num_tokens, num_new, start)
        after = jnp.where(counts > 0, start + counts, before) if from_start else start + counts

        token = jnp.arange(num_new, dtype=jnp.int32)[None]
        position = start[:, None] + token
        kept = (token < counts[:, None]) & (token >= counts[:, None] - capacity)
        # Tokens that aren't kept go past the end, each to a slot of its own, since the slots are promised to differ.
        slot = jnp.where(kept, position % capacity, capacity + token)
        index = (numbered(chosen, self.num_sequences)[:, None], slot)

        def put(slots, tokens):
            if batch == num_new == 1 and chosen is None and num_tokens is None:
                # It is kept. A scatter would read the slot first, in a kernel of its own, to write it back otherwise.
                return jax.lax.dynamic_update_slice_in_dim(slots, tokens, start[0] % capacity, axis=1)
            return slots.at[index].set(tokens, mode="drop", unique_indices=True)

        return dataclasses.replace(
            self,
            key=put(self.key, key),
            value=put(self.value, value),
            lengths=after if chosen is None else self.lengths.at[chosen].set(after, mode="drop"),
        )

    def keep_path(
        self,
        path: Int[Array, "B A"],
        start: Int[Array, " B"],
        *,
        sequences: Int[Array, " B"] | None = None,
        num_tokens: Int[Array, " B"] | None = None,
    ) -> SlabCache:
        """Drops the tokens of a tree but for one path, which goes on as if it had been written alone.

        Args:
          path: indices in the tree (`TokenTree`) of the tokens to keep, from a root down.
          start: the tree's: number of tokens in each sequence before it.
          sequences: as for `write`; the cache's other sequences stay as they are.
          num_tokens: how many tokens of each path count, from the first; by default all. 0 drops the whole tree.

        Raises:
          ValueError: integers of another shape or type, or sequences that the cache hasn't.

        >>> cache = SlabCache.empty(1, capacity=16, num_kv_heads=1, head_dim=1, dtype=jnp.float32)
        >>> tokens = jnp.arange(7.0).reshape(1, 7, 1, 1)  # a prompt of four tokens, and a tree of three
        >>> cache = cache.write(tokens, tokens).keep_path([[0, 2]], start=[4])
        >>> cache.lengths.tolist(), cache.key[0, :6].ravel().tolist()
        ([6], [0.0, 1.0, 2.0, 3.0, 4.0, 6.0])
        """
        nodes, first = integers("path", path), integers("start", start)
        if nodes.ndim != 2 or 0 in nodes.shape or first.shape != nodes.shape[:1]:
            raise ValueError(
                f"path must be integers [B, A], and start integers [B], got {list(nodes.shape)} and {list(first.shape)}"
            )
        chosen = sequences_of_batch(sequences, len(nodes), self.num_sequences, distinct=True)
        before = jnp.asarray(first.astype(np.int32))
        slots = (before[:, None] + nodes.astype(np.int32)) % self.capacity
        lengths = before if chosen is None else self.lengths.at[chosen].set(before, mode="drop")
        shortened = dataclasses.replace(self, lengths=lengths)
        return shortened.write(*self.read(chosen, slots), sequences=sequences, num_tokens=num_tokens)

    def free(self, sequences: Int[Array, " n"] | Sequence[int] | int) -> SlabCache:
        """Ends sequences: they hold no tokens, and others may start in their slots.

        Raises:
          ValueError: the cache hasn't one of them; traced numbers that it hasn't end nothing.
        """
        numbers = sequence_numbers(sequences, self.num_sequences)
        return dataclasses.replace(self, lengths=self.lengths.at[numbers].set(0, mode="drop"))

    def check_room(
        self,
        num_tokens: int | Sequence[int],
        mask: Mask | None = None,
        *,
        tokens_per_step: int = 1,
        sequences: Sequence[int] | None = None,
    ) -> None:
        """Checks, on the host, that sequences may grow without overwriting tokens that a mask still allows them to see.

        Args:
          num_tokens: tokens that each sequence is to gain, one number or one for each.
          mask: of the attention over this cache; None allows all.
          tokens_per_step: tokens that are written before a query looks.
          sequences: those that grow; all by default.

        Raises:
          CacheFull: there's no room, with the sequence, the count and the capacity that would do.
          ValueError: traced arguments, sequences that the cache hasn't, counts below 0.
        """
        check_sizes(tokens_per_step=tokens_per_step)
        chosen, lengths, growth = growth_on_host(self.lengths, num_tokens, sequences)
        for sequence, length, gain in zip(chosen, lengths, growth, strict=True):
            total = int(length + gain)
            needed = slab_capacity(mask, total, tokens_per_step) if total else 0
            if needed > self.capacity:
                raise CacheFull(
                    f"sequence {sequence} holds {length} tokens and is to gain {gain}, for which this mask needs "
                    f"{needed} slots of its {self.capacity}; end the sequence, or make the cache with "
                    f"capacity={needed}"
                )

    # A decoding step calls these on either form of cache.

    def blocks(self, sequences: Int[Array, " B"] | None) -> BlockSummary:
        """The summary of each sequence's blocks, in closed form from its length."""
        first = jnp.arange(self.num_blocks, dtype=jnp.int32)[None] * self.block_size
        last = jnp.minimum(first + self.block_size, self.capacity) - 1
        length = take_sequences(self.lengths, sequences)[:, None]
        newest = (length - 1) % self.capacity  # The slot of the newest token; the oldest lies behind it in a full ring.
        first_position, last_position = (_position(slot, length, self.capacity) for slot in (first, last))
        wraps = (first <= newest) & (newest < last)  # Positions fall from the newest slot to the next.
        lowest = jnp.where(wraps & (length > self.capacity), length - self.capacity, first_position)
        highest = jnp.where(wraps, length - 1, last_position)
        whole = (last - first == self.block_size - 1) & (last < length)
        return BlockSummary(lowest, highest, some=first < length, every=whole)

    def slots(
        self, sequences: Int[Array, " B"] | None, slots: Int[Array, "B c"] | None = None
    ) -> tuple[Int[Array, "B c"], Bool[Array, "B c"]]:
        """Positions of some slots of each sequence, or of all, and whether they hold a token."""
        slots = jnp.arange(self.capacity, dtype=jnp.int32)[None] if slots is None else slots
        position = _position(slots, take_sequences(self.lengths, sequences)[:, None], self.capacity)
        return position, (slots < self.capacity) & (position >= 0)

    def read(
        self, sequences: Int[Array, " B"] | None, slots: Int[Array, "B c"] | None = None
    ) -> tuple[Float[Array, "B c K H"], Float[Array, "B c K V"]]:
        """Keys and values of some slots of each sequence, or of all; anything for a slot past the end."""
        if slots is None:
            return take_sequences(self.key, sequences), take_sequences(self.value, sequences)
        index = (numbered(sequences, self.num_sequences)[:, None], slots)
        return self.key.at[index].get(mode="clip"), self.value.at[index].get(mode="clip")


def _position(slot: Int[Array, "B c"], length: Int[Array, "B 1"], capacity: int) -> Int[Array, "B c"]:
    """The position that a slot holds: the highest below `length` that belongs there; negative if none does."""
    return length - 1 - (length - 1 - slot) % capacity


def slab_capacity(mask: Mask | None, max_length: int, tokens_per_step: int = 1) -> int:
    """Number of slots of a slab that keep all tokens which a mask allows a query to see.

    Args:
      mask: of the attention over the cache; None allows all.
      max_length: tokens that a sequence may reach, in all.
      tokens_per_step: tokens that are written before a query looks; with a tree, all of the tree's.

    Raises:
      ValueError: a count below 1, or something else than a mask.

    >>> from kernels import CausalMask, LocalMask
    >>> slab_capacity(CausalMask(), 32_768), slab_capacity(LocalMask(1023, 0), 32_768)
    (32768, 1024)
    """
    check_sizes(max_length=max_length, tokens_per_step=tokens_per_step)
    if mask is None:
        return max_length
    require_mask(mask)
    return max_length if mask.lookback is None else min(max_length, mask.lookback + tokens_per_step)
