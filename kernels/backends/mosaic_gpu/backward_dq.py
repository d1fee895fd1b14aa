"""dQ of one block of queries: the pass visits the block's key/value tiles, in a fixed order.

Sources: FlashAttention-3 (arXiv:2407.08608), FlashAttention-2 (arXiv:2307.08691).
"""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.backward_passes import (
    DELTA,
    LSE,
    BackwardArrays,
    BackwardContext,
    BackwardPass,
    launch_pass,
    padded_head_dims,
)
from kernels.backends.mosaic_gpu.tile_mask import TileMask, num_token_arrays, token_memory
from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning
from kernels.backends.mosaic_gpu.walk import has_numbers, read_number, write_number
from kernels.call import AttentionCall
from kernels.hopper.machine import Hopper, add_product
from kernels.hopper.memory import Pipeline, matrix
from kernels.hopper.registers import WGMMA_ROWS, accumulator, load_vector, spread
from kernels.masks import TileKind

DqSmem = namedtuple("DqSmem", "q do lse_delta k v tokens ds")


class DqBarriers(NamedTuple):
    """Barriers: of a consumer's queries and what belongs to them, and for each stage of k and v."""

    queries: Any
    k: Pipeline
    v: Pipeline


DqContext = BackwardContext[DqSmem, DqBarriers]


def dq_scratch(call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper) -> tuple[DqSmem, DqBarriers]:
    """Shared memory and barriers: rings of stages for k, v and tokens; of the rest each consumer has its own."""
    head_dim, value_dim = padded_head_dims(call, tuning)
    num_consumers, block_kv, num_stages = tuning.num_warpgroups, tuning.block_kv_dq, tuning.num_stages_dq
    smem = DqSmem(
        q=matrix(num_consumers, WGMMA_ROWS, head_dim, dtype=call.dtype),
        do=matrix(num_consumers, WGMMA_ROWS, value_dim, dtype=call.dtype),
        lse_delta=plgpu.SMEM((2, num_consumers, WGMMA_ROWS), jnp.float32),
        k=matrix(num_stages, block_kv, head_dim, dtype=call.dtype),
        v=matrix(tuning.num_value_stages_dq, block_kv, value_dim, dtype=call.dtype),
        tokens=token_memory(call, "key_value", num_stages, block_kv, numbered=has_numbers(call, "key_value")),
        ds=machine.operand_memory(num_consumers, WGMMA_ROWS, block_kv, dtype=call.dtype),
    )
    num_copies = 1 + num_token_arrays(call, "key_value") + has_numbers(call, "key_value")
    return smem, DqBarriers(
        queries=plgpu.Barrier(num_arrivals=4, num_barriers=num_consumers),
        k=Pipeline.memory(num_stages, num_consumers=num_consumers, num_copies=num_copies),
        v=Pipeline.memory(tuning.num_value_stages_dq, num_consumers=num_consumers),
    )


def backward_dq(
    arrays: BackwardArrays, call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper
) -> Float[Array, "B T N H"]:
    """dQ alone, scaled, in the query's dtype. `arrays.rows` are each query block's key/value tiles, in fixed order."""
    scratch = dq_scratch(call, tuning, machine)
    dq = BackwardPass("attention_dq", False, scratch, _load, [_differentiate], _finish)
    (d_query,) = launch_pass(dq, arrays, call, tuning, machine)
    return d_query


def _load(context: DqContext) -> None:
    """Producer: copies the key/value tiles of the block into the rings."""
    tuning, gmem, smem = context.tuning, context.gmem, context.smem
    barriers, block = context.barriers, context.block
    kv_head = block.head // context.call.group_size

    def copy_tile(step, found=None):
        number = context.tiles.tile(step) if found is None else found[1]
        tile = pl.ds(number * tuning.block_kv_dq, tuning.block_kv_dq)
        slot = barriers.k.slot(step)
        barriers.k.producer_acquire(step, slot)
        if has_numbers(context.call, "key_value"):
            write_number(smem.tokens, slot, number, barriers.k.full.at[slot])
        barriers.k.copy(gmem.key.at[block.batch, tile, kv_head], smem.k, slot)
        # Before the wait for the values' stage: keys are full only with their tokens.
        gmem.tokens.copy(smem.tokens, "key_value", (block.batch, tile), slot, barriers.k.full.at[slot])
        slot = barriers.v.slot(step)
        barriers.v.producer_acquire(step, slot)
        barriers.v.copy(gmem.value.at[block.batch, tile, kv_head], smem.v, slot)

    context.for_each_tile(copy_tile)


def _finish(barriers: DqBarriers, num_steps) -> None:
    """Producer: waits until the consumers have read the last stages."""
    barriers.k.producer_tail(num_steps)
    barriers.v.producer_tail(num_steps)


