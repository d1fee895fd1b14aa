"""dK, dV and, in the fused form, dQ, of one block of keys and values: the pass visits the block's query tiles.

The pass computes the transposed tile, with keys as rows. So P and dS come out in registers as operands of dV and dK.
The fused form computes dQ, too: the consumers exchange dS through shared memory, multiply it with the keys, and add the
product to a float32 dQ in global memory, in no fixed order. It takes five matmuls a tile. The split form leaves dQ to
`query_pass`: it takes seven matmuls a tile, and gives the same bits in every run.

A persistent program computes one block after another. Its producer copies the next block's first query tile as soon as
the consumers have read the last one, and the next keys and values as soon as no product reads the last ones. Meanwhile
the last block's dK and dV leave through the memory of dS; in the split form, through that of the keys and values, and
the next ones wait for them.

The tensor cores also subtract delta from dP, and lse from S, except of wide heads: see
`kernels.backends.mosaic_gpu.offset_columns`.

Wide heads (`_is_wide`) leave few registers beside dK and dV, and have steps of their own.
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
from kernels.backends.mosaic_gpu.block_shift import block_shift
from kernels.backends.mosaic_gpu.machine import Hopper, add_product
from kernels.backends.mosaic_gpu.memory import Pipeline, matrix, zeroed_ref
from kernels.backends.mosaic_gpu.offset_columns import (
    DELTA_OFFSET,
    LSE_OFFSET,
    NUM_COLUMNS,
    lse_is_offset,
    offset_weights,
)
from kernels.backends.mosaic_gpu.preprocess import with_offsets
from kernels.backends.mosaic_gpu.registers import WGMMA_ROWS, accumulator, load_vector, spread
from kernels.backends.mosaic_gpu.tile_mask import TileMask, num_token_arrays, token_memory
from kernels.backends.mosaic_gpu.tile_scheduler import BlockClaims
from kernels.backends.mosaic_gpu.tuning import MAX_EQUAL_HEAD_DIM, MosaicBackwardTuning
from kernels.call import AttentionCall
from kernels.masks import TileKind

# Indices of what the producer tells the consumers of a step. From the last on: the tile's kind, one for each consumer,
# or one for all.
_TILE, _HEAD, _KINDS = range(3)


KeyValueSmem = namedtuple("KeyValueSmem", "k v q do offsets lse_delta steps tokens ds dq operand weights")


class KeyValueBarriers(NamedTuple):
    """Barriers: k and v are full once a block; q's `empty` frees the stages of do, too, unless do has its own."""

    k: Any
    v: Any
    q: Pipeline
    do: Pipeline
    done: Any  # no consumer reads the block's keys and values any more
    ds_full: Any  # all consumers have written a step's dS
    ds_read: Any  # all consumers have read it; None with three buffers
    claims: BlockClaims | None  # of a persistent program


KeyValueContext = BackwardContext[KeyValueSmem, KeyValueBarriers]


