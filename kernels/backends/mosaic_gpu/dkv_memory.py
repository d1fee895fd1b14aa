"""The shared memory and barriers of the pass over blocks of keys, and what its roles know of keys and query tiles."""

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
"""Indices of the numbers that the producer writes for the consumers of a step. From the last index on: the tile kind,
one for each consumer, or one for all."""

DkvSmem = namedtuple("DkvSmem", "k v q do offsets lse_delta steps tokens ds dq_out operand weights")


class DkvBarriers(NamedTuple):
    """Barriers: k and v are full once a block; q's `empty` frees the stages of do, too, unless do has its own."""

    k: Any
    v: Any
    q: Pipeline
    do: Pipeline
    done: Any  # no consumer reads the block's keys and values any more
    ds_full: Any  # all consumers have written a step's dS
    ds_read: Any  # all consumers have read it; None with three buffers of dS
    claims: BlockClaims | None  # of a persistent program


DkvContext = BackwardContext[DkvSmem, DkvBarriers]


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
    """True if tiles have more queries than a WGMMA tile has rows.

    Then dV's product is issued before dP is awaited; and in programs of one block, operands' addresses are kept across
    steps, and dV is written after the last dQ. For other tiles each of these is slower: see docs/hopper_kernels.md.
    """
    return tuning.block_q > WGMMA_ROWS


def is_wide(call: AttentionCall) -> bool:
    """True if dK and dV leave a warpgroup registers for one float32 tile only, not for both S and dP.

    Then P is rounded to the matmul's dtype before dP is computed, and dQ is computed between two tiles. lse and delta
    are loaded, since the weights of their offsets take registers, too.
    """
    return max(call.head_dim, call.value_dim) > MAX_EQUAL_HEAD_DIM


class DqExchange(NamedTuple):
    """The memory by which the consumers of a fused form share dS, and by which dQ leaves.

    Attributes:
      num_ds_buffers: a step's dS is read in the next step. With three buffers, a consumer that writes a fourth dS knows
        that the other one has read the first: it has written the third since. With fewer, there is a barrier for it.
      num_columns: of the part of a tile's dQ that a consumer computes.
      dq_out: a consumer's memory for dQ on its way to global memory: number of buffers, rows and columns of each.
    """

    num_ds_buffers: int
    num_columns: int
    dq_out: tuple[int, int, int]


def dq_columns(call: AttentionCall, tuning: MosaicBackwardTuning) -> int:
    """Columns of the part of a tile's dQ that a consumer computes."""
    head_dim, _ = padded_head_dims(call, tuning)
    return head_dim // tuning.num_warpgroups if tuning.divides_dq_by_columns else head_dim


def dkv_scratch(
    call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper, *, wide: bool, exchange: DqExchange | None
) -> tuple[DkvSmem, DkvBarriers]:
    """Shared memory and barriers: k and v of the block, rings of stages for q, do and what belongs to them.

    Args:
      wide: whether lse and delta are loaded, and the stages of do are freed by themselves.
      exchange: of a fused form.
    """
    head_dim, value_dim = padded_head_dims(call, tuning)
    num_consumers, num_stages, block_q, block_kv = (
        tuning.num_warpgroups,
        tuning.num_stages,
        tuning.block_q,
        tuning.block_kv,
    )
    # Of lse and delta, those that are loaded: both, lse, or neither.
    num_loaded = 2 if wide else int(not lse_is_offset(call))
    # A consumer's dQ begins at its own columns of the keys. Products take operands that are tiled alike.
    column_multiple = None if exchange is None else exchange.num_columns
    of_keys = functools.partial(matrix, dtype=call.dtype, column_multiple=column_multiple)
    smem = DkvSmem(
        k=of_keys(block_kv, head_dim),
        v=matrix(block_kv, value_dim, dtype=call.dtype),
        q=of_keys(num_stages, block_q, head_dim),
        do=matrix(num_stages, block_q, value_dim, dtype=call.dtype),
        offsets=None if wide else matrix(num_stages, block_q, NUM_COLUMNS, dtype=call.dtype),
        lse_delta=plgpu.SMEM((num_loaded, num_stages, block_q), jnp.float32) if num_loaded else None,
        steps=plgpu.SMEM((num_stages, KINDS + num_consumers), jnp.int32),
        tokens=token_memory(call, "query", num_stages, block_q),
        ds=None,
        dq_out=None,
        # In the interpreter alone: operands that a GPU's matmuls take from registers.
        operand=machine.operand_memory(num_consumers, WGMMA_ROWS, block_q, dtype=call.dtype),
        weights=None if wide else machine.operand_memory(num_consumers, WGMMA_ROWS, NUM_COLUMNS, dtype=call.dtype),
    )
    # Of queries, of the producer's numbers, and of offsets, lse and delta.
    num_copies = 2 + (not wide) + num_loaded + num_token_arrays(call, "query")
    ring = functools.partial(Pipeline.memory, num_stages, num_consumers=num_consumers)
    barriers = DkvBarriers(
        k=plgpu.Barrier(),
        v=plgpu.Barrier(),
        q=ring(num_copies=num_copies),
        do=ring() if wide else Pipeline(plgpu.Barrier(num_barriers=num_stages)),
        done=plgpu.Barrier(num_arrivals=num_consumers),
        ds_full=None,
        ds_read=None,
        claims=machine.block_claims(num_consumers) if tuning.persistent else None,
    )
    if exchange is None:
        return smem, barriers
    all_consumers = plgpu.Barrier(num_arrivals=num_consumers)
    return smem._replace(
        # By 64 queries, so that what a product reads, and what a consumer stores, is in one part.
        ds=of_keys(exchange.num_ds_buffers, block_q // WGMMA_ROWS, block_kv, WGMMA_ROWS),
        dq_out=matrix(num_consumers, *exchange.dq_out, dtype=jnp.float32),
    ), barriers._replace(ds_full=all_consumers, ds_read=all_consumers if exchange.num_ds_buffers < 3 else None)
