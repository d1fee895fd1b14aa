"""dQ alone: a block of queries stays, key/value tiles stream past it, in a fixed order."""

from __future__ import annotations

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.backward import LSE, PULL, Operands, multiply, see_last, weigh_pairs
from kernels.backends.mosaic_gpu.memory import WGMMA_ROWS as ROWS
from kernels.backends.mosaic_gpu.memory import accumulator, load_vector, matrix, spread, vector
from kernels.backends.mosaic_gpu.pairs import (
    Tokens,
    allowed_pairs,
    copy_tokens,
    resident_tokens,
    tile_tokens,
    token_memory,
)
from kernels.backends.mosaic_gpu.tile_scheduler import TileScheduler as Schedule
from kernels.backends.mosaic_gpu.walk import read_row
from kernels.backends.tile_walk import Rows
from kernels.call import AttentionCall
from kernels.tuning import MosaicBackwardTuning


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
    value_dim = operands.value.shape[-1]
    dtype = operands.query.dtype
    num_warpgroups, block_kv, num_stages = tuning.num_warpgroups, tuning.block_kv_dq, tuning.num_stages_dq
    # Wide heads leave no room for as many value tiles; those are read early in a step, and free the sooner.
    num_value_stages = max(1, num_stages - 1) if tuning.one_gradient_each else num_stages
    block_q = ROWS * num_warpgroups
    schedule = Schedule(batch, num_heads, pl.cdiv(q_len, block_q), tuning.heads_at_once * call.group_size)

    given = ({} if rows.tiles is None else {"tiles": rows.tiles}) | tokens.given()

    def kernel(
        query_ref, key_ref, value_ref, d_output_ref, lse_ref, pull_ref, bounds_ref, *refs,
        q_smem, do_smem, row_smem, k_smem, v_smem, ready, k_ready, v_ready, k_free, v_free, spare=None,
        token_smem=None,
    ):  # fmt: skip
        optional = dict(zip(given, refs, strict=False))
        (dq_ref,) = refs[len(given) :]
        token_refs = Tokens(*(optional.get(name) for name in Tokens._fields))
        b, head, i = schedule.block(jax.lax.axis_index("program"))
        warpgroup = jax.lax.axis_index("warpgroup")
        row = read_row(bounds_ref, optional.get("tiles"), b, i)

        @pl.when(warpgroup == num_warpgroups)
        def _load():
            plgpu.set_max_registers(tuning.load_registers, action="decrease")
            kv_head = head // call.group_size

            @pl.loop(0, row.num_tiles)
            def _(step):
                tile = pl.ds(row.tile(step) * block_kv, block_kv)
                for ref, smem, ready, free, stages in (
                    (key_ref, k_smem, k_ready, k_free, num_stages),
                    (value_ref, v_smem, v_ready, v_free, num_value_stages),
                ):
                    slot = jax.lax.rem(step, stages)
                    pl.when(step >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
                    plgpu.copy_gmem_to_smem(ref.at[b, tile, kv_head], smem.at[slot], ready.at[slot])
                    # Before the wait for the values' room: without their tokens the keys aren't ready.
                    if ref is key_ref:
                        copy_tokens(token_refs, token_smem, "key_value", (b, tile), slot, k_ready.at[slot])

            see_last(k_free, row.num_tiles, num_stages)
            see_last(v_free, row.num_tiles, num_value_stages)

        @pl.when(warpgroup < num_warpgroups)
        def _compute():
            plgpu.set_max_registers(tuning.compute_registers, action="increase")
            q_first = i * block_q + warpgroup * ROWS
            q_rows, my_ready = pl.ds(q_first, ROWS), ready.at[warpgroup]
            my_spare = None if spare is None else spare.at[warpgroup]
            plgpu.copy_gmem_to_smem(query_ref.at[b, q_rows, head], q_smem.at[warpgroup], my_ready)
            plgpu.copy_gmem_to_smem(d_output_ref.at[b, q_rows, head], do_smem.at[warpgroup], my_ready)
            plgpu.copy_gmem_to_smem(lse_ref.at[b, head, q_rows], row_smem.at[LSE, warpgroup], my_ready)
            plgpu.copy_gmem_to_smem(pull_ref.at[b, head, q_rows], row_smem.at[PULL, warpgroup], my_ready)
            resident = resident_tokens(token_refs, "key_value", (b, q_rows))
            plgpu.barrier_wait(my_ready)
            lse = load_vector(row_smem.at[LSE, warpgroup], rows=True)
            pull = load_vector(row_smem.at[PULL, warpgroup], rows=True)

            def accumulate(dq_acc):
                @pl.loop(0, row.num_tiles)
                def _(step):
                    slot, v_slot = jax.lax.rem(step, num_stages), jax.lax.rem(step, num_value_stages)
                    k, v = k_smem.at[slot], v_smem.at[v_slot]
                    # What the compiler can't know to be the same in every step, it doesn't keep in registers: the
                    # addresses of all parts of wide operands fill a thread's.
                    mine = jax.lax.optimization_barrier(warpgroup)
                    q, do = q_smem.at[mine], do_smem.at[mine]

                    def start(logits_acc):
                        plgpu.wgmma(logits_acc, q, k.transpose((1, 0)))
                        plgpu.barrier_wait(v_ready.at[v_slot])
                        return pl.run_scoped(functools.partial(weigh, logits_acc), logits_type)

                    def weigh(logits_acc, dp_acc):
                        plgpu.wgmma(dp_acc, do, v.transpose((1, 0)))
                        logits = plgpu.wgmma_accumulator_load(logits_acc, wait_n=1)
                        kv_first = row.tile(step) * block_kv
                        its_tokens = tile_tokens(token_refs, token_smem, "key_value", resident=resident, slot=slot)
                        allowed = functools.partial(
                            allowed_pairs, call, its_tokens, q_first, kv_first,
                            kv_padded=call.kv_len % block_kv != 0, transposed=False, interpreted=interpret is not None,
                        )  # fmt: skip
                        weights, slope = weigh_pairs(logits, lse, call, step < row.num_partial, allowed, rows=True)
                        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                        plgpu.barrier_arrive(v_free.at[v_slot])
                        d_logits = weights * (dp - spread(pull, dp.shape, rows=True))
                        return (d_logits if slope is None else d_logits * slope).astype(dtype)

                    logits_type = accumulator(block_kv)
                    plgpu.barrier_wait(k_ready.at[slot])
                    d_logits = pl.run_scoped(start, logits_type)
                    multiply(dq_acc, d_logits, k, my_spare)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(k_free.at[slot])

                q_smem.at[warpgroup][...] = (plgpu.wgmma_accumulator_load(dq_acc, wait_n=0) * call.scale).astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(q_smem.at[warpgroup], dq_ref.at[b, q_rows, head])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            pl.run_scoped(accumulate, accumulator(head_dim))

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(operands.query.shape, dtype),
        scratch_types=dict(
            **token_memory(tokens, "key_value", num_stages, block_kv),
            **({} if interpret is None else {"spare": matrix(num_warpgroups, ROWS, block_kv, dtype=dtype)}),
            q_smem=matrix(num_warpgroups, ROWS, head_dim, dtype=dtype),
            do_smem=matrix(num_warpgroups, ROWS, value_dim, dtype=dtype),
            row_smem=vector(2, num_warpgroups, ROWS),
            k_smem=matrix(num_stages, block_kv, head_dim, dtype=dtype),
            v_smem=matrix(num_value_stages, block_kv, value_dim, dtype=dtype),
            ready=plgpu.Barrier(num_arrivals=4, num_barriers=num_warpgroups),
            k_ready=plgpu.Barrier(num_arrivals=1 + len(tokens.given("key_value")), num_barriers=num_stages),
            v_ready=plgpu.Barrier(num_barriers=num_value_stages),
            k_free=plgpu.Barrier(num_arrivals=num_warpgroups, num_barriers=num_stages),
            v_free=plgpu.Barrier(num_arrivals=num_warpgroups, num_barriers=num_value_stages),
        ),
        grid=(schedule.num_programs,),
        grid_names=("program",),
        num_threads=num_warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return run(*operands, rows.bounds, *given.values())