def _differentiate(context: DqContext) -> None:
    """Consumer: dQ of 64 query rows."""
    gmem, smem, block, warpgroup = context.gmem, context.smem, context.block, context.warpgroup
    first = block.number * context.tuning.block_q_dq + warpgroup * WGMMA_ROWS
    rows, full = pl.ds(first, WGMMA_ROWS), context.barriers.queries.at[warpgroup]
    for source, target in (
        (gmem.query.at[block.batch, rows, block.head], smem.q.at[warpgroup]),
        (gmem.d_output.at[block.batch, rows, block.head], smem.do.at[warpgroup]),
        (gmem.lse.at[block.batch, block.head, rows], smem.lse_delta.at[LSE, warpgroup]),
        (gmem.delta.at[block.batch, block.head, rows], smem.lse_delta.at[DELTA, warpgroup]),
    ):
        plgpu.copy_gmem_to_smem(source, target, full)
    mask = TileMask.load(context, "key_value", block.batch, rows, context.tuning.block_kv_dq)
    plgpu.barrier_wait(full)
    lse = load_vector(smem.lse_delta.at[LSE, warpgroup], rows=True)
    delta = load_vector(smem.lse_delta.at[DELTA, warpgroup], rows=True)
    kind_of = gmem.rows.read_kind(block.batch, block.number, warpgroup)

    def accumulate(dq_acc):
        pl.loop(0, context.num_steps)(functools.partial(_visit_tile, context, mask, kind_of, lse, delta, dq_acc))
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0) * context.call.scale
        context.store_gradient(dq, smem.q.at[warpgroup], gmem.d_query, first)

    pl.run_scoped(accumulate, accumulator(gmem.query.shape[-1]))


def _visit_tile(context: DqContext, mask: TileMask, kind_of, lse, delta, dq_acc, step) -> None:
    """Waits for a tile, adds its part to dQ unless it is EMPTY to these queries, and releases it."""
    barriers, tiles = context.barriers, context.tiles
    slot, v_slot = barriers.k.slot(step), barriers.v.slot(step)
    is_numbered = has_numbers(context.call, "key_value")
    # Kinds of a warpgroup's own are of intervals, whose tiles all know.
    kind = kind_of(None if is_numbered else tiles.tile(step), step < tiles.num_partial)

    def pass_over():
        # A waiting thread must see each completion of a barrier.
        barriers.v.consumer_wait(v_slot)
        barriers.v.consumer_release(v_slot)

    add_tile = functools.partial(_add_tile, context, mask, kind, lse, delta, dq_acc, step, slot, v_slot)
    barriers.k.consumer_wait(slot)
    if context.gmem.rows.warpgroup_bounds is None:
        add_tile()
    else:
        jax.lax.cond(kind == TileKind.EMPTY, pass_over, add_tile)
    barriers.k.consumer_release(slot)


def _add_tile(context: DqContext, mask: TileMask, kind, lse, delta, dq_acc, step, slot, v_slot) -> None:
    """Adds a tile's part to dQ: P = exp(QKᵀ − lse), dS = P∘(dO Vᵀ − delta), dQ += dS K."""
    smem, barriers = context.smem, context.barriers
    k, v = smem.k.at[slot], smem.v.at[v_slot]
    # The barrier makes the compiler compute the operands' addresses in each step. Kept across steps, the addresses of
    # wide operands fill a thread's registers.
    warpgroup = jax.lax.optimization_barrier(context.warpgroup)
    q, do = smem.q.at[warpgroup], smem.do.at[warpgroup]

    def differentiate(s_acc, dp_acc):
        plgpu.wgmma(dp_acc, do, v.transpose((1, 0)))
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        is_numbered = has_numbers(context.call, "key_value")
        number = read_number(smem.tokens, slot) if is_numbered else context.tiles.tile(step)
        kv_first = number * context.tuning.block_kv_dq
        p, slope = mask.probabilities(s, lse, kind == TileKind.PARTIAL, kv_first, slot)
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        barriers.v.consumer_release(v_slot)
        ds = p * (dp - spread(delta, dp.shape, rows=True))
        return (ds if slope is None else ds * slope).astype(context.call.dtype)

    def multiply(s_acc):
        plgpu.wgmma(s_acc, q, k.transpose((1, 0)))
        barriers.v.consumer_wait(v_slot)
        return pl.run_scoped(functools.partial(differentiate, s_acc), tile_type)

    tile_type = accumulator(context.tuning.block_kv_dq)
    ds = pl.run_scoped(multiply, tile_type)
    add_product(dq_acc, ds, k, smem.ds, context.warpgroup)
    plgpu.wgmma_wait(0)
