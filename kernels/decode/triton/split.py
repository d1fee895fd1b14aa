"""A decoding step on the GPU: list the blocks to visit, attend to parts of the list, merge the parts.

Dimensions: B batch (each element one sequence), T new tokens of each, N query heads, K key/value heads (N = K·G),
J blocks of cells, P parts that a sequence's visited blocks are split into, V head dim of value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.backends.triton.tiles import launch
from kernels.backends.triton.tuning import TritonTiles, next_power_of_2
from kernels.decode.blocks import block_kinds
from kernels.decode.call import DecodeCall, DecodeInputs
from kernels.decode.tokens import numbered
from kernels.decode.triton.kernels import attend_part_kernel, list_blocks_kernel, merge_parts_kernel
from kernels.decode.triton.tuning import TritonDecodeTuning
from kernels.decode.unified import UnifiedCache

_LOG2_E = math.log2(math.e)
_SMALLEST_DOT = 16
# Kernels without tiles need the warps and stages alone.
_ANY_TILES = TritonTiles(_SMALLEST_DOT, _SMALLEST_DOT, num_warps=4, num_stages=1)
_LIST_CHUNK, _MERGED_ELEMENTS = 1024, 8192


def attend_split(
    inputs: DecodeInputs, call: DecodeCall, tuning: TritonDecodeTuning
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention of one call, by a resolved tuning."""
    tiles = tuning.tiles
    assert tiles is not None, "resolve settled them"
    kinds = block_kinds(call.mask, inputs.query_positions, inputs.cache.blocks(inputs.sequences))
    num_row_tiles = -(-call.num_new * call.group_size // tiles.block_q)
    num_parts = tuning.num_programs // (call.num_kv_heads * num_row_tiles * call.batch)
    num_parts = max(1, min(num_parts, call.num_blocks))
    start = functools.partial(launch, compute_capability=call.target.compute_capability, interpret=tuning.interpret)
    blocks, counts = _list_visits(kinds, call, start)
    output, lse = _attend_parts(inputs, call, blocks, counts, tiles, num_row_tiles, num_parts, start)
    return _merge_parts(output, lse, inputs.sinks, call, start)


def _width(head_dim: int) -> int:
    """Columns of a tile: a power of two."""
    return max(next_power_of_2(head_dim), _SMALLEST_DOT)


def _list_visits(
    kinds: Int[Array, "B J"], call: DecodeCall, start: Callable
) -> tuple[Int[Array, "B J"], Int[Array, "B 2"]]:
    """The blocks that each sequence reads, and how many: of FULL ones, which come first, and in all.

    `kernels.plan.list_rows` would sort; this is one kernel.
    """
    return start(
        list_blocks_kernel,
        (kinds.astype(jnp.int32),),
        (jax.ShapeDtypeStruct(kinds.shape, jnp.int32), jax.ShapeDtypeStruct((call.batch, 2), jnp.int32)),
        grid=(call.batch,),
        constants={"num_blocks": call.num_blocks, "chunk": min(next_power_of_2(call.num_blocks), _LIST_CHUNK)},
        tiles=_ANY_TILES,
    )


def _attend_parts(
    inputs: DecodeInputs,
    call: DecodeCall,
    blocks: Int[Array, "B J"],
    counts: Int[Array, "B 2"],
    tiles: TritonTiles,
    num_row_tiles: int,
    num_parts: int,
    start: Callable,
) -> tuple[Float[Array, "P B T N V"], Float[Array, "P B T N"]]:
    """Output and lse of each part; the output of a part without blocks, whose lse is −inf, is anything."""
    cache, cap = inputs.cache, call.logits_soft_cap
    first, last = _intervals(inputs, call)
    sequences = numbered(inputs.sequences, cache.num_sequences)
    # A slab's positions follow from its lengths; the kernel doesn't read the last two.
    whose = (cache.lengths,) * 3
    if isinstance(cache, UnifiedCache):
        whose = (cache.lengths, cache.table.positions, cache.table.owners)
    rows = (num_parts, call.batch, call.num_new, call.num_heads)
    return start(
        attend_part_kernel,
        (inputs.query, cache.key, cache.value, first, last, blocks, counts, sequences, *whose),
        (jax.ShapeDtypeStruct((*rows, call.value_dim), jnp.float32), jax.ShapeDtypeStruct(rows, jnp.float32)),
        grid=(call.num_kv_heads * num_row_tiles, num_parts, call.batch),
        constants={
            "num_blocks": call.num_blocks,
            "block_size": call.block_size,
            "slab_capacity": None if isinstance(cache, UnifiedCache) else cache.capacity,
            "num_words": whose[2].shape[-1],
            "num_new": call.num_new,
            "num_heads": call.num_heads,
            "num_kv_heads": call.num_kv_heads,
            "group_size": call.group_size,
            "head_dim": call.head_dim,
            "value_dim": call.value_dim,
            "interval_heads": first.shape[-1],
            "to_cap": None if cap is None else call.scale / cap,
            "to_log2": _LOG2_E * (call.scale if cap is None else cap),
            "tile_rows": tiles.block_q,
            "tile_cells": tiles.block_kv,
            "block_h": _width(call.head_dim),
            "block_v": _width(call.value_dim),
        },
        tiles=tiles,
    )


def _intervals(inputs: DecodeInputs, call: DecodeCall) -> tuple[Int[Array, "B T n"], Int[Array, "B T n"]]:
    """The interval of positions that each query allows, `first ≤ … ≤ last`; n is 1 unless heads differ."""
    shape = inputs.query_positions.shape
    bounds = [mask.row_interval(inputs.query_positions) for mask in call.mask.for_each_head(call.mask.num_heads or 1)]
    first, last = (
        jnp.stack([jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in side], axis=-1)
        for side in zip(*bounds, strict=True)
    )
    return first, last


def _merge_parts(
    part_output: Float[Array, "P B T N V"],
    part_lse: Float[Array, "P B T N"],
    sinks: Float[Array, " N"] | None,
    call: DecodeCall,
    start: Callable,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse of all parts together, sinks included."""
    num_parts, *rows, _ = part_output.shape
    return start(
        merge_parts_kernel,
        (part_output, part_lse, part_lse if sinks is None else sinks.astype(jnp.float32)),
        (
            jax.ShapeDtypeStruct((*rows, call.value_dim), call.dtype),
            jax.ShapeDtypeStruct(tuple(rows), jnp.float32),
        ),
        grid=(math.prod(rows),),
        constants={
            "num_parts": num_parts,
            "num_rows": math.prod(rows),
            "num_heads": call.num_heads,
            "value_dim": call.value_dim,
            "has_sinks": sinks is not None,
            "chunk": min(next_power_of_2(num_parts), _MERGED_ELEMENTS // _width(call.value_dim)),
            "block_v": _width(call.value_dim),
        },
        tiles=_ANY_TILES,
    )
