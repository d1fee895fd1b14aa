"""Shared by both forms of cache: empty slots, and checks of the sequences, counts and tokens that callers give.

Numbers that the host knows are refused if they don't fit. Traced ones can't be: they are clamped, or the sequences that
they name are left out. Numbers in a JAX array are read from the device to be checked; those in NumPy arrays and lists
aren't.

Dimensions: Z sequences of a cache, B batch, T new tokens of each batch element, K key/value heads, H and V head dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int, Shaped

from kernels.call import FLOATING_DTYPES

# Positions are 32-bit integers.
MOST_TOKENS = int(np.iinfo(np.int32).max)


class CacheFull(ValueError):
    """A cache has no room for the tokens of a step."""


def check_sizes(**sizes: int) -> None:
    """Raises ValueError for a count or dim that isn't an integer of at least 1."""
    for name, size in sizes.items():
        if is_traced(size):
            raise ValueError(f"{name} must be one integer that isn't traced, got {size!r}")
        if integers(name, size, ()) < 1:
            raise ValueError(f"{name}={size} must be at least 1")


def is_traced(x: Any) -> bool:
    """True if some number is traced: the host doesn't know it yet."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))


def integers(name: str, x: Any, shape: tuple[int, ...] | None = None) -> np.ndarray | Array:
    """Integers of any form: as NumPy's int64 if the host knows them, as JAX's int32 if they're traced.

    Traced ones that don't fit become the nearest that does.
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
    if shape is not None and array.shape != shape:
        expected = f"integers {list(shape)}, one for each batch element" if shape else "one integer"
        raise ValueError(f"{name} must be {expected}, got {array.dtype}{list(array.shape)}")
    if traced:
        if array.dtype != jnp.int32:
            info = jnp.iinfo(array.dtype)
            array = jnp.clip(array, max(info.min, -MOST_TOKENS - 1), min(info.max, MOST_TOKENS))
        return array.astype(jnp.int32)
    if array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{name} must be integers of at most 64 bits, got {array.max()}")
    return array.astype(np.int64)


def sequence_numbers(sequences: Any, num_sequences: int, *, distinct: bool = False) -> Int[Array, " n"]:
    """The sequences of a cache that a caller names, one or several, as a vector.

    A traced number that the cache hasn't, or that comes again where all must be distinct, becomes a number past the
    end, different for each. No sequence has that number, so it holds no tokens, and what is written to it is dropped.
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
            raise ValueError(f"sequences {numbers.tolist()} must differ; give a sequence's tokens in one batch element")
        return jnp.asarray(numbers.astype(np.int32))
    known = (numbers >= 0) & (numbers < num_sequences)
    index = jnp.arange(len(numbers), dtype=jnp.int32)
    if distinct:
        known &= ~((numbers[:, None] == numbers) & (index < index[:, None])).any(-1)
    return jnp.where(known, numbers, num_sequences + index)


def sequences_of_batch(
    sequences: Any, batch: int, num_sequences: int, *, distinct: bool = False
) -> Int[Array, " B"] | None:
    """The sequence of each batch element; None where element i is sequence i."""
    if sequences is not None:
        return sequence_numbers(integers("sequences", sequences, (batch,)), num_sequences, distinct=distinct)
    if batch != num_sequences:
        raise ValueError(
            f"a batch of {batch} for a cache of {num_sequences} sequences; say with `sequences` which each is"
        )
    return None


def take_sequences(by_sequence: Shaped[Array, "Z ..."], sequences: Int[Array, " B"] | None) -> Shaped[Array, "B ..."]:
    """The entries of each batch element's sequence; zeros for a number past the end."""
    return by_sequence if sequences is None else by_sequence.at[sequences].get(mode="fill", fill_value=0)


def numbered(sequences: Int[Array, " B"] | None, num_sequences: int) -> Int[Array, " B"]:
    """The number of each batch element's sequence."""
    # A constant: an iota on the device would be a kernel of its own.
    return jnp.asarray(np.arange(num_sequences, dtype=np.int32)) if sequences is None else sequences


def empty_slots(
    shape: tuple[int, ...], num_kv_heads: int, head_dim: int, value_dim: int | None, dtype: DTypeLike
) -> tuple[Float[Array, "... K H"], Float[Array, "... K V"]]:
    """Keys and values of slots without tokens; V is H by default."""
    value_dim = head_dim if value_dim is None else value_dim
    check_sizes(num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=value_dim)
    if jnp.dtype(dtype) not in FLOATING_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, FLOATING_DTYPES))}, got {jnp.dtype(dtype)}")
    return jnp.zeros((*shape, num_kv_heads, head_dim), dtype), jnp.zeros((*shape, num_kv_heads, value_dim), dtype)


def checked_key_value(cache, key: Any, value: Any) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K V"]]:
    """New keys and values as arrays; ValueError for those that don't fit the slots of a cache."""
    key, value = jnp.asarray(key), jnp.asarray(value)
    for name, tokens, slots in (("key", key, cache.key), ("value", value, cache.value)):
        if 0 in tokens.shape[:2]:
            raise ValueError(f"{name} of shape {tokens.shape} holds no tokens; expected at least one")
        if tokens.ndim != 4 or tokens.shape[:2] != key.shape[:2] or tokens.shape[2:] != slots.shape[-2:]:
            num_heads, head_dim = slots.shape[-2:]
            raise ValueError(
                f"{name} must be [batch, tokens, {num_heads}, {head_dim}] for this cache, got {tokens.shape}"
            )
        if tokens.dtype != slots.dtype:
            raise ValueError(f"{name} is {tokens.dtype}, but the cache holds {slots.dtype}; cast it")
    return key, value


def token_counts(num_tokens: Any, num_new: int, lengths: Int[Array, " B"]) -> Int[Array, " B"]:
    """The number of each batch element's `num_new` tokens to write to a sequence of this length; by default all.

    A sequence gets no more than `MOST_TOKENS` in all.
    """
    if num_tokens is None:
        counts = jnp.full(lengths.shape, num_new, jnp.int32)
    else:
        given = integers("num_tokens", num_tokens, lengths.shape)
        if isinstance(given, np.ndarray) and ((given < 0) | (given > num_new)).any():
            raise ValueError(f"num_tokens={given.tolist()} must all be from 0 to {num_new}, the tokens that are given")
        counts = jnp.clip(given, 0, num_new).astype(jnp.int32)
    return jnp.minimum(counts, MOST_TOKENS - lengths)


def growth_on_host(
    lengths: Int[Array, " Z"], num_tokens: int | Sequence[int], sequences: Sequence[int] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The sequences that are to grow, their lengths and the tokens that each is to gain, read from the device."""
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
