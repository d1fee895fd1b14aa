"""A step of the pass over blocks of keys: what a query tile adds to dK, dV and, in the fused form, dQ.

A consumer computes the transposed tile, with its 64 keys as rows. So P and dS come out in registers as operands of dV
and dK. Wide heads have a step of their own.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.backends.mosaic_gpu.backward_passes import DELTA, LSE
from kernels.backends.mosaic_gpu.fused_dq import add_last_dq, add_to_dq, dq_accumulator, start_dq, write_ds
from kernels.backends.mosaic_gpu.key_value_memory import (
    HEAD,
    KINDS,
    TILE,
    ConsumerKeys,
    KeyValueContext,
    QueryTile,
    is_tall,
    is_wide,
)
from kernels.backends.mosaic_gpu.offset_columns import DELTA_OFFSET, LSE_OFFSET
from kernels.hopper.machine import add_product
from kernels.hopper.registers import WGMMA_ROWS, accumulator, load_vector, spread, zeros
from kernels.masks import TileKind


def next_tile(context: KeyValueContext, keys: ConsumerKeys, step, last):
    """Adds a tile's part to dK and dV, and in the fused form the part of the last step's tile to dQ.

    Args:
      step: number of the step in its block.
      last: the last step's tile, a (number, head).

    Returns:
      This step's tile.
    """
    if is_wide(context.call):
        return _next_wide_tile(context, keys, step, last)
    return _next_usual_tile(context, keys, step, last)


def _next_usual_tile(context: KeyValueContext, keys: ConsumerKeys, step, last):
    tuning, smem, barriers, warpgroup = context.tuning, context.smem, context.barriers, context.warpgroup
    slot = barriers.q.slot(step)
    k, v = _own_keys(context, keeps_addresses=is_tall(tuning) and not tuning.persistent)
    barriers.q.consumer_wait(slot)
    tile = _read_tile(context, slot)

    def differentiate():
        def compute(s_acc, dp_acc):
            _start_s_and_dp(context, keys, tile, k, v, s_acc, dp_acc)
            return _p_and_ds(context, keys, tile, s_acc, dp_acc)

        tile_type = accumulator(tuning.block_q)
        return pl.run_scoped(compute, tile_type, tile_type)

    def add_products(p, ds):
        if not is_tall(tuning):
            add_product(keys.dv_acc, p, tile.do, smem.operand, warpgroup)
        add_product(keys.dk_acc, ds, tile.q, smem.operand, warpgroup)

    # Where a tile is passed over, too, a waiting thread must see each completion of a barrier.
    if smem.ds is None:

        def add_tile():
            add_products(*differentiate())
            plgpu.wgmma_wait(0)

        _unless_empty(context, tile.kind, add_tile, lambda: barriers.do.consumer_wait(slot))
    else:

        def pass_over():
            barriers.do.consumer_wait(slot)
            # Their products are computed: left out, they would have the accumulators pass through the choice.
            return (zeros(tuning.block_q, context.call.dtype),) * 2

        p, ds = _unless_empty(context, tile.kind, differentiate, pass_over)
        _give_ds_and_add_last_dq(context, keys, ds, step, last, functools.partial(add_products, p, ds))
    barriers.q.consumer_release(slot)
    return tile.number, tile.head


def _give_ds_and_add_last_dq(context: KeyValueContext, keys: ConsumerKeys, ds, step, last, add_products) -> None:
    """Gives dS to the other consumers, issues products, and adds the part of the last step, of the tile `last`, to dQ.

    The last step's dQ is computed in this one. So consumers may run half a step apart, and one computes P while the
    other multiplies.
    """
    barriers = context.barriers
    pl.when(step > 0)(lambda: plgpu.barrier_wait(barriers.ds_full))
    if barriers.ds_read is not None:
        pl.when(step > 1)(lambda: plgpu.barrier_wait(barriers.ds_read))
    write_ds(context, keys, ds, step)

    def multiply_all(dq_acc):
        start_dq(context, dq_acc, step - 1)
        add_products()
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1 if is_tall(context.tuning) else 2)
        if barriers.ds_read is not None:
            pl.when(step > 0)(lambda: plgpu.barrier_arrive(barriers.ds_read))
        add_to_dq(context, dq, last, predicate=step > 0)
        plgpu.wgmma_wait(0)

    pl.run_scoped(multiply_all, dq_accumulator(context))


def _next_wide_tile(context: KeyValueContext, keys: ConsumerKeys, step, last):
    """`next_tile` with registers for one float32 tile beside dK and dV; see `is_wide`."""
    call, tuning, smem, barriers = context.call, context.tuning, context.smem, context.barriers
    warpgroup, slot = context.warpgroup, barriers.q.slot(step)
    k, v = _own_keys(context, keeps_addresses=False)
    if smem.ds is not None:
        # Between two tiles, so that its accumulator gets the registers of S and dP.
        pl.when(step > 0)(functools.partial(add_last_dq, context, last, step - 1, frees_ds=True))
    barriers.q.consumer_wait(slot)
    _, number, head, kind, q, do = _read_tile(context, slot)
    tile_type = accumulator(tuning.block_q)

    def compute_p(s_acc):
        plgpu.wgmma(s_acc, k, q.transpose((1, 0)))
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
        lse = load_vector(smem.lse_delta.at[LSE, slot], rows=False)
        p, slope = keys.mask.probabilities(s, lse, kind == TileKind.PARTIAL, number * tuning.block_q, slot)
        # The barriers make the compiler round here, so that dP gets the registers of S.
        rounded = jax.lax.optimization_barrier(p.astype(call.dtype))
        return rounded, rounded if slope is None else jax.lax.optimization_barrier((p * slope).astype(call.dtype))

    def compute_ds(p, p_times_slope, dp_acc):
        add_product(keys.dv_acc, p, do, smem.operand, warpgroup)
        plgpu.wgmma(dp_acc, v, do.transpose((1, 0)))
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        delta = load_vector(smem.lse_delta.at[DELTA, slot], rows=False)
        dp = dp - spread(delta, dp.shape, rows=False)
        return (p_times_slope.astype(jnp.float32) * dp).astype(call.dtype)

    def give_ds(ds):
        barriers.do.consumer_release(slot)
        if smem.ds is not None:
            pl.when(step > 0)(lambda: plgpu.barrier_wait(barriers.ds_read))
            write_ds(context, keys, ds, step)

    def differentiate():
        p, p_times_slope = pl.run_scoped(compute_p, tile_type)
        barriers.do.consumer_wait(slot)
        ds = pl.run_scoped(functools.partial(compute_ds, p, p_times_slope), tile_type)
        give_ds(ds)
        add_product(keys.dk_acc, ds, q, smem.operand, warpgroup)
        plgpu.wgmma_wait(0)

    def pass_over():
        # See `_next_usual_tile`.
        barriers.do.consumer_wait(slot)
        give_ds(zeros(tuning.block_q, call.dtype))

    _unless_empty(context, kind, differentiate, pass_over)
    barriers.q.consumer_release(slot)
    return number, head


def _own_keys(context: KeyValueContext, *, keeps_addresses: bool) -> tuple[Any, Any]:
    """A consumer's keys and values in shared memory.

    Their addresses, kept across steps, take one register per 16 columns (docs/hopper_kernels.md). Else the barrier
    makes the compiler compute them in each step.
    """
    warpgroup = context.warpgroup if keeps_addresses else jax.lax.optimization_barrier(context.warpgroup)
    rows = pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)
    return context.smem.k.at[rows], context.smem.v.at[rows]


def _read_tile(context: KeyValueContext, slot) -> QueryTile:
    """A stage's query tile, which has arrived, and what the producer says of it."""
    smem = context.smem
    head = smem.steps[slot, HEAD] if context.call.group_size > 1 else context.block.head
    own_kind = KINDS if context.gmem.rows.warpgroup_bounds is None else KINDS + context.warpgroup
    return QueryTile(slot, smem.steps[slot, TILE], head, smem.steps[slot, own_kind], smem.q.at[slot], smem.do.at[slot])


