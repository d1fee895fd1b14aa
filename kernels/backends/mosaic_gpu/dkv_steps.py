"""A step of the pass over blocks of keys: what a query tile adds to dK, dV and, in the fused form, dQ.

A consumer computes the transposed tile, with its 64 keys as rows. So P and dS come out in registers as operands of dV
and dK. Each form has a step of its own, with its own shared memory and barriers: split and fused, and both of wide
heads.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.backends.mosaic_gpu.backward_passes import DELTA, LSE
from kernels.backends.mosaic_gpu.dkv_memory import (
    HEAD,
    KINDS,
    TILE,
    ConsumerKeys,
    DkvBarriers,
    DkvContext,
    DkvSmem,
    DqExchange,
    QueryTile,
    dkv_scratch,
    dq_columns,
    is_tall,
    is_wide,
)
from kernels.backends.mosaic_gpu.fused_dq import add_last_dq, add_to_dq, dq_accumulator, finish_dq, start_dq, write_ds
from kernels.backends.mosaic_gpu.offset_columns import DELTA_OFFSET, LSE_OFFSET
from kernels.backends.mosaic_gpu.tile_mask import num_token_arrays
from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning
from kernels.call import AttentionCall
from kernels.hopper.machine import Hopper, add_product
from kernels.hopper.registers import WGMMA_ROWS, accumulator, load_vector, spread, zeros
from kernels.masks import TileKind


@dataclass(frozen=True)
class SplitStep:
    """A step of the split form: dK and dV of head dims up to 128.

    Attributes:
      context: of the block.
      keys: the consumer's.
    """

    context: DkvContext
    keys: ConsumerKeys

    @staticmethod
    def scratch(call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper) -> tuple[DkvSmem, DkvBarriers]:
        """Shared memory and barriers of the form."""
        return dkv_scratch(call, tuning, machine, wide=False, exchange=None)

    def add_tile(self, step, last):
        """Adds a tile's part to dK and dV, and in a fused form the part of the last step's tile to dQ.

        Args:
          step: number of the step in its block.
          last: the last step's tile, a (number, head).

        Returns:
          This step's tile.
        """
        barriers, tuning = self.context.barriers, self.context.tuning
        slot = barriers.q.slot(step)
        k, v = _own_keys(self.context, keeps_addresses=is_tall(tuning) and not tuning.persistent)
        barriers.q.consumer_wait(slot)
        tile = _read_tile(self.context, slot)
        self._add(tile, k, v, step, last)
        barriers.q.consumer_release(slot)
        return tile.number, tile.head

    def finish(self, last) -> None:
        """Adds what the last step's tile, a (number, head), leaves to be added to dQ."""

    def _add(self, tile: QueryTile, k, v, step, last) -> None:
        def add():
            self._add_products(tile, *self._differentiate(tile, k, v))
            plgpu.wgmma_wait(0)

        # Where a tile is passed over, too, a waiting thread must see each completion of a barrier.
        _unless_empty(self.context, tile.kind, add, lambda: self.context.barriers.do.consumer_wait(tile.slot))

    def _differentiate(self, tile: QueryTile, k, v) -> tuple[Any, Any]:
        """P and dS of a tile, in the matmul's dtype."""

        def compute(s_acc, dp_acc):
            _start_s_and_dp(self.context, self.keys, tile, k, v, s_acc, dp_acc)
            return _p_and_ds(self.context, self.keys, tile, s_acc, dp_acc)

        tile_type = accumulator(self.context.tuning.block_q)
        return pl.run_scoped(compute, tile_type, tile_type)

    def _add_products(self, tile: QueryTile, p, ds) -> None:
        smem, warpgroup = self.context.smem, self.context.warpgroup
        if not is_tall(self.context.tuning):
            add_product(self.keys.dv_acc, p, tile.do, smem.operand, warpgroup)
        add_product(self.keys.dk_acc, ds, tile.q, smem.operand, warpgroup)


