"""dK, dV and, in the fused form, dQ, of one block of keys and values: the pass visits the block's query tiles.

The fused form computes dQ, too: the consumers exchange dS through shared memory, multiply it with the keys, and add the
product to a float32 dQ in global memory, in no fixed order. It takes five matmuls a tile. The split form leaves dQ to
`backward_dq`: it takes seven matmuls a tile, and gives the same bits in every run.

A persistent program computes one block after another. Its producer copies the next block's first query tile as soon as
the consumers have read the last one, and the next keys and values as soon as no product reads the last ones. Meanwhile
the last block's dK and dV leave through the memory of dS; in the split form, through that of the keys and values, and
the next ones wait for them.

The tensor cores also subtract delta from dP, and lse from S, except of wide heads: see
`kernels.backends.mosaic_gpu.offset_columns`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.backward_passes import DELTA, LSE, BackwardArrays, BackwardPass, launch_pass
from kernels.backends.mosaic_gpu.dkv_memory import (
    HEAD,
    KINDS,
    TILE,
    ConsumerKeys,
    DkvBarriers,
    DkvContext,
    is_tall,
    is_wide,
)
from kernels.backends.mosaic_gpu.dkv_steps import SplitStep, step_class
from kernels.backends.mosaic_gpu.offset_columns import DELTA_OFFSET, LSE_OFFSET, offset_weights
from kernels.backends.mosaic_gpu.preprocess import with_offsets
from kernels.backends.mosaic_gpu.tile_mask import TileMask
from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning
from kernels.call import AttentionCall
from kernels.hopper.machine import Hopper
from kernels.hopper.memory import zeroed_ref
from kernels.hopper.registers import WGMMA_ROWS, accumulator, zeros

# In query tiles, the largest first. A shift fits if the tiles that running blocks read and add to fit into half of the
# L2 cache.
_SHIFTS = (4, 2, 1)
_HALF_OF_L2_BYTES = 25_000_000


def backward_dkv(
    arrays: BackwardArrays, call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper, *, fused: bool
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"], Float[Array, "B T N H"] | None]:
    """dK, dV and, if fused, dQ, in float32 and without the scale. `arrays.rows` are each key block's query tiles."""
    if not is_wide(call):
        arrays = with_offsets(arrays, call, machine, adds_to_dq=fused)
    elif fused:
        arrays = arrays._replace(d_query=zeroed_ref(arrays.query.shape, jnp.float32, arrays.query))
    # Blocks that start with the same query tile would all add to the same part of dQ at once.
    same_start = call.mask.same_keys_for_all_queries and not (call.has_segment_ids or call.has_positions or call.bounds)
    form = step_class(call, fused=fused)
    dkv = BackwardPass(
        name="attention_backward" if fused else "attention_dkv",
        transposed=True,
        scratch=form.scratch(call, tuning, machine),
        producer=_load,
        consumers=[functools.partial(_differentiate, form)],
        finish=functools.partial(_finish, tuning),
        persistent=tuning.persistent,
        shift=block_shift(call, tuning) if same_start else None,
    )
    d_key, d_value = launch_pass(dkv, arrays, call, tuning, machine)
    return d_key, d_value, jax.freeze(arrays.d_query) if fused else None


