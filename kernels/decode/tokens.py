"""What both forms of cache check of the tokens that are written to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

# Positions are 32-bit integers.
MOST_TOKENS = int(np.iinfo(np.int32).max)


class CacheFull(ValueError):
    """A cache has no room for the tokens of a step."""


def check_sizes(**sizes: int) -> None:
    """Checks that counts and dims are integers of at least 1.

    Raises:
      ValueError: one isn't, by name.
    """
    for name, size in sizes.items():
        if integer(name, size) < 1:
            raise ValueError(f"{name}={size} must be at least 1")


def is_traced(x: Any) -> bool:
    """Whether the host doesn't know the numbers yet."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))


def integers(name: str, x: Any) -> np.ndarray | Array:
    """Integers of any form: as a NumPy array of int64 if the host knows them, as an int32 array if they're traced.

    Traced ones that don't fit become the nearest that does.

    Raises:
      ValueError: floats, booleans or anything else that isn't an integer, or one beyond 64 bits.
    """
    traced = is_traced(x)
    try:
        array = jnp.asarray(x) if traced else np.asarray(x)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be integers, got {x!r}") from error
    if array.size == 0 and isinstance(x, list | tuple):
        array = array.astype(np.int32)  # An empty list has no type.
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {array.dtype}{list(array.shape)}")
    if traced:
        if array.dtype != jnp.int32:
            info = jnp.iinfo(array.dtype)
            array = jnp.clip(array, max(info.min, -MOST_TOKENS - 1), min(info.max, MOST_TOKENS))
        return array.astype(jnp.int32)
    if array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{name} must be integers of at most 64 bits, got {array.max()}")
    return array.astype(np.int64)


def integer(name: str, x: Any) -> int:
    """One integer that the host knows.

    Raises:
      ValueError: it isn't one.
    """
    number = None if is_traced(x) else integers(name, x)
    if number is None or number.shape != ():
        raise ValueError(f"{name} must be one integer that isn't traced, got {x!r}")
    return int(number)


def sequence_numbers(sequences: Any, num_sequences: int, *, distinct: bool = False) -> Int[Array, " n"]:
    """The cache's sequences that a caller names, as a vector.

    Traced numbers can't be checked. Each that the cache hasn't, or that comes again where all must differ, becomes a
    number past the end, of its own: it holds no tokens, and what is written to it is dropped.

    Args:
      sequences: one number or several.
      distinct: whether no two may be the same.

    Raises:
      ValueError: not integers, the cache hasn't one of them, or one comes twice.
    """
    numbers = integers("sequences", sequences)
    if numbers.ndim > 1:
        raise ValueError(f"sequences must be one number or a vector of them, got shape {list(numbers.shape)}")
    numbers = numbers.reshape(-1)
    if isinstance(numbers, np.ndarray):
        if ((numbers < 0) | (numbers >= num_sequences)).any():
            raise ValueError(
                f"sequences {numbers.tolist()} aren't all from 0 to {num_sequences - 1}, which the cache has"
            )
        if distinct and len(np.unique(numbers)) < len(numbers):
            raise ValueError(f"sequences {numbers.tolist()} must differ; give a sequence's tokens in one row")
        return jnp.asarray(numbers.astype(np.int32))
    known = (numbers >= 0) & (numbers < num_sequences)
    row = jnp.arange(len(numbers), dtype=jnp.int32)
    if distinct:
        known &= ~((numbers[:, None] == numbers) & (row < row[:, None])).any(-1)
    return jnp.where(known, numbers, num_sequences + row)


def which_sequences(
    sequences: Int[Array, " B"] | Sequence[int] | None, batch: int, num_sequences: int, *, distinct: bool = False
) -> Int[Array, " B"] | None:
    """The sequence of the cache that each row of a call belongs to; None where row i is sequence i.

    Args:
      sequences: as the caller gave them.
      batch: number of rows.
      num_sequences: that the cache has.
      distinct: whether no two may be the same.

    Raises:
      ValueError: not one integer for each row, the cache hasn't one of them, or one comes twice.
    """
    if sequences is None:
        if batch != num_sequences:
            raise ValueError(
                f"{batch} rows for a cache of {num_sequences} sequences; say with `sequences` which one each row is"
            )
        return None
    numbers = integers("sequences", sequences)
    if numbers.shape != (batch,):
        raise ValueError(
            f"sequences must be integers [{batch}], one for each row, got {numbers.dtype}{list(numbers.shape)}"
        )
    return sequence_numbers(numbers, num_sequences, distinct=distinct)


