"""dK, dV and, in the fused form, dQ, of one block of keys and values: the pass visits the block's query tiles.

The pass computes the transposed tile, with keys as rows. So P and dS come out in registers as operands of dV and dK.
The fused form computes dQ, too: the consumers exchange dS through shared memory, multiply it with the keys, and add the
product to a float32 dQ in global memory, in no fixed order. It takes five matmuls a tile. The split form leaves dQ to
`query_pass`: it takes seven matmuls a tile, and gives the same bits in every run.

The tensor cores also subtract delta from dP, and lse from S. Queries are a tile's columns here, so each thread would
have to load both numbers for every column that it holds, and the bandwidth of shared memory bounds the pass
(docs/hopper_kernels.md). Instead, queries have 16 more columns, which hold delta and lse, and keys have constants in
these columns; the accumulators start from their product. A 16-bit number holds 8 or 11 bits of a float32. So an offset
is a sum of four such numbers, each times a weight of its own, which gives float16 the range. The weights are the keys'
constants.
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

from kernels.backends.mosaic_gpu.backward_passes import BackwardArrays, BackwardContext, launch_pass, padded_head_dims
from kernels.backends.mosaic_gpu.machine import Hopper, add_product
from kernels.backends.mosaic_gpu.memory import Pipeline, matrix, zeroed_ref
from kernels.backends.mosaic_gpu.registers import WGMMA_ROWS, accumulator, load_vector
from kernels.backends.mosaic_gpu.softmax import log2_scale
from kernels.backends.mosaic_gpu.tile_mask import TileMask, num_token_arrays, token_memory
from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning
from kernels.call import AttentionCall

# The indices of delta and lse as offsets, columns of one product of 16-bit numbers, and the weight of each column.
_DELTA, _LSE = 0, 1
_NUM_COLUMNS = 16
_OFFSET_WEIGHTS = (2.0**15, 2.0**4, 2.0**-7, 2.0**-14)
# With other scales, lse over the scale may be out of float16's range, or too small for it. Then lse is subtracted after
# the scale.
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-16, 2.0**10
# Indices of what the producer tells the consumers of a step.
_TILE, _IS_PARTIAL, _HEAD = range(3)
# Where all blocks would start with the same query tile, each starts so many tiles after the one before it: the most
# with which what blocks that run at the same time read and add to fits into half of the L2 cache, or else the least.
_SHIFTS = (4, 2, 1)
_HALF_OF_L2_BYTES = 25_000_000


KeyValueSmem = namedtuple("KeyValueSmem", "k v q do offsets lse steps tokens ds dq operand weights")


class KeyValueBarriers(NamedTuple):
    """Barriers: k and v are full once; q and do share the stages that q's `empty` frees."""

    k: Any
    v: Any
    q: Pipeline
    do: Pipeline
    done: Any
    ds_full: Any  # all consumers have written a step's dS
    ds_read: Any  # all consumers have read it; None with three buffers


KeyValueContext = BackwardContext[KeyValueSmem, KeyValueBarriers]


class _Tile(NamedTuple):
    """A query tile, as a consumer sees it."""

    slot: Any
    number: Any
    is_partial: Any
    q: Any
    do: Any


class _Keys(NamedTuple):
    """A consumer's 64 keys: index of the first, place in the block, mask, weights of offsets, accumulators."""

    first: Any
    place: Any
    mask: TileMask
    offset_weights: list[jax.Array]
    dk_acc: Any
    dv_acc: Any


