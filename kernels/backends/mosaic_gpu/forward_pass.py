"""The forward kernel: it computes one block of queries after another, and visits each block's key/value tiles.

A program has a producer warpgroup and `num_warpgroups` consumer warpgroups. The producer copies the block's key/value
tiles to shared memory, ahead of the consumers. Each consumer computes 64 query rows of the block. It releases at once
the tiles to which only other consumers' rows attend. A persistent program computes several blocks: its producer copies
the next block's first tiles while the consumers finish the last block.

Softmax runs under matmuls, in two ways. A consumer issues a tile's QKᵀ together with the PV of the tile before it, and
computes the tile's softmax while PV runs. And while one consumer computes a softmax, another's matmuls run: consumers
issue theirs in turns (ping-pong), or drift apart by themselves.

Source: FlashAttention-3 (arXiv:2407.08608).
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

from kernels.backends.mosaic_gpu.block_range import BlockRange, read_block_range, rows_of_warpgroups
from kernels.backends.mosaic_gpu.padding import pad_matrices, padded_head_dim
from kernels.backends.mosaic_gpu.tile_mask import TileMask, TokenArrays, log2_scale, num_token_arrays, token_memory
from kernels.backends.mosaic_gpu.tuning import MosaicForwardTuning, MosaicGpuTuning
from kernels.backends.mosaic_gpu.walk import has_numbers, read_number, write_number
from kernels.call import AttentionCall, AttentionInputs
from kernels.hopper.launch import Roles, launch
from kernels.hopper.machine import Hopper, Output, machine_of
from kernels.hopper.memory import Pipeline, matrix, zeroed_ref
from kernels.hopper.registers import ROW_LAYOUT, WGMMA_ROWS, accumulator, spread
from kernels.hopper.softmax import LOG2_E, OnlineSoftmax
from kernels.hopper.tile_scheduler import BlockClaims, PingPong, TileScheduler, WorkBlock
from kernels.plan import Rows


class ForwardGmem(NamedTuple):
    """Global memory: operands, padded as the machine needs it, and results. None for what isn't given."""

    query: Any
    key: Any
    value: Any
    rows: Rows
    sinks: Any
    tokens: TokenArrays
    num_claimed: Any  # the dynamic tile scheduler's counter
    output: Any
    lse: Any


# Queries of wider heads take too many registers, those of narrower ones gain nothing (docs/hopper_kernels.md).
_HEAD_DIMS_IN_REGISTERS = (64, 64)
# In the order of addresses: keys and values come first for speed (docs/hopper_kernels.md).
ForwardSmem = namedtuple("ForwardSmem", "k v q o lse tokens p")


class ForwardBarriers(NamedTuple):
    """Barriers: q's for each consumer, k's and v's for each stage."""

    q: Pipeline
    k: Pipeline
    v: Pipeline
    ping_pong: Any
    claims: BlockClaims | None


class ForwardContext(NamedTuple):
    """The context of every role: the call and how it runs, and one program's memory and barriers."""

    call: AttentionCall
    tuning: MosaicForwardTuning
    machine: Hopper
    scheduler: TileScheduler
    gmem: ForwardGmem
    smem: ForwardSmem
    barriers: ForwardBarriers
    ping_pong: PingPong
    program: jax.Array
    warpgroup: jax.Array


class _QueryRows(NamedTuple):
    """The 64 query rows of a block that one consumer computes."""

    block: WorkBlock
    first: jax.Array  # index of the first row
    tiles: BlockRange  # the tiles that the producer copies, and the sub-range that these rows attend to
    num_before: jax.Array  # number of tiles of the program's blocks before this one
    mask: TileMask