def of_rows(by_sequence: Shaped[Array, "Z ..."], sequences: Int[Array, " B"] | None) -> Shaped[Array, "B ..."]:
    """What belongs to each row's sequence; zeros for one past the end."""
    return by_sequence if sequences is None else by_sequence.at[sequences].get(mode="fill", fill_value=0)


def numbers_of_rows(sequences: Int[Array, " B"] | None, num_sequences: int) -> Int[Array, " B"]:
    """Each row's sequence as a number."""
    # A constant: an iota on the device would be a kernel of its own.
    return jnp.asarray(np.arange(num_sequences, dtype=np.int32)) if sequences is None else sequences


def check_tokens(
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    key_cells: Float[Array, "... K H"],
    value_cells: Float[Array, "... K V"],
) -> None:
    """Checks that new keys and values fit a cache's cells.

    Raises:
      ValueError: they don't, with what was expected.
    """
    for name, tokens, cells in (("key", key, key_cells), ("value", value, value_cells)):
        if 0 in tokens.shape[:2]:
            raise ValueError(f"{name} of shape {tokens.shape} holds no tokens; expected at least one row of one token")
        if tokens.ndim != 4 or tokens.shape[:2] != key.shape[:2] or tokens.shape[2:] != cells.shape[-2:]:
            num_heads, head_dim = cells.shape[-2:]
            raise ValueError(
                f"{name} must be [batch, tokens, {num_heads}, {head_dim}] for this cache, got {tokens.shape}"
            )
        if tokens.dtype != cells.dtype:
            raise ValueError(f"{name} is {tokens.dtype}, but the cache holds {cells.dtype}; cast it")


def num_tokens_of_rows(
    num_tokens: Int[Array, " B"] | None,
    length: int,
    lengths: Int[Array, " B"],
    sequences: Int[Array, " B"] | None,
    num_sequences: int,
) -> Int[Array, " B"]:
    """How many of a row's tokens are written; by default all.

    Traced counts are clamped to what is there: from 0 to `length`. A sequence past the end gets none, and one that
    has `MOST_TOKENS` gets no more.

    Args:
      num_tokens: as the caller gave them.
      length: tokens of a row.
      lengths: of the rows' sequences so far.
      sequences: of the rows.
      num_sequences: that the cache has.

    Raises:
      ValueError: not one integer for each row, or one that isn't from 0 to `length`.
    """
    batch = len(lengths)
    if num_tokens is None:
        counts = jnp.full(batch, length, jnp.int32)
    else:
        given = integers("num_tokens", num_tokens)
        if given.shape != (batch,):
            raise ValueError(
                f"num_tokens must be integers [{batch}], one for each row, got {given.dtype}{list(given.shape)}"
            )
        if isinstance(given, np.ndarray) and ((given < 0) | (given > length)).any():
            raise ValueError(f"num_tokens={given.tolist()} must all be from 0 to {length}, the tokens of a row")
        counts = jnp.clip(given, 0, length).astype(jnp.int32)
    if sequences is not None:
        counts = jnp.where(sequences < num_sequences, counts, 0)
    return jnp.minimum(counts, MOST_TOKENS - lengths)


def growth_on_host(
    lengths: Int[Array, " Z"], num_tokens: int | Sequence[int], sequences: Sequence[int] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sequences, their lengths and the tokens that each is to gain, read from the device.

    Raises:
      ValueError: a traced cache or traced arguments, which the host can't read, sequences that it hasn't, or counts
        that aren't integers of at least 0, one or one for each.
      CacheFull: a sequence would pass `MOST_TOKENS`.
    """
    if is_traced((lengths, num_tokens, sequences)):
        raise ValueError("check_room reads the cache and its arguments on the host; call it outside jax.jit")
    chosen = np.arange(len(lengths))
    if sequences is not None:
        chosen = np.asarray(sequence_numbers(sequences, len(lengths), distinct=True))
    growth = integers("num_tokens", num_tokens)
    if growth.shape not in ((), chosen.shape) or (growth < 0).any():
        raise ValueError(
            f"num_tokens must be one integer of at least 0, or one for each of {len(chosen)} sequences, "
            f"got {growth.tolist()}"
        )
    held, growth = np.asarray(lengths)[chosen].astype(np.int64), np.broadcast_to(growth, chosen.shape)
    for sequence, length, gain in zip(chosen.tolist(), held.tolist(), growth.tolist(), strict=True):
        if length + gain > MOST_TOKENS:
            raise CacheFull(
                f"sequence {sequence} holds {length} tokens and is to gain {gain}; "
                f"a sequence holds at most {MOST_TOKENS}"
            )
    return chosen, held, growth
