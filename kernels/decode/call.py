"""A decoding call, split into what is traced and what is static.

Dimensions: B batch (each element one sequence), T new tokens of each, N query heads, K key/value heads (N = K·G),
H head dim of query and key, V head dim of value.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels.arguments.static_numbers import checked_scale, checked_soft_cap
from kernels.call import checked_mask, checked_positions, checked_sinks
from kernels.decode.blocks import BlockSummary
from kernels.decode.slab import SlabCache
from kernels.decode.tokens import sequences_of_batch, take_sequences
from kernels.decode.tree import SlotTree, TokenTree, checked_tree
from kernels.decode.unified import UnifiedCache
from kernels.masks import Mask
from kernels.tracing.mesh_axes import vary, varying_axes
from kernels.tracing.number_types import at_least_float32
from kernels.tracing.target import Target

Cache = SlabCache | UnifiedCache
OutputAndLse = tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]


class DecodeInputs(NamedTuple):
    """The traced arguments. Without `sequences`, batch element i is sequence i."""

    query: Float[Array, "B T N H"]
    cache: Cache
    sequences: Int[Array, " B"] | None
    query_positions: Int[Array, "B T"]
    sinks: Float[Array, " N"] | None
    tree: SlotTree | None = None

    def blocks(self) -> BlockSummary:
        """The summary of each sequence's blocks."""
        return self.cache.blocks(self.sequences) if self.tree is None else self.tree.blocks(self.cache.block_size)


class DecodeCall(NamedTuple):
    """The static description: hashable, all that the choice of a backend looks at.

    Each sequence may look at `num_blocks` blocks, of `num_slots` slots in all: those of its own slab, or with
    `one_slab` those that all sequences share.
    """

    batch: int
    num_new: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: np.dtype
    mask: Mask
    scale: float
    logits_soft_cap: float | None
    block_size: int
    num_blocks: int
    num_slots: int
    one_slab: bool
    target: Target
    varying_axes: tuple[str, ...] = ()
    """Mesh axes over which the inputs differ, inside `jax.shard_map` with `check_vma=True`."""
    task: Literal["decoding"] = "decoding"

    @property
    def softmax_dtype(self) -> np.dtype:
        """Type of the logits, the softmax and all sums: float32, or float64 for float64 inputs."""
        return at_least_float32(self.dtype)

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


def make_decode_call(
    query,
    cache: Cache,
    mask: Mask | None,
    *,
    sequences,
    query_positions,
    scale: float | None,
    logits_soft_cap: float | None,
    sinks,
    tree: TokenTree | None = None,
    device: jax.Device | None = None,
) -> tuple[DecodeInputs, DecodeCall]:
    """The arguments of `decode_attention` in one form; ValueError for the first that doesn't fit."""
    if not isinstance(cache, SlabCache | UnifiedCache):
        raise ValueError(f"cache must be a SlabCache or a UnifiedCache, got {type(cache).__name__}")
    query = jnp.asarray(query)
    if query.ndim != 4 or 0 in query.shape:
        raise ValueError(f"query must be [batch, new tokens, heads, head_dim], got shape {query.shape}")
    batch, num_new, num_heads, head_dim = query.shape
    num_kv_heads, cache_head_dim = cache.key.shape[-2:]
    if head_dim != cache_head_dim or num_heads % num_kv_heads:
        raise ValueError(
            f"query {query.shape} doesn't fit a cache of {num_kv_heads} key/value heads of {cache_head_dim}; expected "
            f"[B, T, a multiple of {num_kv_heads}, {cache_head_dim}]"
        )
    if query.dtype != cache.key.dtype:
        raise ValueError(f"query is {query.dtype}, but the cache holds {cache.key.dtype}; cast it")
    mask = checked_mask(mask, num_heads)
    scale, logits_soft_cap = checked_scale(scale), checked_soft_cap(logits_soft_cap)
    sinks = checked_sinks(sinks, num_heads)
    chosen = sequences_of_batch(sequences, batch, cache.num_sequences)
    if query_positions is None:
        query_positions = (
            take_sequences(cache.lengths, chosen)[:, None] - num_new + jnp.arange(num_new, dtype=jnp.int32)
        )
    else:
        query_positions = checked_positions("query_positions", query_positions, batch, num_new)
    inputs = DecodeInputs(query, cache, chosen, query_positions, sinks)
    if tree is not None:
        inputs = _with_tree(inputs, tree)
    axes = varying_axes(inputs)
    call = DecodeCall(
        batch=batch,
        num_new=num_new,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=cache.value.shape[-1],
        dtype=query.dtype,
        mask=mask,
        scale=1 / math.sqrt(head_dim) if scale is None else scale,
        logits_soft_cap=logits_soft_cap,
        block_size=cache.block_size,
        num_blocks=cache.num_blocks,
        num_slots=cache.capacity,
        one_slab=isinstance(cache, UnifiedCache),
        target=Target.of(device),
        varying_axes=axes,
    )
    return vary(inputs, axes), call


def _with_tree(inputs: DecodeInputs, tree: TokenTree) -> DecodeInputs:
    """The inputs with a tree, and positions along its branches."""
    cache = inputs.cache
    if not isinstance(cache, SlabCache):
        raise ValueError(
            f"a {type(cache).__name__} takes no tree; use a SlabCache, or give each branch a sequence of its own that "
            "starts with the prompt's tokens (share)"
        )
    tree = checked_tree(tree, *inputs.query.shape[:2])
    slots = SlotTree.of(tree, inputs.query_positions, *cache.slots(inputs.sequences))
    return inputs._replace(query_positions=tree.positions(inputs.query_positions), tree=slots)