@dataclass(frozen=True)
class FusedStep(SplitStep):
    """A step of the fused form: dK and dV of head dims up to 128, and dQ.

    The last step's dQ is computed in this one. So consumers may run half a step apart, and one computes P while the
    other multiplies.
    """

    @staticmethod
    def scratch(call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper) -> tuple[DkvSmem, DkvBarriers]:
        columns = dq_columns(call, tuning)
        # Tall tiles leave room for two buffers of dS.
        exchange = DqExchange(2 if is_tall(tuning) else 3, columns, (1, WGMMA_ROWS, columns))
        return dkv_scratch(call, tuning, machine, wide=False, exchange=exchange)

    def finish(self, last) -> None:
        finish_dq(self.context, last)

    def _add(self, tile: QueryTile, k, v, step, last) -> None:
        context, barriers = self.context, self.context.barriers

        def pass_over():
            # A waiting thread must see each completion of a barrier.
            barriers.do.consumer_wait(tile.slot)
            # Their products are computed: left out, they would have the accumulators pass through the choice.
            return (zeros(context.tuning.block_q, context.call.dtype),) * 2

        p, ds = _unless_empty(context, tile.kind, lambda: self._differentiate(tile, k, v), pass_over)
        pl.when(step > 0)(lambda: plgpu.barrier_wait(barriers.ds_full))
        if barriers.ds_read is not None:
            pl.when(step > 1)(lambda: plgpu.barrier_wait(barriers.ds_read))
        write_ds(context, self.keys, ds, step)

        def multiply_all(dq_acc):
            start_dq(context, dq_acc, step - 1)
            self._add_products(tile, p, ds)
            dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1 if is_tall(context.tuning) else 2)
            if barriers.ds_read is not None:
                pl.when(step > 0)(lambda: plgpu.barrier_arrive(barriers.ds_read))
            add_to_dq(context, dq, last, predicate=step > 0)
            plgpu.wgmma_wait(0)

        pl.run_scoped(multiply_all, dq_accumulator(context))


@dataclass(frozen=True)
class WideSplitStep(SplitStep):
    """A step of the split form with registers for one float32 tile beside dK and dV: see `is_wide`."""

    @staticmethod
    def scratch(call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper) -> tuple[DkvSmem, DkvBarriers]:
        return dkv_scratch(call, tuning, machine, wide=True, exchange=None)

    def add_tile(self, step, last):
        context, barriers = self.context, self.context.barriers
        slot = barriers.q.slot(step)
        k, v = _own_keys(context, keeps_addresses=False)
        self._add_last_dq(step, last)
        barriers.q.consumer_wait(slot)
        tile = _read_tile(context, slot)

        def pass_over():
            # A waiting thread must see each completion of a barrier.
            barriers.do.consumer_wait(slot)
            self._give_ds(slot, zeros(context.tuning.block_q, context.call.dtype), step)

        _unless_empty(context, tile.kind, lambda: self._add_wide(tile, k, v, step), pass_over)
        barriers.q.consumer_release(slot)
        return tile.number, tile.head

    def _add_last_dq(self, step, last) -> None:
        """Fused: adds the last step's part to dQ."""

    def _give_ds(self, slot, ds, step) -> None:
        """Frees the stage of do; fused: gives dS to the other consumers."""
        self.context.barriers.do.consumer_release(slot)

    def _add_wide(self, tile: QueryTile, k, v, step) -> None:
        context, keys, smem = self.context, self.keys, self.context.smem
        call, warpgroup, slot = context.call, context.warpgroup, tile.slot
        tile_type = accumulator(context.tuning.block_q)

        def compute_p(s_acc):
            plgpu.wgmma(s_acc, k, tile.q.transpose((1, 0)))
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
            lse = load_vector(smem.lse_delta.at[LSE, slot], rows=False)
            is_partial, first = tile.kind == TileKind.PARTIAL, tile.number * context.tuning.block_q
            p, slope = keys.mask.probabilities(s, lse, is_partial, first, slot)
            # The barriers make the compiler round here, so that dP gets the registers of S.
            rounded = jax.lax.optimization_barrier(p.astype(call.dtype))
            return rounded, rounded if slope is None else jax.lax.optimization_barrier((p * slope).astype(call.dtype))

        def compute_ds(p, p_times_slope, dp_acc):
            add_product(keys.dv_acc, p, tile.do, smem.operand, warpgroup)
            plgpu.wgmma(dp_acc, v, tile.do.transpose((1, 0)))
            dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
            delta = load_vector(smem.lse_delta.at[DELTA, slot], rows=False)
            dp = dp - spread(delta, dp.shape, rows=False)
            return (p_times_slope.astype(jnp.float32) * dp).astype(call.dtype)

        p, p_times_slope = pl.run_scoped(compute_p, tile_type)
        context.barriers.do.consumer_wait(slot)
        ds = pl.run_scoped(functools.partial(compute_ds, p, p_times_slope), tile_type)
        self._give_ds(slot, ds, step)
        add_product(keys.dk_acc, ds, tile.q, smem.operand, warpgroup)
        plgpu.wgmma_wait(0)


