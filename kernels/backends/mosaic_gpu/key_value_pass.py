"""dK, dV and, in the fused form, dQ: a block of keys and values stays, query tiles stream past it.

Working on the transposed tile, keys as rows, leaves the weights and the logits' gradients in registers as the operands
of dV and dK. The fused form makes dQ, too: the warpgroups exchange the logits' gradients through shared memory,
multiply them with the keys, and add the product to a float32 dQ in memory, in no fixed order. Five matmuls a tile. The
split form leaves dQ to `query_pass`: seven matmuls a tile, the same bits in every run.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.backward import Operands, log2_scale, multiply, see_last, weigh_pairs
from kernels.backends.mosaic_gpu.memory import WGMMA_ROWS as ROWS
from kernels.backends.mosaic_gpu.memory import accumulator, load_vector, matrix, vector
from kernels.backends.mosaic_gpu.offsets import NUM_COLUMNS, offset_columns, offset_weights
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

# Indices of a query's offsets.
_PULL, _LSE = 0, 1
# With other scales, lse over the scale may be out of float16's range, or too small for it; then lse is subtracted after
# the scale.
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-16, 2.0**10
# What the loading warpgroup tells the others of a step.
_TILE, _IS_PARTIAL, _HEAD = range(3)
# Query tiles from one block's first to the next one's, where they would all have the same.
_SHIFT = 4


def key_value_pass(
    operands: Operands,
    tokens: Tokens,
    rows: Rows,
    call: AttentionCall,
    tuning: MosaicBackwardTuning,
    interpret,
    *,
    fused: bool,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"], Float[Array, "B T N H"] | None]:
    """dK, dV and, if fused, the float32 dQ without the scale.

    Args:
      operands, tokens: padded to whole tiles.
      rows: the query tiles of each key/value block.
      call: the call, with the lengths before padding.
      tuning: how the kernel runs.
      interpret: parameters of Pallas's interpreter, or None.
      fused: whether to make dQ.
    """
    batch, _, _, head_dim = operands.query.shape
    _, kv_len, num_kv_heads, value_dim = operands.value.shape
    dtype = operands.query.dtype
    num_warpgroups, block_q, block_kv, num_stages = (
        tuning.num_warpgroups,
        tuning.block_q,
        tuning.block_kv,
        tuning.num_stages,
    )
    schedule = Schedule(batch, num_kv_heads, pl.cdiv(kv_len, block_kv), tuning.heads_at_once, last_blocks_first=False)
    # Warpgroups share dK and dV by keys, and a tile of dQ by rows, or where there are too few rows, by columns.
    dq_by_rows = not tuning.divides_dq_by_columns
    dq_cols = head_dim if dq_by_rows else head_dim // num_warpgroups

    # Blocks that begin with the same query tile would all add to the same part of dQ at once.
    same_start = call.mask.same_keys_for_all_queries and all(x is None for x in tokens)

    # A soft cap comes between the product and lse.
    lse_is_offset = call.logits_soft_cap is None and _LEAST_SCALE <= call.scale <= _LARGEST_SCALE
    offsets = [-operands.delta, *([operands.lse * (-1 / log2_scale(call))] if lse_is_offset else [])]

    given = ({} if rows.tiles is None else {"tiles": rows.tiles}) | tokens.given()
    if not lse_is_offset:
        given["lse"] = operands.lse

    # A step's gradients of the logits are read in the next step. A warpgroup that writes a fourth knows that the other
    # has read the first: it has written the third since. Tall tiles leave room for two, and a barrier tells it.
    tall = block_q > ROWS
    num_ds_buffers = 2 if tall else 3

    # Tall tiles are faster if dV's product is started before dP is awaited, others if not (one H200, JAX 0.11.2,
    # 2026-11-21: 1x12x32768x64 7.9 and 8.7 ms, 1x16x32768x128 20.2 and 18.9 ms).
    dv_before_dp = tall

    # What the compiler can't know to be the same in every step, it doesn't keep in registers: here the addresses of
    # keys and values, one for each 16 columns (one H200, JAX 0.11.2, 2026-11-22: forward and backward with a window of
    # 4,096 take 3 % less). And nobody else reads a warpgroup's values: dV may go out while the last dQ is made (packed
    # documents: 1 to 2 % less). Tall tiles are 1 % slower with either; the second has them spill registers.
    new_addresses = dv_before_last_dq = not tall

    def kernel(
        query_ref, key_ref, value_ref, d_output_ref, offset_ref, bounds_ref, *refs,
        k_smem, v_smem, q_smem, do_smem, offset_smem, step_smem,
        k_ready, v_ready, q_ready, do_ready, free, done,
        lse_smem=None, token_smem=None, ds_smem=None, dq_smem=None, ds_ready=None, ds_read=None, spare=None,
    ):  # fmt: skip
        optional = dict(zip(given, refs, strict=False))
        *dq_ref, dk_ref, dv_ref = refs[len(given) :]
        token_refs = Tokens(*(optional.get(name) for name in Tokens._fields))
        b, kv_head, j = schedule.block(jax.lax.axis_index("program"))
        warpgroup = jax.lax.axis_index("warpgroup")
        row = read_row(bounds_ref, optional.get("tiles"), b, j, shift=j * _SHIFT if same_start else None)
        num_steps = call.group_size * row.num_tiles

        @pl.when(warpgroup == num_warpgroups)
        def _load():
            plgpu.set_max_registers(tuning.load_registers, action="decrease")
            keys = pl.ds(j * block_kv, block_kv)
            plgpu.copy_gmem_to_smem(key_ref.at[b, keys, kv_head], k_smem, k_ready)
            plgpu.copy_gmem_to_smem(value_ref.at[b, keys, kv_head], v_smem, v_ready)

            @pl.loop(0, num_steps)
            def _(step):
                # All tiles of one of a group's heads, then the next one's: programs that run at a time are at the same
                # head, and what they share of it stays in the L2 cache.
                member = 0 if call.group_size == 1 else jax.lax.div(step, row.num_tiles)
                head, rank = kv_head * call.group_size + member, step - member * row.num_tiles
                slot, tile = jax.lax.rem(step, num_stages), row.tile(rank)
                queries, ready = pl.ds(tile * block_q, block_q), q_ready.at[slot]
                pl.when(step >= num_stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                # Without this the others would each keep what it takes to know, and have no registers left for it.
                step_smem[slot, _TILE] = tile
                step_smem[slot, _IS_PARTIAL] = (rank < row.num_partial).astype(jnp.int32)
                step_smem[slot, _HEAD] = head
                plgpu.barrier_arrive(ready)
                plgpu.copy_gmem_to_smem(query_ref.at[b, queries, head], q_smem.at[slot], ready)
                plgpu.copy_gmem_to_smem(offset_ref.at[b, head, queries], offset_smem.at[slot], ready)
                if not lse_is_offset:
                    plgpu.copy_gmem_to_smem(optional["lse"].at[b, head, queries], lse_smem.at[slot], ready)
                copy_tokens(token_refs, token_smem, "query", (b, queries), slot, ready)
                plgpu.copy_gmem_to_smem(d_output_ref.at[b, queries, head], do_smem.at[slot], do_ready.at[slot])

            see_last(free, num_steps, num_stages)

        @pl.when(warpgroup < num_warpgroups)
        def _compute():
            plgpu.set_max_registers(tuning.compute_registers, action="increase")
            my_keys = my_rows = pl.ds(warpgroup * ROWS, ROWS)
            my_first = j * block_kv + warpgroup * ROWS
            my_spare, spare_weights = (None, None) if spare is None else (x.at[warpgroup] for x in spare)
            my_dq_cols = pl.ds(0 if dq_by_rows else warpgroup * dq_cols, dq_cols)
            resident = resident_tokens(token_refs, "query", (b, pl.ds(my_first, ROWS)))
            offset_keys = [offset_weights(index, dtype) for index in range(len(offsets))]
            plgpu.barrier_wait(k_ready)
            plgpu.barrier_wait(v_ready)

            def accumulate(dk_acc, dv_acc):
                def visit(step, last):
                    slot = jax.lax.rem(step, num_stages)
                    me = jax.lax.optimization_barrier(warpgroup) if new_addresses else warpgroup
                    k, v = (operand.at[pl.ds(me * ROWS, ROWS)] for operand in (k_smem, v_smem))
                    plgpu.barrier_wait(q_ready.at[slot])
                    tile, is_partial = step_smem[slot, _TILE], step_smem[slot, _IS_PARTIAL] > 0
                    head = step_smem[slot, _HEAD] if call.group_size > 1 else kv_head
                    q, do = q_smem.at[slot], do_smem.at[slot]

                    def start_at(index, acc):
                        multiply(acc, offset_keys[index], offset_smem.at[slot].transpose((1, 0)), spare_weights)

                    def weigh(logits_acc, dp_acc):
                        if lse_is_offset:
                            start_at(_LSE, logits_acc)
                        plgpu.wgmma(logits_acc, k, q.transpose((1, 0)))
                        start_at(_PULL, dp_acc)
                        plgpu.barrier_wait(do_ready.at[slot])
                        plgpu.wgmma(dp_acc, v, do.transpose((1, 0)))
                        # Of these products, only the last may still be on its way.
                        logits = plgpu.wgmma_accumulator_load(logits_acc, wait_n=1)
                        lse = None if lse_is_offset else load_vector(lse_smem.at[slot], rows=False)
                        q_first = tile * block_q
                        its_tokens = tile_tokens(token_refs, token_smem, "query", resident=resident, slot=slot)
                        allowed = functools.partial(
                            allowed_pairs, call, its_tokens, q_first, my_first,
                            kv_padded=call.kv_len % block_kv != 0, transposed=True, interpreted=interpret is not None,
                        )  # fmt: skip
                        weights, slope = weigh_pairs(logits, lse, call, is_partial, allowed, rows=False)
                        operand = weights.astype(dtype)
                        if dv_before_dp:
                            multiply(dv_acc, operand, do, my_spare)
                        d_logits = weights * plgpu.wgmma_accumulator_load(dp_acc, wait_n=int(dv_before_dp))
                        d_logits = d_logits if slope is None else d_logits * slope
                        return operand, d_logits.astype(dtype)

                    logits_type = accumulator(block_q)
                    weights, d_logits = pl.run_scoped(weigh, logits_type, logits_type)

                    def add_dv():
                        if not dv_before_dp:
                            multiply(dv_acc, weights, do, my_spare)

                    if not fused:
                        add_dv()
                        multiply(dk_acc, d_logits, q, my_spare)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(free.at[slot])
                        return last

                    # The last step's dQ is made in this one, so that warpgroups may run half a step apart and one
                    # weighs while the other multiplies.
                    pl.when(step > 0)(lambda: plgpu.barrier_wait(ds_ready))
                    if num_ds_buffers == 2:
                        pl.when(step > 1)(lambda: plgpu.barrier_wait(ds_read))
                    ds_smem.at[jax.lax.rem(step, num_ds_buffers), my_keys][...] = d_logits
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ds_ready)

                    def multiply_all(dq_acc):
                        start_dq(dq_acc, step - 1)
                        add_dv()
                        multiply(dk_acc, d_logits, q, my_spare)
                        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1 if dv_before_dp else 2)
                        if num_ds_buffers == 2:
                            pl.when(step > 0)(lambda: plgpu.barrier_arrive(ds_read))
                        send_dq(dq, last, predicate=step > 0)
                        plgpu.wgmma_wait(0)

                    pl.run_scoped(multiply_all, dq_type)
                    plgpu.barrier_arrive(free.at[slot])
                    return tile, head

                dq_type = accumulator(dq_cols)

                def start_dq(dq_acc, step):
                    ds = ds_smem.at[jax.lax.rem(step + num_ds_buffers, num_ds_buffers)]
                    ds = ds.at[:, my_rows] if dq_by_rows else ds
                    plgpu.wgmma(dq_acc, ds.transpose((1, 0)), k_smem.at[:, my_dq_cols])

                def send_dq(dq, where, predicate=None):
                    tile, head = where
                    # The copy engine has read what dQ's buffer held.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    dq_smem.at[warpgroup][...] = dq
                    plgpu.commit_smem()
                    rows = pl.ds(tile * block_q + (warpgroup * ROWS if dq_by_rows else 0), ROWS)
                    dq_part = dq_ref[0].at[b, rows, head, my_dq_cols]
                    plgpu.copy_smem_to_gmem(dq_smem.at[warpgroup], dq_part, predicate, reduction_op="add")

                # One loop for all kinds of tiles and all heads: with one for each, registers spill.
                last = jax.lax.fori_loop(0, num_steps, visit, (jnp.int32(0), jnp.int32(0)))

                def store(gradient, smem, ref):
                    smem.at[my_keys][...] = gradient.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(smem.at[my_keys], ref.at[b, pl.ds(my_first, ROWS), kv_head])

                def store_dv():
                    store(plgpu.wgmma_accumulator_load(dv_acc, wait_n=0), v_smem, dv_ref)

                if dv_before_last_dq:
                    store_dv()
                if fused:

                    @pl.when(num_steps > 0)
                    def _():
                        plgpu.barrier_wait(ds_ready)

                        def last_dq(dq_acc):
                            start_dq(dq_acc, num_steps - 1)
                            send_dq(plgpu.wgmma_accumulator_load(dq_acc, wait_n=0), last)

                        pl.run_scoped(last_dq, dq_type)

                    if num_ds_buffers == 2:
                        # Whoever waits at a barrier must see each of its completions.
                        pl.when(num_steps > 1)(lambda: plgpu.barrier_wait(ds_read))

                if not dv_before_last_dq:
                    store_dv()
                dk = plgpu.wgmma_accumulator_load(dk_acc, wait_n=0)
                # The other warpgroups' dQ reads these keys.
                plgpu.barrier_arrive(done)
                plgpu.barrier_wait(done)
                store(dk * call.scale, k_smem, dk_ref)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            pl.run_scoped(accumulate, accumulator(head_dim), accumulator(value_dim))

    scratch = {
        "k_smem": matrix(block_kv, head_dim, dtype=dtype),
        "v_smem": matrix(block_kv, value_dim, dtype=dtype),
        "q_smem": matrix(num_stages, block_q, head_dim, dtype=dtype),
        "do_smem": matrix(num_stages, block_q, value_dim, dtype=dtype),
        "offset_smem": matrix(num_stages, block_q, NUM_COLUMNS, dtype=dtype),
        "step_smem": plgpu.SMEM((num_stages, 3), jnp.int32),
        "k_ready": plgpu.Barrier(),
        "v_ready": plgpu.Barrier(),
        "q_ready": plgpu.Barrier(
            num_arrivals=3 + (not lse_is_offset) + len(tokens.given("query")), num_barriers=num_stages
        ),
        "do_ready": plgpu.Barrier(num_barriers=num_stages),
        "free": plgpu.Barrier(num_arrivals=num_warpgroups, num_barriers=num_stages),
        "done": plgpu.Barrier(num_arrivals=num_warpgroups),
        **token_memory(tokens, "query", num_stages, block_q),
    }
    if not lse_is_offset:
        scratch["lse_smem"] = vector(num_stages, block_q)
    if interpret is not None:
        scratch["spare"] = [matrix(num_warpgroups, ROWS, columns, dtype=dtype) for columns in (block_q, NUM_COLUMNS)]
    if fused:
        scratch |= {
            "ds_smem": matrix(num_ds_buffers, block_kv, block_q, dtype=dtype),
            "dq_smem": matrix(num_warpgroups, ROWS, dq_cols, dtype=jnp.float32),
            "ds_ready": plgpu.Barrier(num_arrivals=num_warpgroups),
        }
        if num_ds_buffers == 2:
            scratch["ds_read"] = plgpu.Barrier(num_arrivals=num_warpgroups)
    run = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(operands.key.shape, dtype),
            jax.ShapeDtypeStruct(operands.value.shape, dtype),
        ),
        scratch_types=scratch,
        grid=(schedule.num_programs,),
        grid_names=("program",),
        num_threads=num_warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    inputs = (
        operands.query,
        operands.key,
        operands.value,
        operands.d_output,
        offset_columns(*offsets, dtype=dtype),
        rows.bounds,
        *given.values(),
    )
    if not fused:
        return (*run(*inputs), None)
    d_query = jax.new_ref(jnp.zeros(operands.query.shape, jnp.float32))
    d_key, d_value = run(*inputs, d_query)
    return d_key, d_value, jax.freeze(d_query)
