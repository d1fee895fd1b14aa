"""Segment ids and positions as int32, as kernels compare them: renumbered or refused where they don't fit, never cut.

JAX cuts NumPy's 64-bit integers to 32 bits where it converts them (unless `jax_enable_x64` is set). NumPy arrays are
therefore checked before JAX gets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kernels.masks.intervals import FIRST_POSITION


def checked_tokens(name: str, tokens: Any, batch: int, length: int) -> Int[Array | np.ndarray, "B L"]:
    """Integers of any type, `[B, L]` or `[L]`, as `[B, L]`; refuses anything else by its name."""
    tokens = _uncut(tokens)
    if tokens.shape not in ((length,), (batch, length)) or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers [{batch}, {length}] or [{length}], got {tokens.dtype}{tokens.shape}")
    xp = jnp if isinstance(tokens, jax.Array) else np
    return xp.broadcast_to(tokens, (batch, length))


def segment_ids_of_lengths(
    lengths: Int[Array | np.ndarray, " B"], length: int, *, padding: int = 0
) -> Int[Array, "B L"]:
    """Segment ids of sequences that are padded at their ends: 1 for each one's tokens, `padding` after them.

    With another `padding` for queries than for keys, what pads attends to nothing: its output is 0, as for
    `jax.nn.dot_product_attention` with `query_seq_lengths` and `key_value_seq_lengths`.

    Args:
      lengths: tokens of each sequence; the others of its row are padding.
      length: L, of the rows.
      padding: id of the padding.

    Raises:
      ValueError: lengths that aren't integers `[B]`.

    >>> segment_ids_of_lengths(jnp.array([3, 1]), 4).tolist()
    [[1, 1, 1, 0], [1, 0, 0, 0]]
    """
    lengths = _uncut(lengths)
    if lengths.ndim != 1 or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths must be integers [B], one for each sequence, got {lengths.dtype}{lengths.shape}")
    shown = jnp.asarray(lengths.clip(0, length).astype(np.int32))
    return jnp.where(jnp.arange(length, dtype=jnp.int32) < shown[:, None], 1, padding).astype(jnp.int32)


def int32_positions(name: str, positions: Any) -> Int[Array, ...]:
    """Positions as int32; refuses values beyond them, and traced positions of a type that could hold such."""
    positions = _uncut(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {positions.dtype}{positions.shape}")
    if _is_wide(positions.dtype) and isinstance(positions, jax.Array):
        raise ValueError(
            f"{name} is traced {positions.dtype}, whose values may be beyond int32; "
            f"pass {name}.astype(jnp.int32) if they aren't"
        )
    if _is_wide(positions.dtype) and not _all_fit(positions, np.int32):
        raise ValueError(
            f"{name} reaches from {positions.min()} to {positions.max()}, beyond int32; subtract a number "
            "from all positions of the call, query's and key's alike"
        )
    if isinstance(positions, np.ndarray) and positions.size and positions.min() < FIRST_POSITION:
        raise ValueError(
            f"{name} reaches down to {positions.min()}, below {FIRST_POSITION}, where a mask's reach leaves int32; add "
            "a number to all positions of the call, query's and key's alike"
        )
    return jnp.asarray(positions.astype(np.int32))


def int32_segment_ids(
    query_ids: Int[Array | np.ndarray, "B T"], key_value_ids: Int[Array | np.ndarray, "B S"]
) -> tuple[Int[Array, "B T"], Int[Array, "B S"]]:
    """Segment ids as int32, equal where they were equal: unchanged if they fit, else numbered anew on the host.

    Raises:
      ValueError: ids that may be beyond int32, if the host doesn't know the values of both sides.
    """
    sides = query_ids, key_value_ids
    known = [ids for ids in map(_on_host, sides) if ids is not None]
    fits = all(_all_fit(ids, np.int32) for ids in known)
    is_traced_wide = any(_is_wide(ids.dtype) and _on_host(ids) is None for ids in sides)
    if is_traced_wide or (not fits and len(known) < len(sides)):
        raise ValueError(
            f"query_segment_ids are {query_ids.dtype} and key_value_segment_ids {key_value_ids.dtype}, which may hold "
            "ids beyond int32, and some are traced; pass both as int32, numbered anew outside jax.jit "
            "(np.unique(ids, return_inverse=True)) if they don't fit"
        )
    numbered = sides if fits else _numbered(known)
    first, second = (jnp.asarray(ids.astype(np.int32)) for ids in numbered)
    return first, second


def _numbered(sides: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Replaces each id by the index of its first appearance: it rises along a sequence, so tiles have narrow ranges."""
    # NumPy makes floats of uint64 and int64 together, but compares Python's integers exactly.
    common = np.result_type(*sides)
    ids = np.concatenate([side.reshape(-1).astype(common if common.kind in "iu" else object) for side in sides])
    _, first, number = np.unique(ids, return_index=True, return_inverse=True)
    numbered = first[number]
    return numbered[: sides[0].size].reshape(sides[0].shape), numbered[sides[0].size :].reshape(sides[1].shape)


def _uncut(integers: Any) -> jax.Array | np.ndarray:
    """The integers as an array that keeps 64 bits: JAX's if its type fits int32 or it is traced, else NumPy's."""
    if isinstance(integers, jax.Array) and not _is_wide(integers.dtype):
        return integers
    # They are read now: under jit, an operation of JAX's would trace values that are known.
    known = _on_host(integers)
    return integers if known is None else known


def _is_wide(dtype: np.dtype) -> bool:
    """True for an integer type with values beyond int32."""
    return jnp.issubdtype(dtype, jnp.integer) and not np.can_cast(dtype, np.int32)


def _all_fit(values: np.ndarray, into) -> bool:
    whole = jnp.iinfo(into)
    return not values.size or (int(whole.min) <= int(values.min()) and int(values.max()) <= int(whole.max))


def _on_host(tokens: Int[Array | np.ndarray, ...]) -> np.ndarray | None:
    """The values if the host knows them, else None."""
    if isinstance(tokens, jax.core.Tracer) or not getattr(tokens, "is_fully_addressable", True):
        return None
    return np.asarray(tokens)
