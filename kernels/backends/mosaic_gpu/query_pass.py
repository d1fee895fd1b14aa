"""dQ alone: a block of queries stays in shared memory, and key/value tiles stream past it in a fixed order."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.backward_passes import DELTA, LSE, Context, Operands, launch_pass, probabilities
from kernels.backends.mosaic_gpu.machine import Hopper
from kernels.backends.mosaic_gpu.memory import WGMMA_ROWS, accumulator, load_vector, matrix, spread, vector
from kernels.backends.mosaic_gpu.pairs import Tokens, copy_tokens, token_memory
from kernels.backends.mosaic_gpu.pipeline import Pipeline, producer_tail
from kernels.backends.mosaic_gpu.tile_mask import TileMask
from kernels.backends.mosaic_gpu.tile_scheduler import TileScheduler
from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning
from kernels.call import AttentionCall
from kernels.plan import Rows


class _Smem(NamedTuple):
    """Shared memory: q, do, lse_delta and ds for each consumer, k, v and their tokens for each stage."""

    q: Any
    do: Any
    lse_delta: Any
    k: Any
    v: Any
    tokens: Any
    ds: Any  # what the machine needs to multiply with dS


class _Barriers(NamedTuple):
    """Barriers: the queries' for each consumer, k's and v's for each stage."""

    queries: Any
    k: Pipeline
    v: Pipeline


_Pass = Context[_Smem, _Barriers]


def query_pass(
    operands: Operands, tokens: Tokens, rows: Rows, call: AttentionCall, tuning: MosaicBackwardTuning, interpret
) -> Float[Array, "B T N H"]:
    """dQ alone, scaled, in the query's dtype.

    Args:
      operands, tokens: padded to whole tiles.
      rows: the key/value tiles of each block of query rows.
      call: the call, with the lengths before padding.
      tuning: how the kernel runs.
      interpret: parameters of Pallas's interpreter, or None.
    """
    batch, q_len, num_heads, head_dim = operands.query.shape
    value_dim, dtype, machine = operands.value.shape[-1], operands.query.dtype, Hopper.of(interpret)
    num_consumers, block_kv, num_stages = tuning.num_warpgroups, tuning.block_kv_dq, tuning.num_stages_dq
    # Wide heads leave no room for as many value tiles. Values are read early in a step, and their stage is free sooner.
    num_value_stages = max(1, num_stages - 1) if tuning.one_gradient_each else num_stages
    return launch_pass(
        call,
        tuning,
        machine,
        TileScheduler(batch, num_heads, pl.cdiv(q_len, tuning.block_q_dq), tuning.heads_at_once * call.group_size),
        (*operands, None, rows, tokens),
        _Smem(
            q=matrix(num_consumers, WGMMA_ROWS, head_dim, dtype=dtype),
            do=matrix(num_consumers, WGMMA_ROWS, value_dim, dtype=dtype),
            lse_delta=vector(2, num_consumers, WGMMA_ROWS),
            k=matrix(num_stages, block_kv, head_dim, dtype=dtype),
            v=matrix(num_value_stages, block_kv, value_dim, dtype=dtype),
            tokens=token_memory(tokens, "key_value", num_stages, block_kv).get("token_smem"),
            ds=machine.operand_memory(num_consumers, WGMMA_ROWS, block_kv, dtype=dtype),
        ),
        _Barriers(
            queries=plgpu.Barrier(num_arrivals=4, num_barriers=num_consumers),
            k=Pipeline.memory(num_stages, num_consumers=num_consumers, num_copies=1 + len(tokens.given("key_value"))),
            v=Pipeline.memory(num_value_stages, num_consumers=num_consumers),
        ),
        producer=_load,
        consumers=[_differentiate],
        out_type=jax.ShapeDtypeStruct(operands.query.shape, dtype),
        block_length=tuning.block_q_dq,
        heads_per_block=1,
    )