def key_value_scratch(
    call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper, *, fused: bool
) -> tuple[KeyValueSmem, KeyValueBarriers]:
    """Shared memory and barriers: k and v of the block, rings of stages for q, do and what belongs to them."""
    head_dim, value_dim = padded_head_dims(call, tuning)
    num_consumers, num_stages = tuning.num_warpgroups, tuning.num_stages
    block_q, block_kv, lse_is_offset = tuning.block_q, tuning.block_kv, _lse_is_offset(call)
    dq_columns = head_dim // num_consumers if tuning.divides_dq_by_columns else head_dim
    # A step's dS is read in the next step. With three buffers, a consumer that writes a fourth dS knows that the other
    # one has read the first: it has written the third since. Tall tiles leave room for two, and a barrier tells it.
    num_ds_buffers = 2 if _is_tall(tuning) else 3
    smem = KeyValueSmem(
        k=matrix(block_kv, head_dim, dtype=call.dtype),
        v=matrix(block_kv, value_dim, dtype=call.dtype),
        q=matrix(num_stages, block_q, head_dim, dtype=call.dtype),
        do=matrix(num_stages, block_q, value_dim, dtype=call.dtype),
        offsets=matrix(num_stages, block_q, _NUM_COLUMNS, dtype=call.dtype),
        lse=None if lse_is_offset else plgpu.SMEM((num_stages, block_q), jnp.float32),
        steps=plgpu.SMEM((num_stages, 3), jnp.int32),
        tokens=token_memory(call, num_stages, block_q),
        ds=matrix(num_ds_buffers, block_kv, block_q, dtype=call.dtype) if fused else None,
        dq=matrix(num_consumers, WGMMA_ROWS, dq_columns, dtype=jnp.float32) if fused else None,
        # In the interpreter alone: operands that a GPU's matmuls take from registers.
        operand=machine.operand_memory(num_consumers, WGMMA_ROWS, block_q, dtype=call.dtype),
        weights=machine.operand_memory(num_consumers, WGMMA_ROWS, _NUM_COLUMNS, dtype=call.dtype),
    )
    num_copies = 3 + (not lse_is_offset) + num_token_arrays(call)
    return smem, KeyValueBarriers(
        k=plgpu.Barrier(),
        v=plgpu.Barrier(),
        q=Pipeline.memory(num_stages, num_consumers=num_consumers, num_copies=num_copies),
        do=Pipeline(plgpu.Barrier(num_barriers=num_stages)),
        done=plgpu.Barrier(num_arrivals=num_consumers),
        ds_full=plgpu.Barrier(num_arrivals=num_consumers) if fused else None,
        ds_read=plgpu.Barrier(num_arrivals=num_consumers) if fused and num_ds_buffers == 2 else None,
    )