class _Tile(NamedTuple):
    """A query tile, as a consumer sees it."""

    slot: Any
    number: Any
    kind: Any
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
    block_q, block_kv, is_wide = tuning.block_q, tuning.block_kv, _is_wide(call)
    # Of lse and delta, those that are loaded: both, lse, or neither.
    num_loaded = 2 if is_wide else int(not lse_is_offset(call))
    # A step's dS is read in the next step. With three buffers, a consumer that writes a fourth dS knows that the other
    # one has read the first: it has written the third since. Tall tiles leave room for two, wide heads for one, and a
    # barrier tells it.
    num_ds_buffers = 1 if is_wide else 2 if _is_tall(tuning) else 3
    dq_columns = head_dim // num_consumers if tuning.divides_dq_by_columns else head_dim
    # A consumer's dQ begins at its own columns of the keys. Products take operands that are tiled alike.
    of_keys = functools.partial(matrix, dtype=call.dtype, column_multiple=dq_columns if fused else None)
    smem = KeyValueSmem(
        k=of_keys(block_kv, head_dim),
        v=matrix(block_kv, value_dim, dtype=call.dtype),
        q=of_keys(num_stages, block_q, head_dim),
        do=matrix(num_stages, block_q, value_dim, dtype=call.dtype),
        offsets=None if is_wide else matrix(num_stages, block_q, NUM_COLUMNS, dtype=call.dtype),
        lse_delta=plgpu.SMEM((num_loaded, num_stages, block_q), jnp.float32) if num_loaded else None,
        steps=plgpu.SMEM((num_stages, _KINDS + num_consumers), jnp.int32),
        tokens=token_memory(call, num_stages, block_q),
        # By 64 queries, so that what a product reads, and what a consumer stores, is in one piece.
        ds=of_keys(num_ds_buffers, block_q // WGMMA_ROWS, block_kv, WGMMA_ROWS) if fused else None,
        dq=matrix(num_consumers, *_dq_buffers(call, dq_columns), dtype=jnp.float32) if fused else None,
        # In the interpreter alone: operands that a GPU's matmuls take from registers.
        operand=machine.operand_memory(num_consumers, WGMMA_ROWS, block_q, dtype=call.dtype),
        weights=machine.operand_memory(num_consumers, WGMMA_ROWS, NUM_COLUMNS, dtype=call.dtype),
    )
    # Of queries, of what the producer tells the consumers, and of offsets, lse and delta.
    num_copies = 2 + (not is_wide) + num_loaded + num_token_arrays(call)
    return smem, KeyValueBarriers(
        k=plgpu.Barrier(),
        v=plgpu.Barrier(),
        q=Pipeline.memory(num_stages, num_consumers=num_consumers, num_copies=num_copies),
        do=Pipeline.memory(num_stages, num_consumers=num_consumers)
        if is_wide
        else Pipeline(plgpu.Barrier(num_barriers=num_stages)),
        done=plgpu.Barrier(num_arrivals=num_consumers),
        ds_full=plgpu.Barrier(num_arrivals=num_consumers) if fused else None,
        ds_read=plgpu.Barrier(num_arrivals=num_consumers) if fused and num_ds_buffers < 3 else None,
        claims=machine.block_claims(num_consumers) if tuning.persistent else None,
    )


def key_value_pass(
    arrays: BackwardArrays, call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper, *, fused: bool
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"], Float[Array, "B T N H"] | None]:
    """dK, dV and, if fused, the float32 dQ without the scale. `arrays.rows` are each key block's query tiles."""
    if not _is_wide(call):
        arrays = with_offsets(arrays, call, machine, fused=fused)
    elif fused:
        arrays = arrays._replace(d_query=zeroed_ref(arrays.query.shape, jnp.float32, arrays.query))
    # Blocks that start with the same query tile would all add to the same part of dQ at once.
    same_start = call.mask.same_keys_for_all_queries and not num_token_arrays(call)
    scratch = key_value_scratch(call, tuning, machine, fused=fused)
    shift = block_shift(call, tuning) if same_start else None
    d_key, d_value = launch_pass(
        arrays,
        call,
        tuning,
        machine,
        scratch,
        _load,
        [_differentiate],
        functools.partial(_finish, tuning),
        name="attention_backward" if fused else "attention_dkv",
        transposed=True,
        persistent=tuning.persistent,
        shift=shift,
    )
    return d_key, d_value, None if arrays.d_query is None else jax.freeze(arrays.d_query)


def _is_tall(tuning: MosaicBackwardTuning) -> bool:
    """Whether tiles have more queries than a WGMMA tile has rows.

    Then dV's product is issued before dP is awaited; and in programs of one block, operands' addresses are kept across
    steps, and dV is written after the last dQ. For other tiles each of these is slower: see docs/hopper_kernels.md.
    """
    return tuning.block_q > WGMMA_ROWS


def _is_wide(call: AttentionCall) -> bool:
    """Whether dK and dV leave a warpgroup registers for one float32 tile only, not for both S and dP.

    Then P is rounded to the matmul's dtype before dP is computed, and dQ is computed between two tiles. lse and delta
    are loaded, since the weights of their offsets take registers, too.
    """
    return max(call.head_dim, call.value_dim) > MAX_EQUAL_HEAD_DIM


def _dq_buffers(call: AttentionCall, num_columns: int) -> tuple[int, int, int]:
    """A consumer's memory for dQ on its way to global memory: number of buffers, rows and columns of each."""
    # Beside wide heads and their tokens there is no room for all columns at a time.
    return (2, WGMMA_ROWS, 32) if _is_wide(call) and num_token_arrays(call) else (1, WGMMA_ROWS, num_columns)


def _load(context: KeyValueContext) -> None:
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

    @pl.loop(0, num_steps)
    def copy_tile(step):
        slot = barriers.q.slot(step)
        one_head = context.call.group_size == 1
        head, number, rank = (block.head, tiles.tile(step), step) if one_head else context.query_tile(step)
        queries, full = pl.ds(number * tuning.block_q, tuning.block_q), barriers.q.full.at[slot]
        barriers.q.producer_acquire(step, slot)
        # The consumers read these, and so need no registers for what determines them.
        smem.steps[slot, _TILE] = number
        smem.steps[slot, _HEAD] = head
        for warpgroup, kind in enumerate(kinds):
            smem.steps[slot, _KINDS + warpgroup] = kind(number, rank < tiles.num_partial)
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

    if tuning.persistent:

        @pl.when(num_steps == 0)
        def skip_block():
            wait_for_last_block()
            # A waiting thread must see each completion of a barrier. This one has seen the last block's `done`, and so
            # the consumers may complete it once more.
            plgpu.barrier_arrive(barriers.k)
            plgpu.barrier_wait(barriers.done)


def _finish(tuning: MosaicBackwardTuning, barriers: KeyValueBarriers, num_steps) -> None:
    """Producer: waits until the consumers have read the last stages, and in a persistent program the last keys."""
    barriers.q.producer_tail(num_steps)
    if barriers.do.empty is not None:
        barriers.do.producer_tail(num_steps)
    if tuning.persistent:
        pl.when(num_steps > 0)(lambda: plgpu.barrier_wait(barriers.done))


def _differentiate(context: KeyValueContext) -> None:
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
            lambda dk_acc, dv_acc: _accumulate(context, _Keys(first, place, mask, weights, dk_acc, dv_acc)),
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
        dk, dv = (_zeros(ref.shape[-1], jnp.float32) for ref in (gmem.d_key, gmem.d_value))
        _store_in_persistent_program(context, first, dk, dv)


def _accumulate(context: KeyValueContext, keys: _Keys) -> None:
    """Adds up the gradients over all query tiles, and writes them."""
    tuning, gmem = context.tuning, context.gmem
    smem, barriers, num_steps = context.smem, context.barriers, context.num_steps
    # One loop for all kinds of tiles and all heads: with one for each, registers spill.
    next_tile = functools.partial(_next_wide_tile if _is_wide(context.call) else _next_tile, context, keys)
    last = jax.lax.fori_loop(0, num_steps, next_tile, (jnp.int32(0), jnp.int32(0)))

    def load_dk():
        return plgpu.wgmma_accumulator_load(keys.dk_acc, wait_n=0) * context.call.scale

    def load_dv():
        return plgpu.wgmma_accumulator_load(keys.dv_acc, wait_n=0)

    def store_dv():
        context.store_gradient(load_dv(), smem.v.at[keys.place], gmem.d_value, keys.first)

    # No other consumer reads this one's values.
    if not _is_tall(tuning) and not tuning.persistent:
        store_dv()
    if smem.ds is not None:
        pl.when(num_steps > 0)(functools.partial(_last_dq, context, last, num_steps - 1, frees_ds=False))
        if smem.ds.shape[0] == 2:
            # A waiting thread must see each completion of a barrier.
            pl.when(num_steps > 1)(lambda: plgpu.barrier_wait(barriers.ds_read))
    if tuning.persistent:
        _store_in_persistent_program(context, keys.first, load_dk(), load_dv())
        return
    if _is_tall(tuning):
        store_dv()
    dk = load_dk()
    # Other consumers' dQ reads this one's keys.
    context.wait_for_consumers()
    context.store_gradient(dk, smem.k.at[keys.place], gmem.d_key, keys.first)


def _store_in_persistent_program(context: KeyValueContext, first, dk, dv) -> None:
    """Writes dK and dV of a consumer's keys, and lets the next block's keys and values arrive as soon as it can."""
    smem, gmem, place = context.smem, context.gmem, pl.ds(context.warpgroup * WGMMA_ROWS, WGMMA_ROWS)
    if smem.ds is None:
        context.store_gradient(dv, smem.v.at[place], gmem.d_value, first)
        context.store_gradient(dk, smem.k.at[place], gmem.d_key, first)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        context.wait_for_consumers()
        return
    # The gradients leave through the consumer's part of the memory of dS, a piece at a time.
    context.wait_for_consumers()
    num_buffers, num_parts, _, width = smem.ds.shape
    memory = [smem.ds.at[i, j, place] for i in range(num_buffers) for j in range(num_parts)]
    pieces = [(x, ref, i) for x, ref in ((dv, gmem.d_value), (dk, gmem.d_key)) for i in range(0, x.shape[1], width)]
    for i, (gradient, ref, column) in enumerate(pieces):
        if i >= len(memory):
            plgpu.wait_smem_to_gmem(len(memory) - 1, wait_read_only=True)
        context.store_gradient(gradient[:, column : column + width], memory[i % len(memory)], ref, first, column)


def _next_tile(context: KeyValueContext, keys: _Keys, step, last):
    """Adds a tile's part to dK and dV, and in the fused form the part of `last`, a (number, head), to dQ."""
    tuning, smem, barriers, warpgroup = context.tuning, context.smem, context.barriers, context.warpgroup
    slot = barriers.q.slot(step)
    # The barrier makes the compiler compute the addresses of keys and values in each step. Kept across steps, they take
    # one register per 16 columns.
    keeps_addresses = _is_tall(tuning) and not tuning.persistent
    place = warpgroup if keeps_addresses else jax.lax.optimization_barrier(warpgroup)
    k, v = (operand.at[pl.ds(place * WGMMA_ROWS, WGMMA_ROWS)] for operand in (smem.k, smem.v))
    barriers.q.consumer_wait(slot)
    number, head, kind = _read_step(context, slot)
    tile = _Tile(slot, number, kind, smem.q.at[slot], smem.do.at[slot])

    def differentiate():
        tile_type = accumulator(tuning.block_q)
        return pl.run_scoped(functools.partial(_p_and_ds, context, keys, tile, k, v), tile_type, tile_type)

    def add_products(p, ds):
        if not _is_tall(tuning):
            add_product(keys.dv_acc, p, tile.do, smem.operand, warpgroup)
        add_product(keys.dk_acc, ds, tile.q, smem.operand, warpgroup)

    # Where a tile is passed over, too, a waiting thread must see each completion of a barrier.
    if smem.ds is None:

        def add_tile():
            add_products(*differentiate())
            plgpu.wgmma_wait(0)

        _unless_empty(context, kind, add_tile, lambda: barriers.do.consumer_wait(slot))
    else:

        def pass_over():
            barriers.do.consumer_wait(slot)
            # Their products are computed: left out, they would have the accumulators pass through the choice.
            return (_zeros(tuning.block_q, context.call.dtype),) * 2

        p, ds = _unless_empty(context, kind, differentiate, pass_over)
        _give_ds_and_add_last_dq(context, keys, ds, step, last, functools.partial(add_products, p, ds))
    barriers.q.consumer_release(slot)
    return number, head


def _zeros(num_columns: int, dtype) -> jax.Array:
    """A consumer's zeros, laid out as an accumulator."""
    return plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, num_columns), dtype), plgpu.Layout.WGMMA)