def _load(context: _Pass) -> None:
    """Producer: copies the key/value tiles of the block into the rings."""
    tuning, gmem, smem = context.tuning, context.gmem, context.smem
    barriers, block, num_steps = context.barriers, context.block, context.num_steps
    kv_head = block.head // context.call.group_size

    @pl.loop(0, num_steps)
    def copy_tile(step):
        tile = pl.ds(context.walk.tile(step) * tuning.block_kv_dq, tuning.block_kv_dq)
        slot = barriers.k.slot(step)
        barriers.k.producer_acquire(step, slot)
        plgpu.copy_gmem_to_smem(gmem.key.at[block.batch, tile, kv_head], smem.k.at[slot], barriers.k.full.at[slot])
        # Before the wait for the values' stage: keys are full only with their tokens.
        copy_tokens(gmem.tokens, smem.tokens, "key_value", (block.batch, tile), slot, barriers.k.full.at[slot])
        slot = barriers.v.slot(step)
        barriers.v.producer_acquire(step, slot)
        plgpu.copy_gmem_to_smem(gmem.value.at[block.batch, tile, kv_head], smem.v.at[slot], barriers.v.full.at[slot])

    producer_tail(num_steps, barriers.k)
    producer_tail(num_steps, barriers.v)


def _differentiate(context: _Pass) -> None:
    """Consumer: dQ of 64 query rows."""
    call, tuning, gmem, smem = context.call, context.tuning, context.gmem, context.smem
    barriers, block, warpgroup = context.barriers, context.block, context.warpgroup
    first = block.number * tuning.block_q_dq + warpgroup * WGMMA_ROWS
    rows, full = pl.ds(first, WGMMA_ROWS), barriers.queries.at[warpgroup]
    for source, target in (
        (gmem.query.at[block.batch, rows, block.head], smem.q.at[warpgroup]),
        (gmem.d_output.at[block.batch, rows, block.head], smem.do.at[warpgroup]),
        (gmem.lse.at[block.batch, block.head, rows], smem.lse_delta.at[LSE, warpgroup]),
        (gmem.delta.at[block.batch, block.head, rows], smem.lse_delta.at[DELTA, warpgroup]),
    ):
        plgpu.copy_gmem_to_smem(source, target, full)
    mask = TileMask.load(context, "key_value", block.batch, rows, tuning.block_kv_dq)
    plgpu.barrier_wait(full)
    lse = load_vector(smem.lse_delta.at[LSE, warpgroup], rows=True)
    delta = load_vector(smem.lse_delta.at[DELTA, warpgroup], rows=True)

    def accumulate(dq_acc):
        pl.loop(0, context.num_steps)(functools.partial(_add_tile, context, mask, lse, delta, dq_acc))
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0) * call.scale
        smem.q.at[warpgroup][...] = dq.astype(call.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.q.at[warpgroup], gmem.d_query.at[block.batch, rows, block.head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(accumulate, accumulator(gmem.query.shape[-1]))


def _add_tile(context: _Pass, mask: TileMask, lse, delta, dq_acc, step) -> None:
    """Adds a tile's part to dQ: P = exp(QKᵀ − lse), dS = P∘(dO Vᵀ − delta), dQ += dS K."""
    smem, barriers, walk = context.smem, context.barriers, context.walk
    slot, v_slot = barriers.k.slot(step), barriers.v.slot(step)
    k, v = smem.k.at[slot], smem.v.at[v_slot]
    # The barrier makes the compiler compute the operands' addresses in each step. Kept across steps, the addresses of
    # wide operands fill a thread's registers.
    warpgroup = jax.lax.optimization_barrier(context.warpgroup)
    q, do = smem.q.at[warpgroup], smem.do.at[warpgroup]

    def differentiate(s_acc, dp_acc):
        plgpu.wgmma(dp_acc, do, v.transpose((1, 0)))
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        kv_first = walk.tile(step) * context.tuning.block_kv_dq
        keep_allowed = functools.partial(
            mask.apply, is_partial=step < walk.num_partial, column_first=kv_first, slot=slot
        )
        p, slope = probabilities(s, lse, context.call, keep_allowed, rows=True)
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        barriers.v.consumer_release(v_slot)
        ds = p * (dp - spread(delta, dp.shape, rows=True))
        return (ds if slope is None else ds * slope).astype(context.call.dtype)

    def multiply(s_acc):
        plgpu.wgmma(s_acc, q, k.transpose((1, 0)))
        barriers.v.consumer_wait(v_slot)
        return pl.run_scoped(functools.partial(differentiate, s_acc), tile_type)

    tile_type = accumulator(context.tuning.block_kv_dq)
    barriers.k.consumer_wait(slot)
    ds = pl.run_scoped(multiply, tile_type)
    context.machine.multiply(dq_acc, ds, k, None if smem.ds is None else smem.ds.at[context.warpgroup])
    plgpu.wgmma_wait(0)
    barriers.k.consumer_release(slot)
