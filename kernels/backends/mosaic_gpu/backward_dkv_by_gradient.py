"""dK and dV of wide heads, of one block of 64 keys and values: the pass visits the block's query tiles.

Where both head dims are above 128, or one above 192, one warpgroup's registers don't hold both gradients of 64 keys.
Two consumers divide the work by products: one computes P and dV, the other dS and dK. P goes from one to the other
through shared memory, in float32.
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
from kernels.hopper.registers import WGMMA_ROWS, accumulator, load_matrix, load_vector, spread

_NUM_CONSUMERS = 2
# Tiles by which P's producer may be ahead.
_NUM_P_BUFFERS = 2


ByGradientSmem = namedtuple("ByGradientSmem", "k v q do lse_delta p tokens operand")


class ByGradientBarriers(NamedTuple):
    """Barriers: k and v are full once; P goes from one consumer to the other."""

    k: Any
    v: Any
    q: Pipeline
    do: Pipeline
    p: Pipeline
    done: Any


ByGradientContext = BackwardContext[ByGradientSmem, ByGradientBarriers]


def dkv_by_gradient_scratch(
    call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper
) -> tuple[ByGradientSmem, ByGradientBarriers]:
    """Shared memory and barriers: k and v of the block, rings of stages for q, do and what belongs to them."""
    head_dim, value_dim = padded_head_dims(call, tuning)
    block_q, num_stages = tuning.block_q, tuning.num_stages
    ring = functools.partial(Pipeline.memory, num_stages, num_consumers=_NUM_CONSUMERS)
    smem = ByGradientSmem(
        k=matrix(WGMMA_ROWS, head_dim, dtype=call.dtype),
        v=matrix(WGMMA_ROWS, value_dim, dtype=call.dtype),
        q=matrix(num_stages, block_q, head_dim, dtype=call.dtype),
        do=matrix(num_stages, block_q, value_dim, dtype=call.dtype),
        lse_delta=plgpu.SMEM((2, num_stages, block_q), jnp.float32),
        p=matrix(_NUM_P_BUFFERS, WGMMA_ROWS, block_q, dtype=jnp.float32),
        tokens=token_memory(call, "query", num_stages, block_q, numbered=has_numbers(call, "query")),
        # In the interpreter alone: operands that a GPU's matmuls take from registers.
        operand=machine.operand_memory(_NUM_CONSUMERS, WGMMA_ROWS, block_q, dtype=call.dtype),
    )
    return smem, ByGradientBarriers(
        k=plgpu.Barrier(),
        v=plgpu.Barrier(),
        q=ring(num_copies=2 + num_token_arrays(call, "query") + has_numbers(call, "query")),
        do=ring(num_copies=2),
        p=Pipeline.memory(_NUM_P_BUFFERS, num_consumers=1),
        done=plgpu.Barrier(num_arrivals=_NUM_CONSUMERS),
    )


def backward_dkv_by_gradient(
    arrays: BackwardArrays, call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"], None]:
    """dK and dV, and None for dQ. The arguments are `backward_dkv`'s."""
    scratch = dkv_by_gradient_scratch(call, tuning, machine)
    dkv = BackwardPass("attention_dkv", True, scratch, _load, [_compute_dv, _compute_dk], _finish)
    d_key, d_value = launch_pass(dkv, arrays, call, tuning, machine)
    return d_key, d_value, None


def _load(context: ByGradientContext) -> None:
    """Producer: copies the block's keys and values, then query tiles into the rings."""
    tuning, gmem, smem = context.tuning, context.gmem, context.smem
    barriers, block = context.barriers, context.block
    context.load_keys_and_values(barriers.k, barriers.v)

    def copy_tile(step, found=None):
        slot = barriers.q.slot(step)
        head, number, _ = context.query_tile(step, found)
        queries = pl.ds(number * tuning.block_q, tuning.block_q)
        q_full, do_full = barriers.q.full.at[slot], barriers.do.full.at[slot]
        barriers.q.producer_acquire(step, slot)
        if has_numbers(context.call, "query"):
            write_number(smem.tokens, slot, number, q_full)
        barriers.q.copy(gmem.query.at[block.batch, queries, head], smem.q, slot)
        plgpu.copy_gmem_to_smem(gmem.lse.at[block.batch, head, queries], smem.lse_delta.at[LSE, slot], q_full)
        gmem.tokens.copy(smem.tokens, "query", (block.batch, queries), slot, q_full)
        barriers.do.producer_acquire(step, slot)
        barriers.do.copy(gmem.d_output.at[block.batch, queries, head], smem.do, slot)
        plgpu.copy_gmem_to_smem(gmem.delta.at[block.batch, head, queries], smem.lse_delta.at[DELTA, slot], do_full)

    context.for_each_tile(copy_tile)


def _finish(barriers: ByGradientBarriers, num_steps) -> None:
    """Producer: waits until the consumers have read the last stages."""
    barriers.q.producer_tail(num_steps)
    barriers.do.producer_tail(num_steps)