def _read_step(context: KeyValueContext, slot) -> tuple[Any, Any, Any]:
    """A step's tile: its number, its head, and its kind to the consumer."""
    steps = context.smem.steps
    head = steps[slot, _HEAD] if context.call.group_size > 1 else context.block.head
    own_kind = _KINDS if context.gmem.rows.warpgroup_bounds is None else _KINDS + context.warpgroup
    return steps[slot, _TILE], head, steps[slot, own_kind]


def _unless_empty(context: KeyValueContext, kind, differentiate, pass_over) -> Any:
    """Differentiates a tile, or passes over it if it is EMPTY to the consumer."""
    if context.gmem.rows.warpgroup_bounds is None:
        return differentiate()
    return jax.lax.cond(kind == TileKind.EMPTY, pass_over, differentiate)


def _give_ds_and_add_last_dq(context: KeyValueContext, keys: _Keys, ds, step, last, add_products) -> None:
    """Gives dS to the other consumers, issues products, and adds the part of the last step, of the tile `last`, to dQ.

    The last step's dQ is computed in this one. So consumers may run half a step apart, and one computes P while the
    other multiplies.
    """
    barriers = context.barriers
    pl.when(step > 0)(lambda: plgpu.barrier_wait(barriers.ds_full))
    if barriers.ds_read is not None:
        pl.when(step > 1)(lambda: plgpu.barrier_wait(barriers.ds_read))
    _write_ds(context, keys, ds, step)

    def multiply_all(dq_acc):
        _start_dq(context, dq_acc, step - 1)
        add_products()
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1 if _is_tall(context.tuning) else 2)
        if barriers.ds_read is not None:
            pl.when(step > 0)(lambda: plgpu.barrier_arrive(barriers.ds_read))
        _add_to_dq(context, dq, last, predicate=step > 0)
        plgpu.wgmma_wait(0)

    pl.run_scoped(multiply_all, accumulator(_dq_place(context)[1].size))