def _load(context: DkvContext) -> None:
    """Producer: copies the block's keys and values, and query tiles into the ring."""
    tuning, gmem, smem, barriers = context.tuning, context.gmem, context.smem, context.barriers
    block, tiles, num_steps = context.block, context.tiles, context.num_steps
    num_kinds = 1 if gmem.rows.warpgroup_bounds is None else tuning.num_warpgroups
    kinds = [gmem.rows.read_kind(block.batch, block.number, warpgroup) for warpgroup in range(num_kinds)]

    def load_keys_and_values():
        context.load_keys_and_values(barriers.k, barriers.v)

    def wait_for_last_block():
        pl.when(context.last_num_steps > 0)(lambda: plgpu.barrier_wait(barriers.done))

    if tuning.persistent:
        # Each block begins with the ring's first stage, so that no register holds the stage of a block's first step.
        barriers.q.producer_tail(context.last_num_steps)
    else:
        load_keys_and_values()

    def copy_tile(step, found=None):
        slot = barriers.q.slot(step)
        if context.call.group_size == 1 and found is None:
            head, number, rank = block.head, tiles.tile(step), step
        else:
            head, number, rank = context.query_tile(step, found)
        queries, full = pl.ds(number * tuning.block_q, tuning.block_q), barriers.q.full.at[slot]
        barriers.q.producer_acquire(step, slot)
        # The consumers read these numbers, and so need no registers for them.
        smem.steps[slot, TILE] = number
        smem.steps[slot, HEAD] = head
        for warpgroup, kind in enumerate(kinds):
            smem.steps[slot, KINDS + warpgroup] = kind(number, rank < tiles.num_partial)
        plgpu.barrier_arrive(full)
        barriers.q.copy(gmem.query.at[block.batch, queries, head], smem.q, slot)
        if smem.offsets is not None:
            barriers.q.copy(gmem.offsets.at[block.batch, head, queries], smem.offsets, slot)
        for i, numbers in ((LSE, gmem.lse), (DELTA, gmem.delta)):
            if numbers is not None:
                barriers.q.copy(numbers.at[block.batch, head, queries], smem.lse_delta.at[i], slot)
        gmem.tokens.copy(smem.tokens, "query", (block.batch, queries), slot, full)
        if barriers.do.empty is not None:
            barriers.do.producer_acquire(step, slot)
        barriers.do.copy(gmem.d_output.at[block.batch, queries, head], smem.do, slot)

        if tuning.persistent:

            @pl.when(step == 0)
            def load_next_keys_and_values():
                # The last block's are read for longer than its query tiles.
                wait_for_last_block()
                load_keys_and_values()

    context.for_each_tile(copy_tile)
    if tuning.persistent:

        @pl.when(num_steps == 0)
        def skip_block():
            wait_for_last_block()
            # A waiting thread must see each completion of a barrier. This one has seen the last block's `done`, and so
            # the consumers may complete it once more.
            plgpu.barrier_arrive(barriers.k)
            plgpu.barrier_wait(barriers.done)


def _finish(tuning: MosaicBackwardTuning, barriers: DkvBarriers, num_steps) -> None:
    """Producer: waits until the consumers have read the last stages, and in a persistent program the last keys."""
    barriers.q.producer_tail(num_steps)
    if barriers.do.empty is not None:
        barriers.do.producer_tail(num_steps)
    if tuning.persistent:
        pl.when(num_steps > 0)(lambda: plgpu.barrier_wait(barriers.done))


def _differentiate(form: type[SplitStep], context: DkvContext) -> None:
    """Consumer: dK and dV of 64 keys, and its part of dQ."""
    call, tuning, gmem = context.call, context.tuning, context.gmem
    barriers, block, warpgroup = context.barriers, context.block, context.warpgroup
    place = pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)
    first = context.first + warpgroup * WGMMA_ROWS
    mask = TileMask.load(context, "query", block.batch, pl.ds(first, WGMMA_ROWS), tuning.block_kv)
    indices = {DELTA_OFFSET: gmem.delta, LSE_OFFSET: gmem.lse}
    weights = [offset_weights(index, call.dtype) for index, loaded in indices.items() if loaded is None]

    def visit_tiles():
        plgpu.barrier_wait(barriers.k)
        plgpu.barrier_wait(barriers.v)
        if tuning.persistent:
            # The copy engine has read what the last block left in the memory of dS.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.run_scoped(
            lambda dk_acc, dv_acc: _accumulate(
                form(context, ConsumerKeys(first, place, mask, weights, dk_acc, dv_acc))
            ),
            accumulator(gmem.key.shape[-1]),
            accumulator(gmem.value.shape[-1]),
        )

    if not tuning.persistent:
        visit_tiles()
        return
    # A persistent program's producer copies no keys for a block without tiles.
    pl.when(context.num_steps > 0)(visit_tiles)

    @pl.when(context.num_steps == 0)
    def write_zeros():
        plgpu.barrier_wait(barriers.k)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        dk, dv = (zeros(ref.shape[-1], jnp.float32) for ref in (gmem.d_key, gmem.d_value))
        _store_in_persistent_program(context, first, dk, dv)