def _compute_dv(context: ByGradientContext) -> None:
    """First consumer: P = exp(KQᵀ − lse), dV += P dO.

    A tile's KQᵀ is issued before the last tile's P dO, so that P is computed under a matmul.
    """
    call, tuning, gmem = context.call, context.tuning, context.gmem
    smem, barriers, first, num_steps = context.smem, context.barriers, context.first, context.num_steps
    mask = TileMask.load(context, "query", context.block.batch, pl.ds(first, WGMMA_ROWS), tuning.block_kv)
    tile_type = accumulator(tuning.block_q)
    plgpu.barrier_wait(barriers.k)

    def start_s(s_acc, slot):
        barriers.q.consumer_wait(slot)
        plgpu.wgmma(s_acc, smem.k, smem.q.at[slot].transpose((1, 0)))

    def compute_p(s, step):
        slot, buffer = barriers.q.slot(step), barriers.p.slot(step)
        if has_numbers(call, "query"):
            number, rank = read_number(smem.tokens, slot), jax.lax.rem(step, context.tiles.num_tiles)
        else:
            _, number, rank = context.query_tile(step)
        lse = load_vector(smem.lse_delta.at[LSE, slot], rows=False)
        q_first, is_partial = number * tuning.block_q, rank < context.tiles.num_partial
        p, slope = mask.probabilities(s, lse, is_partial, q_first, slot)
        barriers.q.consumer_release(slot)
        barriers.p.producer_acquire(step, buffer)
        smem.p.at[buffer][...] = p if slope is None else p * slope
        plgpu.barrier_arrive(barriers.p.full.at[buffer])
        return p.astype(call.dtype)

    def first_tile(s_acc):
        start_s(s_acc, 0)
        return compute_p(plgpu.wgmma_accumulator_load(s_acc, wait_n=0), 0)

    def start_dv(dv_acc, p, slot):
        barriers.do.consumer_wait(slot)
        add_product(dv_acc, p, smem.do.at[slot], smem.operand, context.warpgroup)

    def finish_dv(slot):
        plgpu.wgmma_wait(0)
        barriers.do.consumer_release(slot)

    def next_tile(dv_acc, step, last_p):
        slot, last = barriers.q.slot(step), barriers.do.slot(step - 1)

        def multiply(s_acc):
            start_s(s_acc, slot)
            start_dv(dv_acc, last_p, last)
            p = compute_p(plgpu.wgmma_accumulator_load(s_acc, wait_n=1), step)
            finish_dv(last)
            return p

        return pl.run_scoped(multiply, tile_type)

    def accumulate(dv_acc):
        @pl.when(num_steps > 0)
        def all_tiles():
            p = pl.run_scoped(first_tile, tile_type)
            p = jax.lax.fori_loop(1, num_steps, functools.partial(next_tile, dv_acc), p)
            last = barriers.do.slot(num_steps - 1)
            start_dv(dv_acc, p, last)
            finish_dv(last)
            barriers.p.producer_tail(num_steps)

        dv = plgpu.wgmma_accumulator_load(dv_acc, wait_n=0)
        context.wait_for_consumers()
        context.store_gradient(dv, smem.v, gmem.d_value, first)

    pl.run_scoped(accumulate, accumulator(gmem.value.shape[-1]))


def _compute_dk(context: ByGradientContext) -> None:
    """Second consumer: dS = P∘(V dOᵀ − delta), dK += dS Q.

    A tile's dS Q is done before the next tile's V dOᵀ is issued. Issued after it, dS Q would hold its queries in their
    stage for another step, and with two stages the producer would copy the queries after next too late.
    """
    call, gmem, smem, barriers = context.call, context.gmem, context.smem, context.barriers
    plgpu.barrier_wait(barriers.v)

    def compute_ds(step, slot, dp_acc):
        plgpu.wgmma(dp_acc, smem.v, smem.do.at[slot].transpose((1, 0)))
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        buffer, delta = barriers.p.slot(step), load_vector(smem.lse_delta.at[DELTA, slot], rows=False)
        barriers.do.consumer_release(slot)
        dp = dp - spread(delta, dp.shape, rows=False)
        barriers.p.consumer_wait(buffer)
        ds = dp * load_matrix(smem.p.at[buffer], shared=True)
        barriers.p.consumer_release(buffer)
        return ds.astype(call.dtype)

    def accumulate(dk_acc):
        @pl.loop(0, context.num_steps)
        def add_tile(step):
            slot = barriers.do.slot(step)
            barriers.do.consumer_wait(slot)
            ds = pl.run_scoped(functools.partial(compute_ds, step, slot), accumulator(context.tuning.block_q))
            barriers.q.consumer_wait(slot)
            add_product(dk_acc, ds, smem.q.at[slot], smem.operand, context.warpgroup)
            plgpu.wgmma_wait(0)
            barriers.q.consumer_release(slot)

        dk = plgpu.wgmma_accumulator_load(dk_acc, wait_n=0) * call.scale
        context.wait_for_consumers()
        context.store_gradient(dk, smem.k, gmem.d_key, context.first)

    pl.run_scoped(accumulate, accumulator(gmem.key.shape[-1]))
