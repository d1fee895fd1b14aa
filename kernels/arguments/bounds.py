"""Bounds as int32 that lie within the sequence: checked and clipped, never cut."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kernels.arguments.token_integers import checked_tokens
from kernels.masks.bounds import OF_QUERIES, Bounds


def checked_bounds(
    bounds: Any, batch: int, q_len: int, kv_len: int, sequence_length: int | None = None
) -> Bounds | None:
    """Bounds as int32 `[B, L]`, clipped to the sequence, or None if there are none.

    Args:
      bounds, batch, q_len, kv_len: of the call.
      sequence_length: of the sequences that the bounds are indices in, if the call has only a part of their tokens.

    Raises:
      ValueError: something else, or bounds of another shape or type.
    """
    if bounds is None:
        return None
    if not isinstance(bounds, Bounds):
        raise ValueError(f"bounds must be kernels.Bounds, got {type(bounds).__name__}")
    given = {}
    for name in bounds.given:
        own, other = (q_len, kv_len) if name in OF_QUERIES else (kv_len, q_len)
        given[name] = _clipped(
            checked_tokens(f"bounds.{name}", getattr(bounds, name), batch, own), sequence_length or other
        )
    return Bounds(**given) if given else None


def _clipped(bound: Any, length: int) -> Int[jax.Array, "B L"]:
    """The bound as int32: below 0 and past the length it says the same as at these."""
    dtype = bound.dtype
    highest = min(length, int(jnp.iinfo(dtype).max))
    return jnp.asarray(bound.clip(dtype.type(0), dtype.type(highest)).astype(np.int32))