def _next_wide_tile(context: KeyValueContext, keys: _Keys, step, last):
    """`_next_tile` with registers for one float32 tile beside dK and dV; see `_is_wide`."""
    call, tuning, smem, barriers = context.call, context.tuning, context.smem, context.barriers
    warpgroup, slot = context.warpgroup, barriers.q.slot(step)
    # See `_next_tile`.
    place = jax.lax.optimization_barrier(warpgroup)
    k, v = (operand.at[pl.ds(place * WGMMA_ROWS, WGMMA_ROWS)] for operand in (smem.k, smem.v))
    if smem.ds is not None:
        # Between two tiles, so that its accumulator gets the registers of S and dP.
        pl.when(step > 0)(functools.partial(_last_dq, context, last, step - 1, frees_ds=True))
    barriers.q.consumer_wait(slot)
    number, head, kind = _read_step(context, slot)
    q, do, tile_type = smem.q.at[slot], smem.do.at[slot], accumulator(tuning.block_q)

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
            _write_ds(context, keys, ds, step)

    def differentiate():
        p, p_times_slope = pl.run_scoped(compute_p, tile_type)
        barriers.do.consumer_wait(slot)
        ds = pl.run_scoped(functools.partial(compute_ds, p, p_times_slope), tile_type)
        give_ds(ds)
        add_product(keys.dk_acc, ds, q, smem.operand, warpgroup)
        plgpu.wgmma_wait(0)

    def pass_over():
        # See `_next_tile`.
        barriers.do.consumer_wait(slot)
        give_ds(_zeros(tuning.block_q, call.dtype))

    _unless_empty(context, kind, differentiate, pass_over)
    barriers.q.consumer_release(slot)
    return number, head