def forward_scratch(
    call: AttentionCall, tuning: MosaicForwardTuning, machine: Hopper
) -> tuple[ForwardSmem, ForwardBarriers]:
    """Shared memory and barriers: rings of stages for k, v and tokens; of the rest each consumer has its own."""
    head_dim, value_dim = padded_head_dim(call.head_dim), padded_head_dim(call.value_dim)
    num_consumers, block_kv, num_stages = tuning.num_warpgroups, tuning.block_kv, tuning.num_stages
    # Without its own memory a consumer's output takes its query's place. In a persistent program the next block's query
    # may arrive while this block's output leaves.
    has_output_memory = tuning.persistent or value_dim != head_dim
    smem = ForwardSmem(
        k=matrix(num_stages, block_kv, head_dim, dtype=call.dtype),
        v=matrix(num_stages, block_kv, value_dim, dtype=call.dtype),
        q=matrix(num_consumers, WGMMA_ROWS, head_dim, dtype=call.dtype),
        o=matrix(num_consumers, WGMMA_ROWS, value_dim, dtype=call.dtype) if has_output_memory else None,
        lse=plgpu.SMEM((num_consumers, WGMMA_ROWS), jnp.float32),
        tokens=token_memory(call, "key_value", num_stages, block_kv, numbered=has_numbers(call, "key_value")),
        p=machine.operand_memory(num_consumers, WGMMA_ROWS, block_kv, dtype=call.dtype),
    )
    num_copies = 1 + num_token_arrays(call, "key_value") + has_numbers(call, "key_value")
    return smem, ForwardBarriers(
        q=Pipeline(
            plgpu.Barrier(num_barriers=num_consumers),
            plgpu.Barrier(num_barriers=num_consumers) if tuning.persistent else None,
        ),
        k=Pipeline.memory(num_stages, num_consumers=num_consumers, num_copies=num_copies),
        v=Pipeline.memory(num_stages, num_consumers=num_consumers),
        ping_pong=plgpu.Barrier(num_barriers=num_consumers),
        claims=machine.block_claims(num_consumers) if tuning.persistent else None,
    )


