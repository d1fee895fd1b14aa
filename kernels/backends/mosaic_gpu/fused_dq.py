"""dQ of a fused backward: the exchange of dS, its product with the keys, and where the products of all blocks add up.

Each consumer computes 64 rows or some columns of a tile's dQ, from all consumers' dS. It adds them to global memory, by
the copy engine, in no fixed order: programs compute other blocks of the same head at the same time.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.backends.mosaic_gpu.dkv_memory import ConsumerKeys, DkvContext
from kernels.hopper.registers import WGMMA_ROWS, accumulator


def write_ds(context: DkvContext, keys: ConsumerKeys, ds, step) -> None:
    """Gives a step's dS to all consumers."""
    memory = context.smem.ds.at[jax.lax.rem(step, context.smem.ds.shape[0])]
    for i in range(context.smem.ds.shape[1]):
        memory.at[i, keys.place][...] = ds[:, i * WGMMA_ROWS : (i + 1) * WGMMA_ROWS]
    plgpu.commit_smem()
    plgpu.barrier_arrive(context.barriers.ds_full)


def dq_accumulator(context: DkvContext) -> plgpu.WGMMAAccumulatorRef:
    """The accumulator of a consumer's part of a tile of dQ."""
    return accumulator(_dq_place(context)[1].size)


def start_dq(context: DkvContext, dq_acc, step) -> None:
    """Issues dQ = dSᵀ K of a step."""
    smem = context.smem
    _, columns = _dq_place(context)
    num_buffers, queries = smem.ds.shape[0], 0 if context.tuning.divides_dq_by_columns else context.warpgroup
    ds = smem.ds.at[jax.lax.rem(step + num_buffers, num_buffers), queries]
    plgpu.wgmma(dq_acc, ds.transpose((1, 0)), smem.k.at[:, columns])


def add_to_dq(context: DkvContext, dq, tile, predicate=None) -> None:
    """Starts to add the consumer's part of the dQ of a tile, a (number, head), in global memory."""
    (number, head), (rows, columns) = tile, _dq_place(context)
    rows = pl.ds(number * context.tuning.block_q + rows.start, WGMMA_ROWS)
    _, num_buffers, _, width = context.smem.dq_out.shape
    for i, first in enumerate(range(0, columns.size, width)):
        dq_smem = context.smem.dq_out.at[context.warpgroup, i % num_buffers]
        # The copy engine has read what the buffer held.
        if i == 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        elif i >= num_buffers:
            plgpu.wait_smem_to_gmem(num_buffers - 1, wait_read_only=True)
        dq_smem[...] = dq[:, first : first + width]
        plgpu.commit_smem()
        target = context.gmem.d_query.at[context.block.batch, rows, head, pl.ds(columns.start + first, width)]
        plgpu.copy_smem_to_gmem(dq_smem, target, predicate, reduction_op="add")


def add_last_dq(context: DkvContext, tile, step, *, frees_ds: bool) -> None:
    """Adds the last step's part to dQ, and if `frees_ds` says that its dS is read."""
    plgpu.barrier_wait(context.barriers.ds_full)

    def multiply(dq_acc):
        start_dq(context, dq_acc, step)
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
        if frees_ds:
            plgpu.barrier_arrive(context.barriers.ds_read)
        add_to_dq(context, dq, tile)

    pl.run_scoped(multiply, dq_accumulator(context))


def finish_dq(context: DkvContext, last) -> None:
    """Adds the part of the block's last step, of the tile `last`, to dQ."""
    num_steps = context.num_steps
    pl.when(num_steps > 0)(lambda: add_last_dq(context, last, num_steps - 1, frees_ds=False))
    if context.smem.ds.shape[0] == 2:
        # A waiting thread must see each completion of a barrier.
        pl.when(num_steps > 1)(lambda: plgpu.barrier_wait(context.barriers.ds_read))


def _dq_place(context: DkvContext) -> tuple[Any, Any]:
    """Rows and columns of a tile of dQ that the consumer computes."""
    by_columns = context.tuning.divides_dq_by_columns
    num_columns = context.smem.k.shape[-1] // (context.tuning.num_warpgroups if by_columns else 1)
    rows = pl.ds(0 if by_columns else context.warpgroup * WGMMA_ROWS, WGMMA_ROWS)
    return rows, pl.ds(context.warpgroup * num_columns if by_columns else 0, num_columns)