@dataclass(frozen=True)
class WideFusedStep(WideSplitStep):
    """The same of the fused form. dQ is computed between two tiles, so that it gets the registers of S and dP."""

    @staticmethod
    def scratch(call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper) -> tuple[DkvSmem, DkvBarriers]:
        columns = dq_columns(call, tuning)
        # There is room for one buffer of dS, and beside tokens not for all columns of dQ at a time.
        dq_out = (2, WGMMA_ROWS, 32) if num_token_arrays(call, "query") else (1, WGMMA_ROWS, columns)
        return dkv_scratch(call, tuning, machine, wide=True, exchange=DqExchange(1, columns, dq_out))

    def finish(self, last) -> None:
        finish_dq(self.context, last)

    def _add_last_dq(self, step, last) -> None:
        pl.when(step > 0)(functools.partial(add_last_dq, self.context, last, step - 1, frees_ds=True))

    def _give_ds(self, slot, ds, step) -> None:
        barriers = self.context.barriers
        barriers.do.consumer_release(slot)
        pl.when(step > 0)(lambda: plgpu.barrier_wait(barriers.ds_read))
        write_ds(self.context, self.keys, ds, step)


def step_class(call: AttentionCall, *, fused: bool) -> type[SplitStep]:
    """The steps of a call's pass over blocks of keys."""
    if is_wide(call):
        return WideFusedStep if fused else WideSplitStep
    return FusedStep if fused else SplitStep


def _own_keys(context: DkvContext, *, keeps_addresses: bool) -> tuple[Any, Any]:
    """A consumer's keys and values in shared memory.

    Their addresses, kept across steps, take one register per 16 columns (docs/hopper_kernels.md). Else the barrier
    makes the compiler compute them in each step.
    """
    warpgroup = context.warpgroup if keeps_addresses else jax.lax.optimization_barrier(context.warpgroup)
    rows = pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)
    return context.smem.k.at[rows], context.smem.v.at[rows]


def _read_tile(context: DkvContext, slot) -> QueryTile:
    """A stage's query tile, which has arrived, and what the producer says of it."""
    smem = context.smem
    head = smem.steps[slot, HEAD] if context.call.group_size > 1 else context.block.head
    own_kind = KINDS if context.gmem.rows.warpgroup_bounds is None else KINDS + context.warpgroup
    return QueryTile(slot, smem.steps[slot, TILE], head, smem.steps[slot, own_kind], smem.q.at[slot], smem.do.at[slot])


def _unless_empty(context: DkvContext, kind, differentiate, pass_over) -> Any:
    """Differentiates a tile, or passes over it if it is EMPTY to the consumer."""
    if context.gmem.rows.warpgroup_bounds is None:
        return differentiate()
    return jax.lax.cond(kind == TileKind.EMPTY, pass_over, differentiate)


def _start_s_and_dp(context: DkvContext, keys: ConsumerKeys, tile: QueryTile, k, v, s_acc, dp_acc) -> None:
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


def _p_and_ds(context: DkvContext, keys: ConsumerKeys, tile: QueryTile, s_acc, dp_acc) -> tuple[Any, Any]:
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
