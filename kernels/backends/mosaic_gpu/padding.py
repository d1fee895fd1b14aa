"""Query, key and value padded: to head dims that the kernels take, and to lengths of whole tiles."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.call import AttentionInputs


def padded_head_dim(head_dim: int) -> int:
    """The head dim that the kernels work at: 32 or a multiple of 64."""
    return 32 if head_dim <= 32 else -(-head_dim // 64) * 64


def pad_matrices(
    inputs: AttentionInputs, q_multiple: int, kv_multiple: int, head_dim: int, value_dim: int
) -> tuple[Array, Array, Array]:
    """Query, key and value, padded to multiples of these lengths and to these head dims."""
    query, key = pad_matrix(inputs.query, q_multiple, head_dim), pad_matrix(inputs.key, kv_multiple, head_dim)
    return query, key, pad_matrix(inputs.value, kv_multiple, value_dim)


def pad_matrix(x: Float[Array, "B L N H"], multiple: int, width: int) -> Float[Array, "B L2 N H2"]:
    """Appends zeros to the length, up to a multiple, and to the head dim, up to `width`."""
    length, head_dim = x.shape[1], x.shape[3]
    padding = [(0, 0), (0, -length % multiple), (0, 0), (0, width - head_dim)]
    return x if not any(after for _, after in padding) else jnp.pad(x, padding)
