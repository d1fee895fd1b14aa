"""An attention call, split into what is traced and what is static.

A backend is two functions of both parts, `fwd` and `bwd`. It may refuse a call by its static part alone.

Dimensions: B batch, T query length, S key/value length, N query heads, K key/value heads (N = K·G),
H head dim of query and key, V head dim of value.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels.arguments.bounds import checked_bounds
from kernels.arguments.static_numbers import checked_scale, checked_soft_cap
from kernels.arguments.token_integers import checked_tokens, int32_positions, int32_segment_ids
from kernels.masks import Bounds, FullMask, Mask, require_mask
from kernels.masks.bounds import BoundName
from kernels.tracing.mesh_axes import vary, varying_axes
from kernels.tracing.number_types import at_least_float32
from kernels.tracing.target import Target

FLOATING_DTYPES = tuple(map(jnp.dtype, ("float16", "bfloat16", "float32", "float64")))
"""Of queries, keys and values."""


class AttentionInputs(NamedTuple):
    """The traced arguments. Segment ids are given for both sides or neither, and so are positions.

    Two are for `kernels.context` alone. `token_order`: the index in the sequence of each token, if ranks hold tokens in
    another order. `num_keys`: the number of keys at the beginning of each sequence that are present. No query attends
    to the keys after them. The first `longest_tile` of these (`kernels.backends.Backend`) are finite. The others may
    hold anything, and a backend may leave their gradients unwritten.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    sinks: Float[Array, " N"] | None = None
    query_segment_ids: Int[Array, "B T"] | None = None
    key_value_segment_ids: Int[Array, "B S"] | None = None
    query_positions: Int[Array, "B T"] | None = None
    key_value_positions: Int[Array, "B S"] | None = None
    token_order: Int[Array, "B T"] | None = None
    num_keys: Int[Array, "B 1"] | None = None
    bounds: Bounds | None = None


class AttentionCall(NamedTuple):
    """The static description. Hashable. The choice of a backend and the plans read nothing else."""

    batch: int
    q_len: int
    kv_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: np.dtype
    mask: Mask
    scale: float
    logits_soft_cap: float | None
    has_sinks: bool
    has_segment_ids: bool
    has_query_positions: bool
    has_key_value_positions: bool
    return_lse: bool
    target: Target
    varying_axes: tuple[str, ...] = ()
    """Mesh axes over which the inputs differ, inside `jax.shard_map` with `check_vma=True`."""
    position_run: int = 1
    """Positions count up by one within each aligned run of `position_run` tokens, of queries and of keys."""
    bounds: tuple[BoundName, ...] = ()
    """Names of the bounds that are given."""
    task: Literal["attention"] = "attention"

    @property
    def has_positions(self) -> bool:
        """True if either side's positions are traced; the other side's then count from 0."""
        return self.has_query_positions or self.has_key_value_positions

    @property
    def softmax_dtype(self) -> np.dtype:
        """Type of the logits, the softmax and all sums: float32, or float64 for float64 inputs."""
        return at_least_float32(self.dtype)

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


class Cotangent(NamedTuple):
    """The input of a backward pass.

    Attributes:
      d_output: the output's gradient, in the call's dtype.
      lse: over all keys of a query, −inf where it attends to nothing; in the softmax's dtype, as `delta` is.
      delta: rowsum(dO∘O), less the gradient of lse itself.
    """

    d_output: Float[Array, "B T N V"]
    lse: Float[Array, "B T N"]
    delta: Float[Array, "B T N"]

    @staticmethod
    def of(
        output: Float[Array, "B T N V"],
        lse: Float[Array, "B T N"],
        d_output: Float[Array, "B T N V"],
        d_lse: Float[Array, "B T N"] | None = None,
    ) -> Cotangent:
        """The cotangent of an output and its lse; the gradients may be NumPy's."""
        d_output = jnp.asarray(d_output)
        delta = (output.astype(lse.dtype) * d_output.astype(lse.dtype)).sum(-1)
        if d_lse is not None:
            delta -= jnp.where(lse != -jnp.inf, jnp.asarray(d_lse, lse.dtype), 0)
        return Cotangent(d_output, lse, delta)

    def by_head(self) -> tuple[Float[Array, "B N T"], Float[Array, "B N T"]]:
        """lse and delta, with each head's numbers side by side."""
        return self.lse.swapaxes(1, 2), self.delta.swapaxes(1, 2)


Gradients = tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K V"]]


