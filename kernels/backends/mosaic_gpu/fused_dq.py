"""dQ of a fused backward: the exchange of dS, its product with the keys, and where the products of all blocks add up.

Each consumer computes 64 rows or some columns of a tile's dQ, from all consumers' dS. It adds them to global memory, by
the copy engine, in no fixed order: programs compute other blocks of the same head at the same time. Where a program
computes whole heads, it adds them in shared memory, and writes dQ once, when the head's last block is done.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.backends.mosaic_gpu.key_value_memory import ConsumerKeys, KeyValueContext
from kernels.backends.mosaic_gpu.registers import WGMMA_ROWS, accumulator, load_matrix, zeros


def write_ds(context: KeyValueContext, keys: ConsumerKeys, ds, step) -> None:
    """Gives a step's dS to all consumers."""
    memory = context.smem.ds.at[jax.lax.rem(step, context.smem.ds.shape[0])]
    for i in range(context.smem.ds.shape[1]):
        memory.at[i, keys.place][...] = ds[:, i * WGMMA_ROWS : (i + 1) * WGMMA_ROWS]
    plgpu.commit_smem()
    plgpu.barrier_arrive(context.barriers.ds_full)


def dq_accumulator(context: KeyValueContext) -> plgpu.WGMMAAccumulatorRef:
    """The accumulator of a consumer's part of a tile of dQ."""
    return accumulator(_dq_place(context)[1].size)


def start_dq(context: KeyValueContext, dq_acc, step) -> None:
    """Issues dQ = dSᵀ K of a step."""
    smem = context.smem
    _, columns = _dq_place(context)
    num_buffers, queries = smem.ds.shape[0], 0 if context.tuning.divides_dq_by_columns else context.warpgroup
    ds = smem.ds.at[jax.lax.rem(step + num_buffers, num_buffers), queries]
    plgpu.wgmma(dq_acc, ds.transpose((1, 0)), smem.k.at[:, columns])


def add_to_dq(context: KeyValueContext, dq, tile, predicate=None) -> None:
    """Adds the consumer's part of the dQ of a tile, a (number, head), in shared memory; or starts to, in global."""
    (number, head), (rows, columns) = tile, _dq_place(context)
    if context.tuning.whole_heads:
        _add_in_shared_memory(context.smem.dq.at[context.warpgroup, number], dq, predicate)
        return
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


def add_last_dq(context: KeyValueContext, tile, step, *, frees_ds: bool) -> None:
    """Adds the last step's part to dQ, and if `frees_ds` says that its dS is read."""
    plgpu.barrier_wait(context.barriers.ds_full)

    def multiply(dq_acc):
        start_dq(context, dq_acc, step)
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
        if frees_ds:
            plgpu.barrier_arrive(context.barriers.ds_read)
        add_to_dq(context, dq, tile)

    pl.run_scoped(multiply, dq_accumulator(context))


def zero_dq(context: KeyValueContext) -> None:
    """Begins a whole head: zeros the consumer's columns of its dQ."""
    dq = context.smem.dq.at[context.warpgroup]

    @pl.loop(0, dq.shape[0])
    def zero_tile(tile):
        dq.at[tile][...] = zeros(dq.shape[-1], jnp.float32)


def store_dq(context: KeyValueContext) -> None:
    """Ends a whole head: starts to write the consumer's columns of its dQ."""
    dq, out, block = context.smem.dq.at[context.warpgroup], context.smem.dq_out.at[context.warpgroup, 0], context.block
    _, columns = _dq_place(context)

    @pl.loop(0, dq.shape[0])
    def store_tile(tile):
        rounded = (load_matrix(dq.at[tile], shared=True) * context.call.scale).astype(context.call.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out[...] = rounded
        plgpu.commit_smem()
        rows = pl.ds(tile * WGMMA_ROWS, WGMMA_ROWS)
        plgpu.copy_smem_to_gmem(out, context.gmem.d_query.at[block.batch, rows, block.head, columns])


def _add_in_shared_memory(memory, dq, predicate) -> None:
    """Adds to what the same threads have stored there: no other thread reads it."""

    def add():
        memory[...] = load_matrix(memory, shared=True) + dq

    if predicate is None:
        add()
    else:
        pl.when(predicate)(add)


def _dq_place(context: KeyValueContext) -> tuple[Any, Any]:
    """Rows and columns of a tile of dQ that the consumer computes."""
    by_columns = context.tuning.divides_dq_by_columns
    num_columns = context.smem.k.shape[-1] // (context.tuning.num_warpgroups if by_columns else 1)
    rows = pl.ds(0 if by_columns else context.warpgroup * WGMMA_ROWS, WGMMA_ROWS)
    return rows, pl.ds(context.warpgroup * num_columns if by_columns else 0, num_columns)