def key_value_pass(
    arrays: BackwardArrays, call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper, *, fused: bool
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"], Float[Array, "B T N H"] | None]:
    """dK, dV and, if fused, the float32 dQ without the scale. `arrays.rows` are each key block's query tiles."""
    lse_is_offset = _lse_is_offset(call)
    offsets = [-arrays.delta, *([arrays.lse * (-1 / log2_scale(call))] if lse_is_offset else [])]
    d_query = zeroed_ref(arrays.query.shape, jnp.float32, arrays.query) if fused else None
    arrays = arrays._replace(
        lse=None if lse_is_offset else arrays.lse,
        delta=None,
        offsets=offset_columns(*offsets, dtype=call.dtype),
        d_query=d_query,
    )
    # Blocks that start with the same query tile would all add to the same part of dQ at once.
    same_start = call.mask.same_keys_for_all_queries and not num_token_arrays(call)
    scratch = key_value_scratch(call, tuning, machine, fused=fused)
    shift = _shift(call, tuning) if same_start else None
    d_key, d_value = launch_pass(
        arrays,
        call,
        tuning,
        machine,
        scratch,
        _load,
        [_differentiate],
        name="attention_backward" if fused else "attention_dkv",
        transposed=True,
        shift=shift,
    )
    return d_key, d_value, None if d_query is None else jax.freeze(d_query)


def offset_columns(*offsets: Float[Array, "B N T"], dtype) -> Float[Array, "B N T 16"]:
    """The float32 offsets of each query, in columns for the tensor cores.

    They are clipped to ±2³¹ in float16 and to ±10³⁸ in bfloat16. Float16 keeps nothing below 2⁻²⁸.
    """
    info = jnp.finfo(dtype)
    # Below float32's largest number by as much as rounding up the first part may add.
    largest = min(float(info.max) * _OFFSET_WEIGHTS[0], 1e38)
    column = jax.lax.broadcasted_iota(jnp.uint32, (*offsets[0].shape, _NUM_COLUMNS), offsets[0].ndim)
    index, digit = column // len(_OFFSET_WEIGHTS), column % len(_OFFSET_WEIGHTS)
    # One loop computes every column from the offset itself. Stacked columns would need one loop, too, but it takes
    # longer to compile.
    rest = jnp.float32(0)
    for i, offset in enumerate(offsets):
        rest = jnp.where(index == i, offset[..., None], rest)
    rest = jnp.clip(rest, -largest, largest)
    columns = jnp.zeros_like(rest)
    for i, weight in enumerate(_OFFSET_WEIGHTS):
        # XLA removes a conversion to 16 bits and back, but not this.
        part = jax.lax.reduce_precision(rest * (1 / weight), info.nexp, info.nmant)
        columns = jnp.where(digit == i, part, columns)
        rest = rest - part * weight
    return columns.astype(dtype)


def _offset_weights(index: int, dtype) -> jax.Array:
    """The keys' columns `[64, 16]` for the offset of an index, laid out as an accumulator."""
    column = plgpu.broadcasted_iota(jnp.int32, (WGMMA_ROWS, _NUM_COLUMNS), 1, layout=plgpu.Layout.WGMMA)
    weights = jnp.float32(0)
    for i, weight in enumerate(_OFFSET_WEIGHTS):
        weights = weights + jnp.where(column == len(_OFFSET_WEIGHTS) * index + i, jnp.float32(weight), jnp.float32(0))
    return weights.astype(dtype)


def _shift(call: AttentionCall, tuning: MosaicBackwardTuning) -> int:
    """By how many query tiles the start of a block is behind that of the block before it; see `_SHIFTS`."""
    # Queries and d_output have 16 bits, and dQ, which is added to, has 32.
    bytes_of_tile = tuning.block_q * (6 * call.head_dim + 2 * call.value_dim)
    num_tiles, num_running = pl.cdiv(call.q_len, tuning.block_q), call.target.num_multiprocessors or 1
    num_heads = min(tuning.num_l2_heads, call.batch * call.num_kv_heads)

    def fits(shift: int) -> bool:
        tiles_of_head = min(num_tiles, pl.cdiv(num_running, num_heads) * shift)
        return num_heads * tiles_of_head * bytes_of_tile <= _HALF_OF_L2_BYTES

    return next((shift for shift in _SHIFTS if fits(shift)), _SHIFTS[-1])


def _lse_is_offset(call: AttentionCall) -> bool:
    """Whether the tensor cores subtract lse. A soft cap comes between the product and lse."""
    return call.logits_soft_cap is None and _LEAST_SCALE <= call.scale <= _LARGEST_SCALE


def _is_tall(tuning: MosaicBackwardTuning) -> bool:
    """Whether tiles have more queries than a WGMMA tile has rows.

    Then dV's product is issued before dP is awaited, operands' addresses are kept across steps, and dV is written after
    the last dQ. For other tiles each of these is slower: see docs/hopper_kernels.md.
    """
    return tuning.block_q > WGMMA_ROWS


def _load(context: KeyValueContext) -> None:
    """Producer: copies the block's keys and values, then query tiles into the ring."""
    tuning, gmem, smem, barriers = context.tuning, context.gmem, context.smem, context.barriers
    block, tiles, num_steps = context.block, context.tiles, context.num_steps
    context.load_keys_and_values(block.number * tuning.block_kv)

    @pl.loop(0, num_steps)
    def copy_tile(step):
        slot = barriers.q.slot(step)
        one_head = context.call.group_size == 1
        head, number, rank = (block.head, tiles.tile(step), step) if one_head else context.query_tile(step)
        queries, full = pl.ds(number * tuning.block_q, tuning.block_q), barriers.q.full.at[slot]
        barriers.q.producer_acquire(step, slot)
        # The consumers read these, and so need no registers for what determines them.
        smem.steps[slot, _TILE] = number
        smem.steps[slot, _IS_PARTIAL] = (rank < tiles.num_partial).astype(jnp.int32)
        smem.steps[slot, _HEAD] = head
        plgpu.barrier_arrive(full)
        barriers.q.copy(gmem.query.at[block.batch, queries, head], smem.q, slot)
        barriers.q.copy(gmem.offsets.at[block.batch, head, queries], smem.offsets, slot)
        if smem.lse is not None:
            barriers.q.copy(gmem.lse.at[block.batch, head, queries], smem.lse, slot)
        gmem.tokens.copy(smem.tokens, "query", (block.batch, queries), slot, full)
        barriers.do.copy(gmem.d_output.at[block.batch, queries, head], smem.do, slot)

    barriers.q.producer_tail(num_steps)


def _differentiate(context: KeyValueContext) -> None:
    """Consumer: dK and dV of 64 keys, and its part of dQ."""
    call, tuning, gmem, smem = context.call, context.tuning, context.gmem, context.smem
    barriers, block, warpgroup = context.barriers, context.block, context.warpgroup
    place = pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)
    first = block.number * tuning.block_kv + warpgroup * WGMMA_ROWS
    mask = TileMask.load(context, "query", block.batch, pl.ds(first, WGMMA_ROWS), tuning.block_kv)
    weights = [_offset_weights(index, call.dtype) for index in ((_DELTA,) if smem.lse is not None else (_DELTA, _LSE))]
    plgpu.barrier_wait(barriers.k)
    plgpu.barrier_wait(barriers.v)

    pl.run_scoped(
        lambda dk_acc, dv_acc: _accumulate(context, _Keys(first, place, mask, weights, dk_acc, dv_acc)),
        accumulator(gmem.key.shape[-1]),
        accumulator(gmem.value.shape[-1]),
    )