def make_call(
    query,
    key,
    value,
    mask: Mask | None,
    *,
    query_segment_ids=None,
    key_value_segment_ids=None,
    query_positions=None,
    key_value_positions=None,
    bounds: Bounds | None = None,
    sequence_length: int | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks=None,
    return_lse: bool = False,
    device: jax.Device | None = None,
) -> tuple[AttentionInputs, AttentionCall]:
    """The arguments of `dot_product_attention` in one form; ValueError for the first that doesn't fit.

    `sequence_length` is that of the sequences that the bounds are indices in, if these are longer than the arrays.
    """
    query, key, value = _checked_matrices(query, key, value)
    batch, q_len, num_heads, head_dim = query.shape
    _, kv_len, num_kv_heads, value_dim = value.shape
    has_query_positions, has_key_value_positions = query_positions is not None, key_value_positions is not None
    has_positions = has_query_positions or has_key_value_positions
    mask = checked_mask(mask, num_heads)
    if not has_positions:
        mask.check_lengths(q_len, kv_len)
    scale, logits_soft_cap = checked_scale(scale), checked_soft_cap(logits_soft_cap)
    sinks = checked_sinks(sinks, num_heads)

    if (query_segment_ids is None) != (key_value_segment_ids is None):
        raise ValueError(
            "query_segment_ids and key_value_segment_ids come together; for self-attention pass the same array twice"
        )
    if query_segment_ids is not None:
        query_segment_ids, key_value_segment_ids = int32_segment_ids(
            checked_tokens("query_segment_ids", query_segment_ids, batch, q_len),
            checked_tokens("key_value_segment_ids", key_value_segment_ids, batch, kv_len),
        )
    if has_positions:
        query_positions = checked_positions("query_positions", query_positions, batch, q_len)
        key_value_positions = checked_positions("key_value_positions", key_value_positions, batch, kv_len)

    bounds = checked_bounds(bounds, batch, q_len, kv_len, sequence_length)

    inputs = AttentionInputs(
        query,
        key,
        value,
        sinks,
        query_segment_ids,
        key_value_segment_ids,
        query_positions,
        key_value_positions,
        bounds=bounds,
    )
    axes = varying_axes(inputs)
    call = AttentionCall(
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=query.dtype,
        mask=mask,
        scale=1 / math.sqrt(head_dim) if scale is None else scale,
        logits_soft_cap=logits_soft_cap,
        has_sinks=sinks is not None,
        has_segment_ids=query_segment_ids is not None,
        has_query_positions=has_query_positions,
        has_key_value_positions=has_key_value_positions,
        return_lse=return_lse,
        target=Target.of(device),
        varying_axes=axes,
        bounds=() if bounds is None else bounds.given,
    )
    return vary(inputs, axes), call


def _checked_matrices(query, key, value) -> tuple[Array, Array, Array]:
    """Query, key and value as arrays that fit together."""
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 4:
            raise ValueError(f"{name} must be [batch, length, heads, head_dim], got shape {array.shape}")
        if 0 in array.shape:
            raise ValueError(f"{name} of shape {array.shape} has no elements")
        if array.dtype != query.dtype or array.dtype not in FLOATING_DTYPES:
            raise ValueError(
                f"query, key and value must share one dtype of {', '.join(map(str, FLOATING_DTYPES))}, got "
                f"{query.dtype}, {key.dtype}, {value.dtype}; cast them"
            )
    batch, _, num_heads, head_dim = query.shape
    _, kv_len, num_kv_heads, _ = value.shape
    if key.shape != (batch, kv_len, num_kv_heads, head_dim) or value.shape[0] != batch:
        raise ValueError(
            f"query {query.shape}, key {key.shape}, value {value.shape} don't fit together; expected "
            "[B, T, N, H], [B, S, K, H], [B, S, K, V]"
        )
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
    return query, key, value


def checked_mask(mask: Mask | None, num_heads: int) -> Mask:
    """The mask that a call of `num_heads` query heads means: `FullMask` for None, one mask where all heads agree."""
    if mask is None:
        return FullMask()
    require_mask(mask)
    distinct = mask.distinct_heads(num_heads)
    mask.check_functions()
    return next(iter(distinct)) if len(distinct) == 1 else mask


def checked_sinks(sinks, num_heads: int) -> Float[Array, " N"] | None:
    """The sinks as an array, or None; refuses what isn't one floating logit for each query head."""
    if sinks is None:
        return None
    sinks = jnp.asarray(sinks)
    if sinks.shape != (num_heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(
            f"sinks must be floating [{num_heads}], one logit per query head, got {sinks.dtype}{sinks.shape}"
        )
    return sinks


def checked_positions(name: str, positions, batch: int, length: int) -> Int[Array, "B L"]:
    """Positions as int32; by default they count from 0."""
    positions = jnp.arange(length, dtype=jnp.int32) if positions is None else positions
    return int32_positions(name, checked_tokens(name, positions, batch, length))
