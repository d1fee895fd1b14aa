"""Decoding on NVIDIA GPUs: Triton kernels, called through jax-triton, that split each sequence's visited blocks.

They list the blocks to visit, attend to parts of the list, and merge the parts by their log-sum-exps, as in
Flash-Decoding.

Dimensions: B batch (each element one sequence), T new tokens of each, N query heads, K key/value heads (N = K·G),
J blocks of slots, P parts that a sequence's visited blocks are split into, V head dim of value.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from kernels.backends.triton.support import reason_in_call
from kernels.backends.triton.tuning import TritonDecodeTuning, TritonTiles, next_power_of_2, padded_head_dim
from kernels.decode.blocks import block_tile_kinds
from kernels.decode.call import DecodeCall, DecodeInputs, OutputAndLse
from kernels.decode.tokens import numbered
from kernels.decode.triton.tuning import SMALLEST_DOT, resolve
from kernels.decode.unified import UnifiedCache

_LOG2_E = math.log2(math.e)
# Kernels without tiles need the warps and stages alone.
_ANY_TILES = TritonTiles(SMALLEST_DOT, SMALLEST_DOT, num_warps=4, num_stages=1)
_LIST_CHUNK, _MERGED_ELEMENTS = 1024, 8192


def unsupported_reason(call: DecodeCall, tuning: TritonDecodeTuning | None = None) -> str | None:
    """Why the kernels can't serve the call, or None if they can."""
    if call.block_size % SMALLEST_DOT:
        return f"takes a block_size that is a multiple of {SMALLEST_DOT}, not {call.block_size}"
    if tuning is not None and tuning.tiles is not None and call.block_size % tuning.tiles.block_kv:
        return f"takes tiles.block_kv that divides block_size={call.block_size}, not {tuning.tiles.block_kv}"
    return reason_in_call(call, interpreted=tuning is not None and tuning.interpret)


def attend(inputs: DecodeInputs, call: DecodeCall, tuning: TritonDecodeTuning | None = None) -> OutputAndLse:
    """Attention of one call. See `kernels.decode_attention`."""
    # They import Triton, which isn't installed everywhere.
    from kernels.backends.triton.tiles import launch
    from kernels.decode.triton.kernels import attend_part_kernel, list_blocks_kernel, merge_parts_kernel

    tuning = resolve(tuning, call)
    cache, sinks, cap, tiles = inputs.cache, inputs.sinks, call.logits_soft_cap, tuning.tiles
    assert tiles is not None, "resolve settled them"
    num_row_tiles = -(-call.num_new * call.group_size // tiles.block_q)
    num_parts = tuning.num_programs // (call.num_kv_heads * num_row_tiles * call.batch)
    num_parts = max(1, min(num_parts, call.num_blocks))
    block_v = padded_head_dim(call.value_dim)
    start = functools.partial(launch, compute_capability=call.target.compute_capability, interpret=tuning.interpret)

    tile_kinds = block_tile_kinds(call.mask, inputs.query_positions, inputs.blocks())
    # `kernels.plan.list_rows` would sort; this is one kernel. It counts FULL blocks, which come first, and all: [B, 2].
    blocks, counts = start(
        list_blocks_kernel,
        (tile_kinds.astype(jnp.int32),),
        (jax.ShapeDtypeStruct(tile_kinds.shape, jnp.int32), jax.ShapeDtypeStruct((call.batch, 2), jnp.int32)),
        grid=(call.batch,),
        constants={"num_blocks": call.num_blocks, "chunk": min(next_power_of_2(call.num_blocks), _LIST_CHUNK)},
        tiles=_ANY_TILES,
    )

    # The interval of positions that each query allows, `first ≤ … ≤ last`: [B, T, 1], or [B, T, N] if heads differ.
    bounds = [mask.row_interval(inputs.query_positions) for mask in call.mask.for_each_head(call.mask.num_heads or 1)]
    first, last = (jnp.stack(side, axis=-1) for side in zip(*bounds, strict=True))
    sequences = numbered(inputs.sequences, cache.num_sequences)
    # A slab's positions follow from its lengths; the kernel doesn't read the last two.
    slot_table = (cache.lengths,) * 3
    if isinstance(cache, UnifiedCache):
        slot_table = (cache.lengths, cache.table.positions, cache.table.owners)
    elif inputs.tree is not None:
        slot_table = (cache.lengths, inputs.tree.positions, inputs.tree.query_sets())
    rows = (call.batch, call.num_new, call.num_heads)
    parts = (num_parts, *rows)
    # The output of a part without blocks, whose lse is −inf, is anything.
    part_output, part_lse = start(
        attend_part_kernel,
        (inputs.query, cache.key, cache.value, first, last, blocks, counts, sequences, *slot_table),
        (jax.ShapeDtypeStruct((*parts, call.value_dim), jnp.float32), jax.ShapeDtypeStruct(parts, jnp.float32)),
        grid=(call.num_kv_heads * num_row_tiles, num_parts, call.batch),
        constants={
            "num_blocks": call.num_blocks,
            "block_size": call.block_size,
            "slab_capacity": None if call.one_slab else call.num_slots,
            "num_words": slot_table[2].shape[-1],
            "has_tree": inputs.tree is not None,
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
            "tile_slots": tiles.block_kv,
            "block_h": padded_head_dim(call.head_dim),
            "block_v": block_v,
        },
        tiles=tiles,
    )

    output, lse = start(
        merge_parts_kernel,
        (part_output, part_lse, part_lse if sinks is None else sinks.astype(jnp.float32)),
        (jax.ShapeDtypeStruct((*rows, call.value_dim), call.dtype), jax.ShapeDtypeStruct(rows, jnp.float32)),
        grid=(math.prod(rows),),
        constants={
            "num_parts": num_parts,
            "num_rows": math.prod(rows),
            "num_heads": call.num_heads,
            "value_dim": call.value_dim,
            "has_sinks": sinks is not None,
            "chunk": min(next_power_of_2(num_parts), _MERGED_ELEMENTS // block_v),
            "block_v": block_v,
        },
        tiles=_ANY_TILES,
    )
    return output, lse