def _unless_empty(context: KeyValueContext, kind, differentiate, pass_over) -> Any:
    """Differentiates a tile, or passes over it if it is EMPTY to the consumer."""
    if context.gmem.rows.warpgroup_bounds is None:
        return differentiate()
    return jax.lax.cond(kind == TileKind.EMPTY, pass_over, differentiate)


def _start_s_and_dp(context: KeyValueContext, keys: ConsumerKeys, tile: QueryTile, k, v, s_acc, dp_acc) -> None:
    """Issues the products S = KQᵀ and dP = V dOᵀ of a tile, less the offsets lse and delta."""
    smem = context.smem

    def subtract(index, acc):
        offsets = smem.offsets.at[tile.slot].transpose((1, 0))
        add_product(acc, keys.offset_weights[index], offsets, smem.weights, context.warpgroup)

    if smem.lse_delta is None:
        subtract(LSE_OFFSET, s_acc)
    plgpu.wgmma(s_acc, k, tile.q.transpose((1, 0)))
    subtract(DELTA_OFFSET, dp_acc)
    context.barriers.do.consumer_wait(tile.slot)
    plgpu.wgmma(dp_acc, v, tile.do.transpose((1, 0)))


def _p_and_ds(context: KeyValueContext, keys: ConsumerKeys, tile: QueryTile, s_acc, dp_acc) -> tuple[Any, Any]:
    """P = exp(KQᵀ − lse) and dS = P∘(V dOᵀ − delta) of a tile, in the matmul's dtype. Tall tiles: adds P dO to dV."""
    call, tuning, smem = context.call, context.tuning, context.smem
    # dP's product may still be on its way.
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
    lse = None if smem.lse_delta is None else load_vector(smem.lse_delta.at[LSE, tile.slot], rows=False)
    p, slope = keys.mask.probabilities(s, lse, tile.kind == TileKind.PARTIAL, tile.number * tuning.block_q, tile.slot)
    operand = p.astype(call.dtype)
    if is_tall(tuning):
        add_product(keys.dv_acc, operand, tile.do, smem.operand, context.warpgroup)
    ds = p * plgpu.wgmma_accumulator_load(dp_acc, wait_n=is_tall(tuning))
    ds = ds if slope is None else ds * slope
    return operand, ds.astype(call.dtype)