def _p_and_ds(context: KeyValueContext, keys: _Keys, tile: _Tile, k, v, s_acc, dp_acc):
    """P = exp(KQᵀ − lse) and dS = P∘(V dOᵀ − delta) of a tile, in the matmul's dtype. Tall tiles: adds P dO to dV."""
    call, tuning, smem, barriers = context.call, context.tuning, context.smem, context.barriers

    def subtract(index, acc):
        offsets = smem.offsets.at[tile.slot].transpose((1, 0))
        add_product(acc, keys.offset_weights[index], offsets, smem.weights, context.warpgroup)

    if smem.lse_delta is None:
        subtract(LSE_OFFSET, s_acc)
    plgpu.wgmma(s_acc, k, tile.q.transpose((1, 0)))
    subtract(DELTA_OFFSET, dp_acc)
    barriers.do.consumer_wait(tile.slot)
    plgpu.wgmma(dp_acc, v, tile.do.transpose((1, 0)))
    # Of these products, only the last may still be on its way.
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
    lse = None if smem.lse_delta is None else load_vector(smem.lse_delta.at[LSE, tile.slot], rows=False)
    p, slope = keys.mask.probabilities(s, lse, tile.kind == TileKind.PARTIAL, tile.number * tuning.block_q, tile.slot)
    operand = p.astype(call.dtype)
    if _is_tall(tuning):
        add_product(keys.dv_acc, operand, tile.do, smem.operand, context.warpgroup)
    ds = p * plgpu.wgmma_accumulator_load(dp_acc, wait_n=int(_is_tall(tuning)))
    ds = ds if slope is None else ds * slope
    return operand, ds.astype(call.dtype)


