"""dK and dV of wide heads, of one block of 64 keys and values: the pass visits the block's query tiles.

Where both head dims are above 128, or one above 192, one warpgroup's registers don't hold both gradients of 64 keys.
Two consumers divide the work by products: one computes P and dV, the other dS and dK. P goes from one to the other
through shared memory, in float32.

Each consumer adds the last tile's product to its gradient while it computes this tile's P or dS.
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
    launch_pass,
    padded_head_dims,
)
from kernels.backends.mosaic_gpu.machine import Hopper, add_product
from kernels.backends.mosaic_gpu.memory import Pipeline, matrix
from kernels.backends.mosaic_gpu.registers import WGMMA_ROWS, accumulator, load_vector, spread
from kernels.backends.mosaic_gpu.tile_mask import TileMask, num_token_arrays, token_memory
from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning
from kernels.call import AttentionCall

_NUM_CONSUMERS = 2
# Tiles by which P's consumer may be ahead.
_NUM_P_BUFFERS = 2


WideSmem = namedtuple("WideSmem", "k v q do lse_delta p tokens operand")


class WideBarriers(NamedTuple):
    """Barriers: k and v are full once; P goes from one consumer to the other."""

    k: Any
    v: Any
    q: Pipeline
    do: Pipeline
    p: Pipeline
    done: Any


WideContext = BackwardContext[WideSmem, WideBarriers]


def wide_key_value_scratch(
    call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper
) -> tuple[WideSmem, WideBarriers]:
    """Shared memory and barriers: k and v of the block, rings of stages for q, do and what belongs to them."""
    head_dim, value_dim = padded_head_dims(call, tuning)
    block_q, num_stages = tuning.block_q, tuning.num_stages
    ring = functools.partial(Pipeline.memory, num_stages, num_consumers=_NUM_CONSUMERS)
    smem = WideSmem(
        k=matrix(WGMMA_ROWS, head_dim, dtype=call.dtype),
        v=matrix(WGMMA_ROWS, value_dim, dtype=call.dtype),
        q=matrix(num_stages, block_q, head_dim, dtype=call.dtype),
        do=matrix(num_stages, block_q, value_dim, dtype=call.dtype),
        lse_delta=plgpu.SMEM((2, num_stages, block_q), jnp.float32),
        p=matrix(_NUM_P_BUFFERS, WGMMA_ROWS, block_q, dtype=jnp.float32),
        tokens=token_memory(call, num_stages, block_q),
        # In the interpreter alone: operands that a GPU's matmuls take from registers.
        operand=machine.operand_memory(_NUM_CONSUMERS, WGMMA_ROWS, block_q, dtype=call.dtype),
    )
    return smem, WideBarriers(
        k=plgpu.Barrier(),
        v=plgpu.Barrier(),
        q=ring(num_copies=2 + num_token_arrays(call)),
        do=ring(num_copies=2),
        p=Pipeline.memory(_NUM_P_BUFFERS, num_consumers=1),
        done=plgpu.Barrier(num_arrivals=_NUM_CONSUMERS),
    )


def wide_key_value_pass(
    arrays: BackwardArrays, call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"], None]:
    """dK and dV, and None for dQ. The arguments are `key_value_pass`'s."""
    scratch = wide_key_value_scratch(call, tuning, machine)
    consumers = [_compute_dv, _compute_dk]
    d_key, d_value = launch_pass(
        arrays, call, tuning, machine, scratch, _load, consumers, _finish, name="attention_dkv", transposed=True
    )
    return d_key, d_value, None


def _load(context: WideContext) -> None:
    """Producer: copies the block's keys and values, then query tiles into the rings."""
    tuning, gmem, smem = context.tuning, context.gmem, context.smem
    barriers, block, num_steps = context.barriers, context.block, context.num_steps
    context.load_keys_and_values(barriers.k, barriers.v)

    @pl.loop(0, num_steps)
    def copy_tile(step):
        slot = barriers.q.slot(step)
        head, number, _ = context.query_tile(step)
        queries = pl.ds(number * tuning.block_q, tuning.block_q)
        q_full, do_full = barriers.q.full.at[slot], barriers.do.full.at[slot]
        barriers.q.producer_acquire(step, slot)
        barriers.q.copy(gmem.query.at[block.batch, queries, head], smem.q, slot)
        plgpu.copy_gmem_to_smem(gmem.lse.at[block.batch, head, queries], smem.lse_delta.at[LSE, slot], q_full)
        gmem.tokens.copy(smem.tokens, "query", (block.batch, queries), slot, q_full)
        barriers.do.producer_acquire(step, slot)
        barriers.do.copy(gmem.d_output.at[block.batch, queries, head], smem.do, slot)
        plgpu.copy_gmem_to_smem(gmem.delta.at[block.batch, head, queries], smem.lse_delta.at[DELTA, slot], do_full)


def _finish(barriers: WideBarriers, num_steps) -> None:
    """Producer: waits until the consumers have read the last stages."""
    barriers.q.producer_tail(num_steps)
    barriers.do.producer_tail(num_steps)