def _accumulate(form: SplitStep) -> None:
    """Adds up the gradients over all query tiles, and writes them."""
    context, keys = form.context, form.keys
    tuning, gmem, smem = context.tuning, context.gmem, context.smem
    # One loop for all tile kinds and all heads: with one for each, registers spill.
    last = jax.lax.fori_loop(0, context.num_steps, form.add_tile, (jnp.int32(0), jnp.int32(0)))

    def load_dk():
        return plgpu.wgmma_accumulator_load(keys.dk_acc, wait_n=0) * context.call.scale

    def load_dv():
        return plgpu.wgmma_accumulator_load(keys.dv_acc, wait_n=0)

    def store_dv():
        context.store_gradient(load_dv(), smem.v.at[keys.place], gmem.d_value, keys.first)

    # No other consumer reads this one's values.
    if not is_tall(tuning) and not tuning.persistent:
        store_dv()
    form.finish(last)
    if tuning.persistent:
        _store_in_persistent_program(context, keys.first, load_dk(), load_dv())
        return
    if is_tall(tuning):
        store_dv()
    dk = load_dk()
    # Other consumers' dQ reads this one's keys.
    context.wait_for_consumers()
    context.store_gradient(dk, smem.k.at[keys.place], gmem.d_key, keys.first)


def _store_in_persistent_program(context: DkvContext, first, dk, dv) -> None:
    """Writes dK and dV of a consumer's keys, and lets the next block's keys and values arrive as soon as it can."""
    smem, gmem, place = context.smem, context.gmem, pl.ds(context.warpgroup * WGMMA_ROWS, WGMMA_ROWS)
    if smem.ds is None:
        context.store_gradient(dv, smem.v.at[place], gmem.d_value, first)
        context.store_gradient(dk, smem.k.at[place], gmem.d_key, first)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        context.wait_for_consumers()
        return
    # The gradients leave through the consumer's part of the memory of dS, some columns at a time.
    context.wait_for_consumers()
    num_buffers, num_parts, _, width = smem.ds.shape
    memory = [smem.ds.at[i, j, place] for i in range(num_buffers) for j in range(num_parts)]
    parts = [(x, ref, i) for x, ref in ((dv, gmem.d_value), (dk, gmem.d_key)) for i in range(0, x.shape[1], width)]
    for i, (gradient, ref, column) in enumerate(parts):
        if i >= len(memory):
            plgpu.wait_smem_to_gmem(len(memory) - 1, wait_read_only=True)
        context.store_gradient(gradient[:, column : column + width], memory[i % len(memory)], ref, first, column)


def block_shift(call: AttentionCall, tuning: MosaicBackwardTuning) -> int:
    """Query tiles by which the start of a block is behind that of the block before it.

    A fused backward adds to dQ. Blocks that start with the same query tile, and run at the same time, would all add to
    the same part of dQ at once.
    """
    # Queries and d_output have 16 bits, and dQ, which is added to, has 32.
    bytes_of_tile = tuning.block_q * (6 * call.head_dim + 2 * call.value_dim)
    num_tiles, num_running = pl.cdiv(call.q_len, tuning.block_q), call.target.num_multiprocessors or 1
    num_heads = min(tuning.num_l2_heads, call.batch * call.num_kv_heads)

    def fits(shift: int) -> bool:
        tiles_of_head = min(num_tiles, pl.cdiv(num_running, num_heads) * shift)
        return num_heads * tiles_of_head * bytes_of_tile <= _HALF_OF_L2_BYTES

    return next((shift for shift in _SHIFTS if fits(shift)), _SHIFTS[-1])