def _accumulate(context: KeyValueContext, keys: _Keys) -> None:
    """Adds up the gradients over all query tiles, and writes them."""
    tuning, gmem = context.tuning, context.gmem
    smem, barriers, num_steps = context.smem, context.barriers, context.num_steps
    # One loop for all kinds of tiles and all heads: with one for each, registers spill.
    last = jax.lax.fori_loop(0, num_steps, functools.partial(_next_tile, context, keys), (jnp.int32(0), jnp.int32(0)))

    def store_dv():
        dv = plgpu.wgmma_accumulator_load(keys.dv_acc, wait_n=0)
        context.store_gradient(dv, smem.v.at[keys.place], gmem.d_value, keys.first)

    # No other consumer reads this one's values.
    if not _is_tall(tuning):
        store_dv()
    if smem.ds is not None:
        pl.when(num_steps > 0)(functools.partial(_last_dq, context, last))
        if barriers.ds_read is not None:
            # A waiting thread must see each completion of a barrier.
            pl.when(num_steps > 1)(lambda: plgpu.barrier_wait(barriers.ds_read))
    if _is_tall(tuning):
        store_dv()
    dk = plgpu.wgmma_accumulator_load(keys.dk_acc, wait_n=0)
    # Other consumers' dQ reads this one's keys.
    context.wait_for_consumers()
    context.store_gradient(dk * context.call.scale, smem.k.at[keys.place], gmem.d_key, keys.first)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _next_tile(context: KeyValueContext, keys: _Keys, step, last):
    """Adds a tile's part to dK and dV, and in the fused form the part of `last`, a (number, head), to dQ."""
    tuning, smem, barriers, warpgroup = context.tuning, context.smem, context.barriers, context.warpgroup
    slot = barriers.q.slot(step)
    # The barrier makes the compiler compute the addresses of keys and values in each step. Kept across steps, they take
    # one register per 16 columns.
    place = warpgroup if _is_tall(tuning) else jax.lax.optimization_barrier(warpgroup)
    k, v = (operand.at[pl.ds(place * WGMMA_ROWS, WGMMA_ROWS)] for operand in (smem.k, smem.v))
    barriers.q.consumer_wait(slot)
    number, is_partial = smem.steps[slot, _TILE], smem.steps[slot, _IS_PARTIAL] > 0
    head = smem.steps[slot, _HEAD] if context.call.group_size > 1 else context.block.head
    tile = _Tile(slot, number, is_partial, smem.q.at[slot], smem.do.at[slot])
    tile_type = accumulator(tuning.block_q)
    p, ds = pl.run_scoped(functools.partial(_p_and_ds, context, keys, tile, k, v), tile_type, tile_type)

    def add_products():
        if not _is_tall(tuning):
            add_product(keys.dv_acc, p, tile.do, smem.operand, warpgroup)
        add_product(keys.dk_acc, ds, tile.q, smem.operand, warpgroup)

    if smem.ds is None:
        add_products()
        plgpu.wgmma_wait(0)
        barriers.q.consumer_release(slot)
        return last

    # The last step's dQ is computed in this one. So consumers may run half a step apart, and one computes P while the
    # other multiplies.
    pl.when(step > 0)(lambda: plgpu.barrier_wait(barriers.ds_full))
    if barriers.ds_read is not None:
        pl.when(step > 1)(lambda: plgpu.barrier_wait(barriers.ds_read))
    smem.ds.at[jax.lax.rem(step, smem.ds.shape[0]), keys.place][...] = ds
    plgpu.commit_smem()
    plgpu.barrier_arrive(barriers.ds_full)

    def multiply_all(dq_acc):
        _start_dq(context, dq_acc, step - 1)
        add_products()
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1 if _is_tall(tuning) else 2)
        if barriers.ds_read is not None:
            pl.when(step > 0)(lambda: plgpu.barrier_arrive(barriers.ds_read))
        _add_to_dq(context, dq, last, predicate=step > 0)
        plgpu.wgmma_wait(0)

    pl.run_scoped(multiply_all, accumulator(smem.dq.shape[-1]))
    barriers.q.consumer_release(slot)
    return number, head


