"""What the roles of the pass over blocks of keys share: a program's shared memory and barriers, and a query tile."""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.backends.mosaic_gpu.backward_passes import BackwardContext, padded_head_dims
from kernels.backends.mosaic_gpu.offset_columns import NUM_COLUMNS, lse_is_offset
from kernels.backends.mosaic_gpu.tile_mask import TileMask, num_token_arrays, token_memory
from kernels.backends.mosaic_gpu.tuning import MAX_EQUAL_HEAD_DIM, MosaicBackwardTuning
from kernels.call import AttentionCall
from kernels.hopper.machine import Hopper
from kernels.hopper.memory import Pipeline, matrix
from kernels.hopper.registers import WGMMA_ROWS
from kernels.hopper.tile_scheduler import BlockClaims

TILE, HEAD, KINDS = range(3)
"""Indices of what the producer tells the consumers of a step. From the last on: the tile's kind, one for each consumer,
or one for all."""

KeyValueSmem = namedtuple("KeyValueSmem", "k v q do offsets lse_delta steps tokens ds dq_out operand weights")


class KeyValueBarriers(NamedTuple):
    """Barriers: k and v are full once a block; q's `empty` frees the stages of do, too, unless do has its own."""

    k: Any
    v: Any
    q: Pipeline
    do: Pipeline
    done: Any  # no consumer reads the block's keys and values any more
    ds_full: Any  # all consumers have written a step's dS
    ds_read: Any  # all consumers have read it; None with three buffers
    claims: BlockClaims | None  # of a persistent program


KeyValueContext = BackwardContext[KeyValueSmem, KeyValueBarriers]


class QueryTile(NamedTuple):
    """A query tile, as a consumer sees it."""

    slot: Any
    number: Any
    head: Any
    kind: Any
    q: Any
    do: Any


class ConsumerKeys(NamedTuple):
    """A consumer's 64 keys: index of the first, place in the block, mask, weights of offsets, accumulators."""

    first: Any
    place: Any
    mask: TileMask
    offset_weights: list[jax.Array]
    dk_acc: Any
    dv_acc: Any


def is_tall(tuning: MosaicBackwardTuning) -> bool:
    """Whether tiles have more queries than a WGMMA tile has rows.

    Then dV's product is issued before dP is awaited; and in programs of one block, operands' addresses are kept across
    steps, and dV is written after the last dQ. For other tiles each of these is slower: see docs/hopper_kernels.md.
    """
    return tuning.block_q > WGMMA_ROWS


def is_wide(call: AttentionCall) -> bool:
    """Whether dK and dV leave a warpgroup registers for one float32 tile only, not for both S and dP.

    Then P is rounded to the matmul's dtype before dP is computed, and dQ is computed between two tiles. lse and delta
    are loaded, since the weights of their offsets take registers, too.
    """
    return max(call.head_dim, call.value_dim) > MAX_EQUAL_HEAD_DIM


def key_value_scratch(
    call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper, *, fused: bool
) -> tuple[KeyValueSmem, KeyValueBarriers]:
    """Shared memory and barriers: k and v of the block, rings of stages for q, do and what belongs to them."""
    head_dim, value_dim = padded_head_dims(call, tuning)
    num_consumers, num_stages = tuning.num_warpgroups, tuning.num_stages
    block_q, block_kv, wide = tuning.block_q, tuning.block_kv, is_wide(call)
    # Of lse and delta, those that are loaded: both, lse, or neither.
    num_loaded = 2 if wide else int(not lse_is_offset(call))
    # A step's dS is read in the next step. With three buffers, a consumer that writes a fourth dS knows that the other
    # one has read the first: it has written the third since. Tall tiles leave room for two, wide heads for one, and a
    # barrier tells it.
    num_ds_buffers = 1 if wide else 2 if is_tall(tuning) else 3
    dq_columns = head_dim // num_consumers if tuning.divides_dq_by_columns else head_dim
    # A consumer's dQ begins at its own columns of the keys. Products take operands that are tiled alike.
    of_keys = functools.partial(matrix, dtype=call.dtype, column_multiple=dq_columns if fused else None)
    smem = KeyValueSmem(
        k=of_keys(block_kv, head_dim),
        v=matrix(block_kv, value_dim, dtype=call.dtype),
        q=of_keys(num_stages, block_q, head_dim),
        do=matrix(num_stages, block_q, value_dim, dtype=call.dtype),
        offsets=None if wide else matrix(num_stages, block_q, NUM_COLUMNS, dtype=call.dtype),
        lse_delta=plgpu.SMEM((num_loaded, num_stages, block_q), jnp.float32) if num_loaded else None,
        steps=plgpu.SMEM((num_stages, KINDS + num_consumers), jnp.int32),
        tokens=token_memory(call, num_stages, block_q),
        # By 64 queries, so that what a product reads, and what a consumer stores, is in one piece.
        ds=of_keys(num_ds_buffers, block_q // WGMMA_ROWS, block_kv, WGMMA_ROWS) if fused else None,
        dq_out=matrix(num_consumers, *_dq_buffers(call, dq_columns), dtype=jnp.float32) if fused else None,
        # In the interpreter alone: operands that a GPU's matmuls take from registers.
        operand=machine.operand_memory(num_consumers, WGMMA_ROWS, block_q, dtype=call.dtype),
        weights=machine.operand_memory(num_consumers, WGMMA_ROWS, NUM_COLUMNS, dtype=call.dtype),
    )
    # Of queries, of what the producer tells the consumers, and of offsets, lse and delta.
    num_copies = 2 + (not wide) + num_loaded + num_token_arrays(call)
    return smem, KeyValueBarriers(
        k=plgpu.Barrier(),
        v=plgpu.Barrier(),
        q=Pipeline.memory(num_stages, num_consumers=num_consumers, num_copies=num_copies),
        do=Pipeline.memory(num_stages, num_consumers=num_consumers)
        if wide
        else Pipeline(plgpu.Barrier(num_barriers=num_stages)),
        done=plgpu.Barrier(num_arrivals=num_consumers),
        ds_full=plgpu.Barrier(num_arrivals=num_consumers) if fused else None,
        ds_read=plgpu.Barrier(num_arrivals=num_consumers) if fused and num_ds_buffers < 3 else None,
        claims=machine.block_claims(num_consumers) if tuning.persistent else None,
    )


def _dq_buffers(call: AttentionCall, num_columns: int) -> tuple[int, int, int]:
    """A consumer's memory for dQ on its way to global memory: number of buffers, rows and columns of each."""
    # Beside wide heads and their tokens there is no room for all columns at a time.
    return (2, WGMMA_ROWS, 32) if is_wide(call) and num_token_arrays(call) else (1, WGMMA_ROWS, num_columns)
