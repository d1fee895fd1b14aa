"""A decoding step on the GPU: list the blocks to visit, attend to parts of the list, put the parts together.

Dimensions: B rows of the call (each one sequence's), T new tokens of each, N query heads, K key/value heads
(N = K·G), J blocks of cells, P parts that a sequence's visited blocks are split into, V head dim of value.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.backends.triton.launch import launch
from kernels.backends.triton.tuning import TritonTiles, next_power_of_2
from kernels.decode.blocks import Visits, block_kinds
from kernels.decode.call import DecodeCall, DecodeInputs
from kernels.decode.tokens import numbers_of_rows
from kernels.decode.triton.kernels import attend_part_kernel, list_blocks_kernel, put_together_kernel
from kernels.decode.unified import UnifiedCache

_LOG2_E = math.log2(math.e)
# The smallest side of a matrix product, and rows of a tile beyond which registers run out.
_SMALLEST_DOT, _MOST_ROWS = 16, 64
# The fastest of 32 to 128 cells in a tile and 264 to 1,584 programs, for 1 sequence of 32,768 and 8 of 8,192 tokens
# with 12 heads of 64, and 1 of 32,768 with 8 of 128 (H200, 2026-11-21): four small programs on each multiprocessor.
_TILE_CELLS = 32
_NUM_PROGRAMS = 528
# Where sequences share so few cells, a program has one block or two, and half the warps are faster. Chosen on an H200
# (2026-11-22) for 8 sequences of 512 tokens, 12 heads of 64: `python -m experiments.benchmarks.decode --sequences 8
# --prompts 512`.
_FEW_SHARED_CELLS = 5120
_LIST_CHUNK, _PUT_TOGETHER_ELEMENTS = 1024, 8192


def attend_split(
    inputs: DecodeInputs,
    call: DecodeCall,
    tiles: TritonTiles | None = None,
    *,
    num_programs: int = _NUM_PROGRAMS,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention of one call.

    Args:
      inputs, call: the call.
      tiles: rows and cells of a tile, warps and stages; None for the best known.
      num_programs: how many programs to split the call into, at most, if there's at least one for each head.
      interpret: run the kernels in Triton's interpreter, on the host.
    """
    tiles = default_tiles(call) if tiles is None else tiles
    kinds = block_kinds(call.mask, inputs.query_positions, inputs.cache.blocks(inputs.sequences))
    visits = _list_visits(kinds, call, interpret=interpret)
    num_row_tiles = -(-call.num_new * call.group_size // tiles.block_q)
    num_parts = num_programs // (call.num_kv_heads * num_row_tiles * call.batch)
    num_parts = max(1, min(num_parts, call.num_blocks))
    output, lse = _attend_parts(inputs, call, visits, tiles, num_row_tiles, num_parts, interpret=interpret)
    return _put_together(output, lse, inputs.sinks, call, interpret=interpret)


def default_tiles(call: DecodeCall) -> TritonTiles:
    """Tiles of a call: all rows that read one key/value head, as far as the registers hold them."""
    rows = min(max(next_power_of_2(call.num_new * call.group_size), _SMALLEST_DOT), _MOST_ROWS)
    power_of_2_in_block = call.block_size & -call.block_size
    rows_per_warp = 16 if call.one_slab and call.num_cells <= _FEW_SHARED_CELLS else 8
    return TritonTiles(rows, min(_TILE_CELLS, power_of_2_in_block), num_warps=rows // rows_per_warp, num_stages=3)


def _width(head_dim: int) -> int:
    """Columns of a tile: a power of two."""
    return max(next_power_of_2(head_dim), _SMALLEST_DOT)


def _list_visits(kinds: Int[Array, "B J"], call: DecodeCall, *, interpret: bool) -> Visits:
    """As `kernels.decode.blocks.list_visits`, in one kernel: XLA would sort."""
    blocks, counts = launch(
        list_blocks_kernel,
        (kinds.astype(jnp.int32),),
        (jax.ShapeDtypeStruct(kinds.shape, jnp.int32), jax.ShapeDtypeStruct((call.batch, 2), jnp.int32)),
        grid=(call.batch,),
        constants={"num_blocks": call.num_blocks, "chunk": min(next_power_of_2(call.num_blocks), _LIST_CHUNK)},
        tiles=TritonTiles(_SMALLEST_DOT, _SMALLEST_DOT, num_warps=4, num_stages=1),
        compute_capability=call.target.compute_capability,
        interpret=interpret,
    )
    return Visits(blocks, counts)


def _attend_parts(
    inputs: DecodeInputs,
    call: DecodeCall,
    visits: Visits,
    tiles: TritonTiles,
    num_row_tiles: int,
    num_parts: int,
    *,
    interpret: bool,
) -> tuple[Float[Array, "P B T N V"], Float[Array, "P B T N"]]:
    """Output and lse of each part; the output of a part without blocks, whose lse is −inf, is anything."""
    cache, cap = inputs.cache, call.logits_soft_cap
    first, last = _intervals(inputs, call)
    sequences = numbers_of_rows(inputs.sequences, cache.num_sequences)
    # A slab's positions follow from its lengths; the kernel doesn't read the last two.
    whose = (cache.lengths,) * 3
    if isinstance(cache, UnifiedCache):
        whose = (cache.lengths, cache.table.positions, cache.table.owners)
    rows = (num_parts, call.batch, call.num_new, call.num_heads)
    output, lse = launch(
        attend_part_kernel,
        (inputs.query, cache.key, cache.value, first, last, visits.blocks, visits.counts, sequences, *whose),
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
        compute_capability=call.target.compute_capability,
        interpret=interpret,
    )
    return output, lse


def _intervals(inputs: DecodeInputs, call: DecodeCall) -> tuple[Int[Array, "B T n"], Int[Array, "B T n"]]:
    """The interval of positions that each query allows, `first ≤ … ≤ last`; n is 1 unless heads differ."""
    shape = inputs.query_positions.shape
    bounds = [mask.row_interval(inputs.query_positions) for mask in call.mask.for_each_head(call.mask.num_heads or 1)]
    first, last = (
        jnp.stack([jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in side], axis=-1)
        for side in zip(*bounds, strict=True)
    )
    return first, last


def _put_together(
    part_output: Float[Array, "P B T N V"],
    part_lse: Float[Array, "P B T N"],
    sinks: Float[Array, " N"] | None,
    call: DecodeCall,
    *,
    interpret: bool,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse of all parts together, sinks included."""
    num_parts, *rows, _ = part_output.shape
    output, lse = launch(
        put_together_kernel,
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
            "chunk": min(next_power_of_2(num_parts), _PUT_TOGETHER_ELEMENTS // _width(call.value_dim)),
            "block_v": _width(call.value_dim),
        },
        tiles=TritonTiles(_SMALLEST_DOT, _SMALLEST_DOT, num_warps=4, num_stages=1),
        compute_capability=call.target.compute_capability,
        interpret=interpret,
    )
    return output, lse
