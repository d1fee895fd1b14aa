"""The forward kernel: a block of query rows stays, key/value tiles stream past it.

A program has `num_warpgroups` warpgroups that compute, 64 query rows of a block each, and one that loads key/value
tiles ahead of them: in a persistent program, which makes one block after another, those of the next block while the
last one ends. A warpgroup lets tiles pass by that its own rows don't visit.

Two things overlap with the tensor cores' work: a warpgroup issues the next tile's QKᵀ before this tile's PV, so that
its softmax runs under a matmul; and warpgroups take turns in issuing, or drift apart by themselves, so that one's
softmax runs under the others' matmuls.

Source: FlashAttention-3 (arXiv:2407.08608).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.memory import ROWS, accumulator, matrix, multiply, spread, vector
from kernels.backends.mosaic_gpu.pairs import (
    Tokens,
    allowed_pairs,
    copy_tokens,
    keep_allowed,
    resident_tokens,
    tile_tokens,
    token_memory,
)
from kernels.backends.mosaic_gpu.schedule import Block, Schedule
from kernels.backends.mosaic_gpu.softmax import row_sums, weigh, weigh_first
from kernels.backends.mosaic_gpu.tickets import Tickets
from kernels.backends.mosaic_gpu.walk import SharedWalk, read_shared_row
from kernels.call import AttentionCall
from kernels.plan import Rows
from kernels.tuning import MosaicForwardTuning

_LOG2_E = math.log2(math.e)
# Few, so that programs have several blocks to make.
_INTERPRETED_MULTIPROCESSORS = 2


def forward(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    sinks: Float[Array, " N"] | None,
    tokens: Tokens,
    rows: Rows,
    call: AttentionCall,
    tuning: MosaicForwardTuning,
    interpret,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N T"]]:
    """Output and lse of arrays padded to whole tiles and whole head dims.

    Args:
      query: of a length that is a multiple of 64 (in the interpreter: of the tuning's block).
      key, value, tokens: of lengths that are multiples of the tuning's blocks.
      sinks: float32.
      rows: the key/value tiles of each 64 query rows, as blocks share them (`share_walks`), or lists of each block's.
      call: the call, with the lengths before padding.
      tuning: how the kernel runs.
      interpret: parameters of Pallas's interpreter, or None.
    """
    batch, q_len, num_heads, head_dim = query.shape
    value_dim = value.shape[-1]
    num_warpgroups, block_q, block_kv, num_stages = (
        tuning.num_warpgroups,
        tuning.block_q,
        tuning.block_kv,
        tuning.num_stages,
    )
    num_multiprocessors = None
    if tuning.persistent:
        num_multiprocessors = call.target.num_multiprocessors if interpret is None else _INTERPRETED_MULTIPROCESSORS
        assert num_multiprocessors is not None, f"{call.target} is a GPU"
    schedule = Schedule(
        batch,
        num_heads,
        pl.cdiv(q_len, block_q),
        tuning.heads_at_once * call.group_size,
        num_multiprocessors=num_multiprocessors,
    )
    interpreted = interpret is not None
    # Programs take blocks as they come: what each has to do differs. The interpreter has no atomic operations: there
    # they take them turn by turn.
    draws_tickets = tuning.persistent and not interpreted
    # The next block's query comes while this one's output goes. Else the output may take the query's place.
    output_apart = tuning.persistent or value_dim != head_dim
    soft_cap = call.logits_soft_cap
    # Of the accumulator's numbers: what brings them to units of log₂.
    to_log2 = _LOG2_E * (call.scale if soft_cap is None else soft_cap)

    given = {name: x for name, x in {"tiles": rows.tiles, "sinks": sinks}.items() if x is not None} | tokens.given()
    # Keys' tokens are read after the keys: their memory is free only then.
    has_tokens = bool(tokens.given("key_value"))

    def kernel(
        query_ref,
        key_ref,
        value_ref,
        bounds_ref,
        *refs,
        q_smem,
        k_smem,
        v_smem,
        lse_smem,
        q_ready,
        k_ready,
        v_ready,
        k_free,
        v_free,
        turn,
        q_free=None,
        tickets=None,
        o_smem=None,
        spare=None,
        token_smem=None,
    ):
        optional = dict(zip(given, refs, strict=False))
        *counter_ref, output_ref, lse_ref = refs[len(given) :]
        token_refs = Tokens(*(optional.get(name) for name in Tokens._fields))

        o_smem = q_smem if o_smem is None else o_smem
        program, warpgroup = jax.lax.axis_index("program"), jax.lax.axis_index("warpgroup")

        def for_each_block(body, member, *, draws: bool):
            """Calls `body(block, row, num_before)`, with the number of tiles of the program's blocks before.

            Args:
              member: which of a block's rows of tiles the caller visits.
              draws: whether the caller takes the program's next block, or learns which it is.
            """

            def visit(block: Block, num_before):
                tiles_ref = optional.get("tiles")
                row = read_shared_row(bounds_ref, tiles_ref, block.batch, block.row, member, num_warpgroups)
                body(block, row, num_before)
                return num_before + row.num_tiles

            def next_index(turn):
                number = tickets.draw(counter_ref[0], turn) if draws else tickets.see(turn)
                return schedule.num_programs + number

            return schedule.for_each_block(program, visit, jnp.int32(0), next_index if draws_tickets else None)

        def load_query(block: Block, warpgroup):
            q_rows = pl.ds(block.row * block_q + warpgroup * ROWS, ROWS)
            query = query_ref.at[block.batch, q_rows, block.head]
            plgpu.copy_gmem_to_smem(query, q_smem.at[warpgroup], q_ready.at[warpgroup])

        @pl.when(warpgroup == num_warpgroups)
        def _load():
            plgpu.set_max_registers(tuning.load_registers, action="decrease")

            def load_block(block: Block, row: SharedWalk, num_before):
                @pl.loop(0, row.num_tiles)
                def _(rank):
                    step = num_before + rank
                    slot = jax.lax.rem(step, num_stages)
                    kv_head, tile = block.head // call.group_size, pl.ds(row.tile(rank) * block_kv, block_kv)

                    def load(ref, smem, ready, free):
                        pl.when(step >= num_stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
                        plgpu.copy_gmem_to_smem(ref.at[block.batch, tile, kv_head], smem.at[slot], ready.at[slot])

                    load(key_ref, k_smem, k_ready, k_free)
                    # Before the wait for the values' room: without their tokens the keys aren't ready.
                    copy_tokens(token_refs, token_smem, "key_value", (block.batch, tile), slot, k_ready.at[slot])
                    if tuning.persistent:
                        pl.when(rank == 0)(lambda: load_next_queries(block, is_first=step == 0))
                    load(value_ref, v_smem, v_ready, v_free)

            def load_next_queries(block: Block, is_first):
                for w in range(num_warpgroups):
                    pl.when(jnp.logical_not(is_first))(functools.partial(plgpu.barrier_wait, q_free.at[w]))
                    load_query(block, w)

            num_steps = for_each_block(load_block, 0, draws=True)

            # Whoever waits at a barrier must see each of its completions, the last ones, too.
            @pl.loop(jnp.maximum(num_steps - num_stages, 0), num_steps)
            def _(step):
                for free in (k_free, v_free):
                    plgpu.barrier_wait(free.at[jax.lax.rem(step, num_stages)])

            if tuning.persistent:
                for w in range(num_warpgroups):
                    pl.when(num_steps > 0)(functools.partial(plgpu.barrier_wait, q_free.at[w]))

        @pl.when(warpgroup < num_warpgroups)
        def _compute():
            plgpu.set_max_registers(tuning.compute_registers, action="increase")
            q = q_smem.at[warpgroup]

            def my_turn():
                if tuning.take_turns:
                    plgpu.barrier_wait(turn.at[warpgroup])

            def next_turn():
                if tuning.take_turns:
                    plgpu.barrier_arrive(turn.at[jax.lax.rem(warpgroup + 1, num_warpgroups)])

            if tuning.take_turns:
                pl.when(warpgroup == num_warpgroups - 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

            def compute_block(block: Block, row: SharedWalk, num_before):
                q_first = block.row * block_q + warpgroup * ROWS
                q_rows = pl.ds(q_first, ROWS)
                if not tuning.persistent:
                    load_query(block, warpgroup)
                resident = resident_tokens(token_refs, "key_value", (block.batch, q_rows))

                def ring(step):
                    return jax.lax.rem(num_before + step, num_stages)

                def pass_by(begin, end):
                    """Lets tiles stream past that these rows don't visit."""

                    @pl.loop(begin, end)
                    def _(step):
                        slot = ring(step)
                        plgpu.barrier_wait(k_ready.at[slot])
                        my_turn()
                        next_turn()
                        plgpu.barrier_arrive(k_free.at[slot])
                        plgpu.barrier_wait(v_ready.at[slot])
                        plgpu.barrier_arrive(v_free.at[slot])

                def masked(logits, step, is_partial):
                    if soft_cap is not None:
                        logits = jnp.tanh(logits * (call.scale / soft_cap))
                    allowed = functools.partial(
                        allowed_pairs,
                        call,
                        tile_tokens(token_refs, token_smem, "key_value", resident=resident, slot=ring(step)),
                        q_first,
                        row.tile(step) * block_kv,
                        kv_padded=call.kv_len % block_kv != 0,
                        transposed=False,
                        interpreted=interpreted,
                    )
                    return keep_allowed(logits, is_partial, allowed)

                def first_tile(logits_acc):
                    slot = ring(row.begin)
                    plgpu.wgmma(logits_acc, q, k_smem.at[slot].transpose((1, 0)))
                    next_turn()
                    logits = plgpu.wgmma_accumulator_load(logits_acc, wait_n=0)
                    is_partial = jnp.logical_or(row.begin < row.ends[0], row.begin >= row.ends[1])
                    weights, sums = weigh_first(
                        masked(logits, row.begin, is_partial),
                        to_log2=to_log2,
                        dtype=query.dtype,
                        interpreted=interpreted,
                    )
                    plgpu.barrier_arrive(k_free.at[slot])
                    output = None if interpret is None else jnp.zeros((ROWS, value_dim), jnp.float32)
                    return weights, sums, output

                # Pallas's interpreter has no store to an accumulator: there the output is a value that a loop carries.
                def add_product(acc, weights, v):
                    if interpret is None:
                        return multiply(acc, weights, v, None)

                    def product(part):
                        multiply(part, weights, v, spare.at[warpgroup])
                        return plgpu.wgmma_accumulator_load(part, wait_n=0)

                    return pl.run_scoped(product, acc_type)

                def total_output(acc, product, output):
                    return plgpu.wgmma_accumulator_load(acc, wait_n=0) if interpret is None else output + product

                def attend(acc):
                    logits_type = accumulator(block_kv)
                    plgpu.barrier_wait(q_ready.at[warpgroup])

                    def visit(step, carry, *, is_partial: bool):
                        weights, sums, output = carry
                        slot, last_slot = ring(step), ring(step - 1)

                        plgpu.barrier_wait(k_ready.at[slot])
                        my_turn()

                        def tile(logits_acc):
                            plgpu.wgmma(logits_acc, q, k_smem.at[slot].transpose((1, 0)))
                            plgpu.barrier_wait(v_ready.at[last_slot])
                            product = add_product(acc, weights, v_smem.at[last_slot])
                            next_turn()
                            logits = plgpu.wgmma_accumulator_load(logits_acc, wait_n=1)
                            # A PARTIAL tile reads its keys' tokens, whose room is free with the keys'.
                            reads_tokens = has_tokens and is_partial
                            if not reads_tokens:
                                plgpu.barrier_arrive(k_free.at[slot])
                            new_weights, new_sums, shrink, shrinks = weigh(
                                masked(logits, step, is_partial),
                                sums,
                                to_log2=to_log2,
                                dtype=query.dtype,
                                interpreted=interpreted,
                            )
                            if reads_tokens:
                                plgpu.barrier_arrive(k_free.at[slot])
                            new_output = total_output(acc, product, output)
                            plgpu.barrier_arrive(v_free.at[last_slot])

                            def shrunk(output):
                                return output * spread(shrink, output.shape, rows=True)

                            new_output = jax.lax.cond(shrinks, shrunk, lambda output: output, new_output)
                            if interpret is None:
                                acc[...], new_output = new_output, None
                            return new_weights, new_sums, new_output

                        return pl.run_scoped(tile, logits_type)

                    plgpu.barrier_wait(k_ready.at[ring(row.begin)])
                    my_turn()
                    carry = pl.run_scoped(first_tile, logits_type)
                    second = row.begin + 1
                    partial_end, full_end, end = (jnp.maximum(end, second) for end in row.ends)

                    # PARTIAL tiles come before and after the FULL ones: in two turns, so that each loop is compiled
                    # once. One loop for each kind, since a branch within a loop costs up to 6 % of the speed here.
                    def visit_both_kinds(turn, carry):
                        start, middle, stop = (
                            jnp.where(turn == 0, first, then)
                            for first, then in ((second, full_end), (partial_end, end), (full_end, end))
                        )
                        carry = jax.lax.fori_loop(start, middle, functools.partial(visit, is_partial=True), carry)
                        return jax.lax.fori_loop(middle, stop, functools.partial(visit, is_partial=False), carry)

                    carry = jax.lax.fori_loop(0, 2, visit_both_kinds, carry)
                    if tuning.persistent:
                        plgpu.barrier_arrive(q_free.at[warpgroup])
                    weights, sums, output = carry
                    slot = ring(row.ends[2] - 1)
                    plgpu.barrier_wait(v_ready.at[slot])
                    product = add_product(acc, weights, v_smem.at[slot])
                    result = total_output(acc, product, output)
                    plgpu.barrier_arrive(v_free.at[slot])
                    write(result, sums.reference, row_sums(sums.shares, interpreted=interpreted))

                def write(output, reference, total):
                    # A NaN isn't 0: only a row without an allowed pair has summed up nothing.
                    attends = total != 0
                    shrink = jnp.ones_like(total)
                    if sinks is not None:
                        sink = optional["sinks"][block.head] * _LOG2_E
                        higher = jnp.maximum(reference, sink)
                        shrink = jnp.where(attends, jnp.exp2(reference - higher), 1.0)
                        reference, total = higher, total * shrink + jnp.exp2(sink - higher)
                    total = jnp.where(attends, total, 1.0)
                    lse = jnp.where(attends, reference * (1 / _LOG2_E) + jnp.log(total), -jnp.inf)
                    output = output * spread(shrink / total, output.shape, rows=True)
                    send(output.astype(query.dtype), lse)

                def send(output, lse):
                    # The copy engine has read what the last block left here.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    o_smem.at[warpgroup][...] = output
                    lse_smem.at[warpgroup][...] = lse
                    plgpu.commit_smem()
                    # Nothing keeps a copy from writing past the end of a dimension that isn't the array's last.
                    exists = None if q_len % block_q == 0 else q_first < q_len
                    its_output = output_ref.at[block.batch, q_rows, block.head]
                    plgpu.copy_smem_to_gmem(o_smem.at[warpgroup], its_output, exists)
                    plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_ref.at[block.batch, block.head, q_rows], exists)

                pass_by(0, row.begin)
                acc_type = accumulator(value_dim)
                has_tiles = row.begin < row.ends[2]
                pl.when(has_tiles)(lambda: pl.run_scoped(attend, acc_type))

                @pl.when(jnp.logical_not(has_tiles))
                def _():
                    if tuning.persistent:
                        # With a block's first tile come the queries of all its rows.
                        @pl.when(row.num_tiles > 0)
                        def _():
                            plgpu.barrier_wait(q_ready.at[warpgroup])
                            plgpu.barrier_arrive(q_free.at[warpgroup])
                    else:
                        # Of no use, but on its way to where the output goes.
                        plgpu.barrier_wait(q_ready.at[warpgroup])
                    send(
                        plgpu.layout_cast(jnp.zeros((ROWS, value_dim), query.dtype), plgpu.Layout.WGMMA),
                        plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), plgpu.Layout.WGMMA.reduce(1)),
                    )

                pass_by(row.ends[2], row.num_tiles)

            for_each_block(compute_block, warpgroup, draws=False)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if tuning.take_turns:
                pl.when(warpgroup == 0)(my_turn)

    dtype = query.dtype
    run = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((batch, q_len, num_heads, value_dim), dtype),
            jax.ShapeDtypeStruct((batch, num_heads, q_len), jnp.float32),
        ),
        scratch_types=dict(
            q_smem=matrix(num_warpgroups, ROWS, head_dim, dtype=dtype),
            k_smem=matrix(num_stages, block_kv, head_dim, dtype=dtype),
            v_smem=matrix(num_stages, block_kv, value_dim, dtype=dtype),
            lse_smem=vector(num_warpgroups, ROWS),
            q_ready=plgpu.Barrier(num_barriers=num_warpgroups),
            k_ready=plgpu.Barrier(num_arrivals=1 + len(tokens.given("key_value")), num_barriers=num_stages),
            v_ready=plgpu.Barrier(num_barriers=num_stages),
            k_free=plgpu.Barrier(num_arrivals=num_warpgroups, num_barriers=num_stages),
            v_free=plgpu.Barrier(num_arrivals=num_warpgroups, num_barriers=num_stages),
            turn=plgpu.Barrier(num_barriers=num_warpgroups),
            **token_memory(tokens, "key_value", num_stages, block_kv),
            **({} if interpret is None else {"spare": matrix(num_warpgroups, ROWS, block_kv, dtype=dtype)}),
            **({"q_free": plgpu.Barrier(num_barriers=num_warpgroups)} if tuning.persistent else {}),
            **({"tickets": Tickets.memory(num_warpgroups)} if draws_tickets else {}),
            **({"o_smem": matrix(num_warpgroups, ROWS, value_dim, dtype=dtype)} if output_apart else {}),
        ),
        grid=(schedule.num_programs,),
        grid_names=("program",),
        num_threads=num_warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    counter = [jax.new_ref(jnp.zeros((1,), jnp.int32))] if draws_tickets else []
    return run(query, key, value, rows.bounds, *given.values(), *counter)
