"""What both forms of cache check of the tokens that are written to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped


class CacheFull(ValueError):
    """A cache has no room for the tokens of a step."""


def check_sizes(**sizes: int) -> None:
    """Checks that counts and dims are at least 1.

    Raises:
      ValueError: one isn't, by name.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")


def check_sequences(sequences: Any, num_sequences: int, *, distinct: bool = False) -> None:
    """Checks on the host that a cache has these sequences. Nothing is known yet of traced ones.

    Args:
      sequences: one number or several; None for all.
      distinct: whether no two may be the same.

    Raises:
      ValueError: the cache hasn't one of them, or one comes twice.
    """
    if sequences is None or isinstance(sequences, jax.core.Tracer):
        return
    numbers = np.asarray(sequences).reshape(-1)
    if ((numbers < 0) | (numbers >= num_sequences)).any():
        raise ValueError(f"sequences {numbers.tolist()} aren't all from 0 to {num_sequences - 1}, which the cache has")
    if distinct and len(np.unique(numbers)) < len(numbers):
        raise ValueError(f"sequences {numbers.tolist()} must differ; give a sequence's tokens in one row")


def which_sequences(
    sequences: Int[Array, " B"] | Sequence[int] | None, batch: int, num_sequences: int
) -> Int[Array, " B"] | None:
    """The sequence of the cache that each row of a call belongs to; None where row i is sequence i.

    Raises:
      ValueError: not one integer for each row.
    """
    if sequences is None:
        if batch != num_sequences:
            raise ValueError(
                f"{batch} rows for a cache of {num_sequences} sequences; say with `sequences` which one each row is"
            )
        return None
    sequences = jnp.asarray(sequences)
    if sequences.shape != (batch,) or not jnp.issubdtype(sequences.dtype, jnp.integer):
        raise ValueError(
            f"sequences must be integers [{batch}], one for each row, got {sequences.dtype}{sequences.shape}"
        )
    return sequences.astype(jnp.int32)


def of_rows(by_sequence: Shaped[Array, "Z ..."], sequences: Int[Array, " B"] | None) -> Shaped[Array, "B ..."]:
    """What belongs to each row's sequence."""
    return by_sequence if sequences is None else by_sequence[sequences]


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
        if tokens.ndim != 4 or tokens.shape[:2] != key.shape[:2] or tokens.shape[2:] != cells.shape[-2:]:
            num_heads, head_dim = cells.shape[-2:]
            raise ValueError(
                f"{name} must be [batch, tokens, {num_heads}, {head_dim}] for this cache, got {tokens.shape}"
            )
        if tokens.dtype != cells.dtype:
            raise ValueError(f"{name} is {tokens.dtype}, but the cache holds {cells.dtype}; cast it")


def num_tokens_of_rows(num_tokens: Int[Array, " B"] | None, batch: int, length: int) -> Int[Array, " B"]:
    """How many of a row's tokens count; by default all.

    Raises:
      ValueError: not one integer for each row.
    """
    if num_tokens is None:
        return jnp.full(batch, length, jnp.int32)
    num_tokens = jnp.asarray(num_tokens)
    if num_tokens.shape != (batch,) or not jnp.issubdtype(num_tokens.dtype, jnp.integer):
        raise ValueError(
            f"num_tokens must be integers [{batch}], one for each row, got {num_tokens.dtype}{num_tokens.shape}"
        )
    return num_tokens.astype(jnp.int32)


def growth_on_host(
    lengths: Int[Array, " Z"], num_tokens: int | Sequence[int], sequences: Sequence[int] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sequences, their lengths and the tokens that each is to gain, read from the device.

    Raises:
      ValueError: a traced cache, which the host can't read, or sequences that it hasn't.
    """
    if isinstance(lengths, jax.core.Tracer):
        raise ValueError("check_room reads the cache on the host; call it outside jax.jit")
    check_sequences(sequences, len(lengths), distinct=True)
    chosen = np.arange(len(lengths)) if sequences is None else np.asarray(sequences)
    return chosen, np.asarray(lengths)[chosen], np.broadcast_to(np.asarray(num_tokens), chosen.shape)