def _write_ds(context: KeyValueContext, keys: _Keys, ds, step) -> None:
    """Gives a step's dS to all consumers."""
    memory = context.smem.ds.at[jax.lax.rem(step, context.smem.ds.shape[0])]
    for i in range(context.smem.ds.shape[1]):
        memory.at[i, keys.place][...] = ds[:, i * WGMMA_ROWS : (i + 1) * WGMMA_ROWS]
    plgpu.commit_smem()
    plgpu.barrier_arrive(context.barriers.ds_full)


def _dq_place(context: KeyValueContext) -> tuple[Any, Any]:
    """Rows and columns of a tile of dQ that the consumer computes."""
    by_columns = context.tuning.divides_dq_by_columns
    num_columns = context.smem.k.shape[-1] // (context.tuning.num_warpgroups if by_columns else 1)
    rows = pl.ds(0 if by_columns else context.warpgroup * WGMMA_ROWS, WGMMA_ROWS)
    return rows, pl.ds(context.warpgroup * num_columns if by_columns else 0, num_columns)


def _start_dq(context: KeyValueContext, dq_acc, step) -> None:
    """Issues dQ = dSᵀ K of a step."""
    smem = context.smem
    _, columns = _dq_place(context)
    num_buffers, queries = smem.ds.shape[0], 0 if context.tuning.divides_dq_by_columns else context.warpgroup
    ds = smem.ds.at[jax.lax.rem(step + num_buffers, num_buffers), queries]
    plgpu.wgmma(dq_acc, ds.transpose((1, 0)), smem.k.at[:, columns])


def _add_to_dq(context: KeyValueContext, dq, tile, predicate=None) -> None:
    """Starts to add the consumer's part of the dQ of a tile, a (number, head), to global memory."""
    (number, head), (rows, columns) = tile, _dq_place(context)
    rows = pl.ds(number * context.tuning.block_q + rows.start, WGMMA_ROWS)
    _, num_buffers, _, width = context.smem.dq.shape
    for i, first in enumerate(range(0, columns.size, width)):
        dq_smem = context.smem.dq.at[context.warpgroup, i % num_buffers]
        # The copy engine has read what the buffer held.
        if i == 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        elif i >= num_buffers:
            plgpu.wait_smem_to_gmem(num_buffers - 1, wait_read_only=True)
        dq_smem[...] = dq[:, first : first + width]
        plgpu.commit_smem()
        target = context.gmem.d_query.at[context.block.batch, rows, head, pl.ds(columns.start + first, width)]
        plgpu.copy_smem_to_gmem(dq_smem, target, predicate, reduction_op="add")


def _last_dq(context: KeyValueContext, tile, step, *, frees_ds: bool) -> None:
    """Adds the last step's part to dQ, and if `frees_ds` says that its dS is read."""
    plgpu.barrier_wait(context.barriers.ds_full)

    def multiply(dq_acc):
        _start_dq(context, dq_acc, step)
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
        if frees_ds:
            plgpu.barrier_arrive(context.barriers.ds_read)
        _add_to_dq(context, dq, tile)

    pl.run_scoped(multiply, accumulator(_dq_place(context)[1].size))