def _compute_dv(context: WideContext) -> None:
    """First consumer: P = exp(KQᵀ − lse), dV += P dO."""
    call, tuning, gmem = context.call, context.tuning, context.gmem
    smem, barriers, first = context.smem, context.barriers, context.first
    keys = pl.ds(first, WGMMA_ROWS)
    mask = TileMask.load(context, "query", context.block.batch, keys, tuning.block_kv)
    plgpu.barrier_wait(barriers.k)

    def compute_p(s, step, number, rank):
        slot, buffer = barriers.q.slot(step), barriers.p.slot(step)
        lse = load_vector(smem.lse_delta.at[LSE, slot], rows=False)
        q_first, is_partial = number * tuning.block_q, rank < context.tiles.num_partial
        p, slope = mask.probabilities(s, lse, is_partial, q_first, slot)
        barriers.q.consumer_release(slot)
        barriers.p.producer_acquire(step, buffer)
        smem.p.at[buffer][...] = p if slope is None else p * slope
        plgpu.barrier_arrive(barriers.p.full.at[buffer])
        return p.astype(call.dtype)

    def accumulate(dv_acc):
        finish = functools.partial(barriers.p.producer_tail, context.num_steps)
        _add_products(context, dv_acc, smem.k, smem.q, barriers.q, smem.do, barriers.do, compute_p, finish)
        dv = plgpu.wgmma_accumulator_load(dv_acc, wait_n=0)
        context.wait_for_consumers()
        context.store_gradient(dv, smem.v, gmem.d_value, first)

    pl.run_scoped(accumulate, accumulator(gmem.value.shape[-1]))


def _compute_dk(context: WideContext) -> None:
    """Second consumer: dS = P∘(V dOᵀ − delta), dK += dS Q."""
    call, gmem, smem, barriers = context.call, context.gmem, context.smem, context.barriers
    plgpu.barrier_wait(barriers.v)

    def compute_ds(dp, step, number, rank):
        slot, buffer = barriers.do.slot(step), barriers.p.slot(step)
        delta = load_vector(smem.lse_delta.at[DELTA, slot], rows=False)
        barriers.do.consumer_release(slot)
        dp = dp - spread(delta, dp.shape, rows=False)
        barriers.p.consumer_wait(buffer)
        p = plgpu.load(smem.p.at[buffer], layout=plgpu.Layout.WGMMA)  # type: ignore[call-arg]  # as JAX 0.10 has it
        ds = dp * p
        barriers.p.consumer_release(buffer)
        return ds.astype(call.dtype)

    def accumulate(dk_acc):
        _add_products(context, dk_acc, smem.v, smem.do, barriers.do, smem.q, barriers.q, compute_ds)
        dk = plgpu.wgmma_accumulator_load(dk_acc, wait_n=0) * call.scale
        context.wait_for_consumers()
        context.store_gradient(dk, smem.k, gmem.d_key, context.first)

    pl.run_scoped(accumulate, accumulator(gmem.key.shape[-1]))


def _add_products(context: WideContext, acc, left, right, right_ring, other, other_ring, compute_operand, finish=None):
    """Adds `operand @ other` of all tiles to a gradient, with operand = compute_operand(left @ rightᵀ).

    A tile's first product is issued before the last tile's second one, so that its operand is computed under a matmul.
    """
    num_steps, tile_type = context.num_steps, accumulator(context.tuning.block_q)

    def multiply(operand, slot):
        add_product(acc, operand, other.at[slot], context.smem.operand, context.warpgroup)

    def first(tile_acc):
        _, number, rank = context.query_tile(0)
        plgpu.wgmma(tile_acc, left, right.at[0].transpose((1, 0)))
        return compute_operand(plgpu.wgmma_accumulator_load(tile_acc, wait_n=0), 0, number, rank)

    def visit(step, operand):
        slot, last = right_ring.slot(step), right_ring.slot(step - 1)
        _, number, rank = context.query_tile(step)
        right_ring.consumer_wait(slot)

        def products(tile_acc):
            plgpu.wgmma(tile_acc, left, right.at[slot].transpose((1, 0)))
            other_ring.consumer_wait(last)
            multiply(operand, last)
            new_operand = compute_operand(plgpu.wgmma_accumulator_load(tile_acc, wait_n=1), step, number, rank)
            plgpu.wgmma_wait(0)
            other_ring.consumer_release(last)
            return new_operand

        return pl.run_scoped(products, tile_type)

    @pl.when(num_steps > 0)
    def all_tiles():
        right_ring.consumer_wait(0)
        operand = pl.run_scoped(first, tile_type)
        operand = jax.lax.fori_loop(1, num_steps, visit, operand)
        last = right_ring.slot(num_steps - 1)
        other_ring.consumer_wait(last)
        multiply(operand, last)
        plgpu.wgmma_wait(0)
        other_ring.consumer_release(last)
        if finish is not None:
            finish()