def run_forward(
    inputs: AttentionInputs, call: AttentionCall, tuning: MosaicGpuTuning
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse of a call whose mask all heads share, under a tuning with nothing left open."""
    how, machine = tuning.forward_tiles, machine_of(interpret=tuning.interpret)
    assert how is not None
    multiples = machine.length_multiple(how.block_q), machine.length_multiple(how.block_kv)
    head_dims = padded_head_dim(call.head_dim), padded_head_dim(call.value_dim)
    query, key, value = pad_matrices(inputs, *multiples, *head_dims)
    sinks = None if inputs.sinks is None else inputs.sinks.astype(jnp.float32)
    tokens = TokenArrays.of(inputs, how.block_q, how.block_kv)
    rows = rows_of_warpgroups(inputs, call, how)
    batch, q_len, num_heads, _ = query.shape
    num_multiprocessors = machine.num_multiprocessors(call.target) if how.persistent else None
    num_blocks, num_l2_heads = pl.cdiv(q_len, how.block_q), how.num_l2_heads * call.group_size
    scheduler = TileScheduler(batch, num_heads, num_blocks, num_l2_heads, num_multiprocessors=num_multiprocessors)
    smem, barriers = forward_scratch(call, how, machine)

    def make_context(gmem, smem, barriers, program):
        warpgroup = jax.lax.axis_index("warpgroup")
        ping_pong = PingPong(barriers.ping_pong if how.ping_pong else None, warpgroup, how.num_warpgroups)
        return ForwardContext(
            call, how, machine, scheduler, ForwardGmem(*gmem), smem, barriers, ping_pong, program, warpgroup
        )

    num_claimed = None if barriers.claims is None else zeroed_ref((1,), jnp.int32, query)
    operands = query, key, value, rows, sinks, tokens, num_claimed
    outputs = (
        jax.ShapeDtypeStruct((batch, q_len, num_heads, value.shape[-1]), call.dtype),
        # Whole blocks: unlike a matrix's, the copy of a row's numbers may write past the row's end.
        jax.ShapeDtypeStruct((batch, num_heads, num_blocks * how.block_q), jnp.float32),
    )
    output, lse = launch(
        Roles(make_context, _load, [_attend]),
        operands,
        outputs,
        (smem, barriers),
        scheduler,
        name="attention_forward",
        warpgroups=how,
        machine=machine,
    )
    return output[:, : call.q_len, :, : call.value_dim], lse[:, :, : call.q_len].swapaxes(1, 2)


def _for_each_block(context: ForwardContext, body, consumer, next_claim) -> jax.Array:
    """Calls `body(context, block, tiles, num_before)` for each block of the program; returns how many tiles they have.

    `tiles` holds the sub-range of `consumer`. `next_claim` is `TileScheduler.for_each_block`'s.
    """

    def visit(block: WorkBlock, num_before):
        num_warpgroups = context.tuning.num_warpgroups
        tiles = read_block_range(context.gmem.rows, block.batch, block.number, consumer, num_warpgroups)
        body(context, block, tiles, num_before)
        return num_before + tiles.num_tiles

    return context.scheduler.for_each_block(context.program, visit, jnp.int32(0), next_claim)


def _load(context: ForwardContext) -> None:
    """Producer: copies the tiles of one block after another into the ring, and in persistent programs the queries."""
    barriers, claims = context.barriers, context.barriers.claims
    next_claim = None if claims is None else functools.partial(claims.claim, context.gmem.num_claimed)
    num_steps = _for_each_block(context, _load_block, 0, next_claim)
    barriers.k.producer_tail(num_steps, barriers.v)
    if context.tuning.persistent:
        for w in range(context.tuning.num_warpgroups):
            pl.when(num_steps > 0)(functools.partial(plgpu.barrier_wait, barriers.q.empty.at[w]))


def _load_block(context: ForwardContext, block: WorkBlock, tiles: BlockRange, num_before) -> None:
    """Copies the key/value tiles of one block."""
    tuning, gmem, smem, barriers = context.tuning, context.gmem, context.smem, context.barriers

    def copy_tile(rank, number=None):
        step = num_before + rank
        slot = barriers.k.slot(step)
        kv_head = block.head // context.call.group_size
        number = tiles.tile(rank) if number is None else number
        tile = pl.ds(number * tuning.block_kv, tuning.block_kv)
        barriers.k.producer_acquire(step, slot)
        if has_numbers(context.call, "key_value"):
            write_number(smem.tokens, slot, number, barriers.k.full.at[slot])
        barriers.k.copy(gmem.key.at[block.batch, tile, kv_head], smem.k, slot)
        # Before the wait for the values' stage: keys are full only with their tokens.
        gmem.tokens.copy(smem.tokens, "key_value", (block.batch, tile), slot, barriers.k.full.at[slot])
        if tuning.persistent:

            @pl.when(rank == 0)
            def copy_queries():
                is_first = step == 0
                for w in range(tuning.num_warpgroups):
                    # As soon as the consumer has no use for the last block's.
                    pl.when(jnp.logical_not(is_first))(functools.partial(plgpu.barrier_wait, barriers.q.empty.at[w]))
                    _load_query(context, block, w)

        barriers.v.producer_acquire(step, slot)
        barriers.v.copy(gmem.value.at[block.batch, tile, kv_head], smem.v, slot)

    if tiles.walked is None:
        pl.loop(0, tiles.num_tiles)(copy_tile)
    else:
        tiles.walked.walk(tiles.num_tiles, lambda _, rank, tile: copy_tile(rank, tile))


def _load_query(context: ForwardContext, block: WorkBlock, consumer) -> None:
    q_rows = pl.ds(block.number * context.tuning.block_q + consumer * WGMMA_ROWS, WGMMA_ROWS)
    context.barriers.q.copy(context.gmem.query.at[block.batch, q_rows, block.head], context.smem.q, consumer)


def _attend(context: ForwardContext) -> None:
    """Consumer: computes its 64 rows of one block after another."""
    context.ping_pong.start()
    claims = context.barriers.claims
    _for_each_block(context, _attend_block, context.warpgroup, None if claims is None else claims.receive)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    context.ping_pong.finish()


def _attend_block(context: ForwardContext, block: WorkBlock, tiles: BlockRange, num_before) -> None:
    """Computes a consumer's rows of one block, and skips the tiles that only other rows attend to."""
    call, tuning, barriers, warpgroup = context.call, context.tuning, context.barriers, context.warpgroup
    first = block.number * tuning.block_q + warpgroup * WGMMA_ROWS
    q_rows = pl.ds(first, WGMMA_ROWS)
    if not tuning.persistent:
        _load_query(context, block, warpgroup)
    mask = TileMask.load(context, "key_value", block.batch, q_rows, tuning.block_kv)
    rows = _QueryRows(block, first, tiles, num_before, mask)
    value_dim = context.gmem.value.shape[-1]
    _skip_tiles(context, rows, 0, tiles.begin)
    has_tiles = tiles.begin < tiles.ends[2]
    pl.when(has_tiles)(lambda: pl.run_scoped(functools.partial(_attend_tiles, context, rows), accumulator(value_dim)))

    @pl.when(jnp.logical_not(has_tiles))
    def attend_to_nothing():
        if tuning.persistent:
            # The producer copies all queries of a block with the block's first tile.
            @pl.when(tiles.num_tiles > 0)
            def release_queries():
                barriers.q.consumer_wait(warpgroup)
                barriers.q.consumer_release(warpgroup)
        else:
            # This query is never used, but its copy must finish before the output reuses the memory.
            barriers.q.consumer_wait(warpgroup)
        _store(
            context,
            rows,
            plgpu.layout_cast(jnp.zeros((WGMMA_ROWS, value_dim), call.dtype), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((WGMMA_ROWS,), -jnp.inf, jnp.float32), ROW_LAYOUT),
        )

    _skip_tiles(context, rows, tiles.ends[2], tiles.num_tiles)


def _skip_tiles(context: ForwardContext, rows: _QueryRows, begin, end) -> None:
    """Releases tiles that these rows don't attend to, in step with the ping-pong schedule."""
    k, v = context.barriers.k, context.barriers.v

    @pl.loop(begin, end)
    def skip_tile(rank):
        slot = k.slot(rows.num_before + rank)
        k.consumer_wait(slot)
        context.ping_pong.acquire()
        context.ping_pong.release()
        k.consumer_release(slot)
        v.consumer_wait(slot)
        v.consumer_release(slot)


def _attend_tiles(context: ForwardContext, rows: _QueryRows, o_acc) -> None:
    """Online softmax over the tiles of the rows: S = QKᵀ, O += PV."""
    q, k, v = context.barriers.q, context.barriers.k, context.barriers.v
    tiles, output = rows.tiles, Output(o_acc, context.smem.p, context.warpgroup)
    q.consumer_wait(context.warpgroup)
    query = _query_operand(context)
    first_tile = functools.partial(_first_tile, context, rows, query)
    next_tile = functools.partial(_next_tile, context, rows, query, output)
    k.consumer_wait(k.slot(rows.num_before + tiles.begin))
    context.ping_pong.acquire()
    carry = (*pl.run_scoped(first_tile, accumulator(context.tuning.block_kv)), output.zero())
    second = tiles.begin + 1
    partial_end, full_end, end = (jnp.maximum(end, second) for end in tiles.ends)

    # PARTIAL tiles come before and after the FULL ones. Two rounds over both kinds compile each loop once. One loop for
    # each kind keeps a slow branch out of the loops: see docs/hopper_kernels.md.
    def visit_both_kinds(round_, carry):
        start, middle, stop = (
            jnp.where(round_ == 0, first, then)
            for first, then in ((second, full_end), (partial_end, end), (full_end, end))
        )
        carry = jax.lax.fori_loop(start, middle, functools.partial(next_tile, is_partial=True), carry)
        return jax.lax.fori_loop(middle, stop, functools.partial(next_tile, is_partial=False), carry)

    p, state, carried = jax.lax.fori_loop(0, 2, visit_both_kinds, carry)
    if context.tuning.persistent:
        q.consumer_release(context.warpgroup)
    slot = k.slot(rows.num_before + (tiles.ends[2] - 1))
    v.consumer_wait(slot)
    product = output.start_product(p, context.smem.v.at[slot])
    result = output.add(carried, product)
    v.consumer_release(slot)
    _epilogue(context, rows, result, state.row_max, context.machine.join_partial_sums(state.row_sum))


def _query_operand(context: ForwardContext) -> Any:
    """The consumer's queries as the left operand of all its products: in registers, or in shared memory."""
    query, value = context.smem.q.at[context.warpgroup], context.smem.v
    keeps_in_registers = (query.shape[-1], value.shape[-1]) == _HEAD_DIMS_IN_REGISTERS
    return context.machine.left_operand(query) if keeps_in_registers else query


def _online_softmax(context: ForwardContext) -> OnlineSoftmax:
    return OnlineSoftmax(context.call.dtype, log2_scale(context.call), context.machine)


def _masked(context: ForwardContext, rows: _QueryRows, s, rank, slot, is_partial) -> jax.Array:
    """Logits of a tile, under soft cap and mask."""
    call = context.call
    if call.logits_soft_cap is not None:
        s = jnp.tanh(s * (call.scale / call.logits_soft_cap))
    return rows.mask.apply(s, is_partial, _number(context, rows, rank, slot) * context.tuning.block_kv, slot)


def _number(context: ForwardContext, rows: _QueryRows, rank, slot):
    """The number of a tile."""
    is_numbered = has_numbers(context.call, "key_value")
    return read_number(context.smem.tokens, slot) if is_numbered else rows.tiles.tile(rank)


def _first_tile(context: ForwardContext, rows: _QueryRows, query, s_acc):
    """S = QKᵀ of the rows' first tile, whose softmax starts row_max and row_sum."""
    rank, tiles, k = rows.tiles.begin, rows.tiles, context.barriers.k
    slot = k.slot(rows.num_before + rank)
    plgpu.wgmma(s_acc, query, context.smem.k.at[slot].transpose((1, 0)))
    context.ping_pong.release()
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
    is_partial = jnp.logical_or(rank < tiles.ends[0], rank >= tiles.ends[1])
    logits = _masked(context, rows, s, rank, slot, is_partial)
    p, state = _online_softmax(context).first_tile(logits)
    k.consumer_release(slot)
    return p, state


def _next_tile(context: ForwardContext, rows: _QueryRows, query, output: Output, rank, carry, *, is_partial: bool):
    """S = QKᵀ of this tile, then O += PV of the last one. This tile's softmax runs under the second product."""
    p, state, carried = carry
    smem, k, v = context.smem, context.barriers.k, context.barriers.v
    slot, last_slot = k.slot(rows.num_before + rank), k.slot(rows.num_before + (rank - 1))
    k.consumer_wait(slot)
    context.ping_pong.acquire()

    def multiply(s_acc):
        plgpu.wgmma(s_acc, query, smem.k.at[slot].transpose((1, 0)))
        v.consumer_wait(last_slot)
        product = output.start_product(p, smem.v.at[last_slot])
        context.ping_pong.release()
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        # A PARTIAL tile reads its keys' tokens, which share the keys' stage.
        reads_tokens = is_partial and smem.tokens is not None
        if not reads_tokens:
            k.consumer_release(slot)
        logits = _masked(context, rows, s, rank, slot, is_partial)
        tile = _online_softmax(context).next_tile(logits, state)
        if reads_tokens:
            k.consumer_release(slot)
        new_output = output.add(carried, product)
        v.consumer_release(last_slot)
        new_output = jax.lax.cond(
            tile.rescales, lambda o: o * spread(tile.alpha, o.shape, rows=True), lambda o: o, new_output
        )
        return tile.p, tile.state, output.store(new_output)

    return pl.run_scoped(multiply, accumulator(context.tuning.block_kv))


def _epilogue(context: ForwardContext, rows: _QueryRows, output, row_max, row_sum) -> None:
    """Adds the sink to row_sum, divides by it, and writes output and lse."""
    # A NaN isn't 0: only a row without an allowed pair has a sum of 0.
    attends = row_sum != 0
    alpha = jnp.ones_like(row_sum)
    if context.gmem.sinks is not None:
        sink = context.gmem.sinks[rows.block.head] * LOG2_E
        higher = jnp.maximum(row_max, sink)
        alpha = jnp.where(attends, jnp.exp2(row_max - higher), 1.0)
        row_max, row_sum = higher, row_sum * alpha + jnp.exp2(sink - higher)
    row_sum = jnp.where(attends, row_sum, 1.0)
    lse = jnp.where(attends, row_max * (1 / LOG2_E) + jnp.log(row_sum), -jnp.inf)
    output = output * spread(alpha / row_sum, output.shape, rows=True)
    _store(context, rows, output.astype(context.call.dtype), lse)


def _store(context: ForwardContext, rows: _QueryRows, output, lse) -> None:
    """Writes output and lse of the rows through shared memory."""
    gmem, (batch, head, _), warpgroup = context.gmem, rows.block, context.warpgroup
    o_smem = (context.smem.q if context.smem.o is None else context.smem.o).at[warpgroup]
    lse_smem = context.smem.lse.at[warpgroup]
    # The copy engine has read what the last block left here.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    o_smem[...] = output
    lse_smem[...] = lse
    plgpu.commit_smem()
    q_rows = pl.ds(rows.first, WGMMA_ROWS)
    plgpu.copy_smem_to_gmem(o_smem, gmem.output.at[batch, q_rows, head])
    plgpu.copy_smem_to_gmem(lse_smem, gmem.lse.at[batch, head, q_rows])