def _p_and_ds(context: KeyValueContext, keys: _Keys, tile: _Tile, k, v, s_acc, dp_acc):
    """P = exp(KQᵀ − lse) and dS = P∘(V dOᵀ − delta) of a tile, in the matmul's dtype. Tall tiles: adds P dO to dV."""
    call, tuning, smem, barriers = context.call, context.tuning, context.smem, context.barriers

    def subtract(index, acc):
        offsets = smem.offsets.at[tile.slot].transpose((1, 0))
        add_product(acc, keys.offset_weights[index], offsets, smem.weights, context.warpgroup)

    if smem.lse is None:
        subtract(_LSE, s_acc)
    plgpu.wgmma(s_acc, k, tile.q.transpose((1, 0)))
    subtract(_DELTA, dp_acc)
    barriers.do.consumer_wait(tile.slot)
    plgpu.wgmma(dp_acc, v, tile.do.transpose((1, 0)))
    # Of these products, only the last may still be on its way.
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
    lse = None if smem.lse is None else load_vector(smem.lse.at[tile.slot], rows=False)
    p, slope = keys.mask.probabilities(s, lse, tile.is_partial, tile.number * tuning.block_q, tile.slot)
    operand = p.astype(call.dtype)
    if _is_tall(tuning):
        add_product(keys.dv_acc, operand, tile.do, smem.operand, context.warpgroup)
    ds = p * plgpu.wgmma_accumulator_load(dp_acc, wait_n=int(_is_tall(tuning)))
    ds = ds if slope is None else ds * slope
    return operand, ds.astype(call.dtype)


def _dq_place(context: KeyValueContext) -> tuple[Any, Any]:
    """Rows and columns of a tile of dQ that the consumer computes."""
    num_columns = context.smem.dq.shape[-1]
    by_columns = context.tuning.divides_dq_by_columns
    rows = pl.ds(0 if by_columns else context.warpgroup * WGMMA_ROWS, WGMMA_ROWS)
    return rows, pl.ds(context.warpgroup * num_columns if by_columns else 0, num_columns)


def _start_dq(context: KeyValueContext, dq_acc, step) -> None:
    """Issues dQ = dSᵀ K of a step."""
    smem = context.smem
    rows, columns = _dq_place(context)
    num_buffers = smem.ds.shape[0]
    ds = smem.ds.at[jax.lax.rem(step + num_buffers, num_buffers)]
    ds = ds if context.tuning.divides_dq_by_columns else ds.at[:, rows]
    plgpu.wgmma(dq_acc, ds.transpose((1, 0)), smem.k.at[:, columns])


def _add_to_dq(context: KeyValueContext, dq, tile, predicate=None) -> None:
    """Starts to add the consumer's part of the dQ of a tile, a (number, head), to global memory."""
    (number, head), (rows, columns) = tile, _dq_place(context)
    dq_smem = context.smem.dq.at[context.warpgroup]
    # The copy engine has read what the buffer held.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    dq_smem[...] = dq
    plgpu.commit_smem()
    rows = pl.ds(number * context.tuning.block_q + rows.start, WGMMA_ROWS)
    target = context.gmem.d_query.at[context.block.batch, rows, head, columns]
    plgpu.copy_smem_to_gmem(dq_smem, target, predicate, reduction_op="add")


def _last_dq(context: KeyValueContext, tile) -> None:
    """Adds the last step's part to dQ."""
    plgpu.barrier_wait(context.barriers.ds_full)

    def multiply(dq_acc):
        _start_dq(context, dq_acc, context.num_steps - 1)
        _add_to_dq(context, plgpu.wgmma_accumulator_load(dq_acc, wait_n=0), tile)

    pl.run_scoped(multiply, accumulator(context.smem.dq.shape[-1]))
