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

from kernels.backends.mosaic_gpu.backward import LSE, PULL, Operands, see_last, weigh_pairs
from kernels.backends.mosaic_gpu.memory import ROWS, accumulator, load_vector, matrix, multiply, spread, vector
from kernels.backends.mosaic_gpu.pairs import (
    Tokens,
    allowed_pairs,
    copy_tokens,
    resident_tokens,
    tile_tokens,
    token_memory,
)
from kernels.backends.mosaic_gpu.schedule import Schedule
from kernels.backends.mosaic_gpu.walk import read_row
from kernels.backends.tile_walk import Rows
from kernels.call import AttentionCall
from kernels.masks import FullMask, PrefixMask
from kernels.tuning import MosaicBackwardTuning

# A step's gradients of the logits are read in the next step. A warpgroup that writes a third knows that the other has
# read the first: it has written the second since.
_DS_BUFFERS = 3
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
    schedule = Schedule(batch, num_kv_heads, pl.cdiv(kv_len, block_kv), tuning.heads_at_once, last_rows_first=False)
    # Warpgroups share dK and dV by keys, and a tile of dQ by rows, or where there are too few rows, by columns.
    dq_by_rows = not tuning.divides_dq_by_columns
    dq_cols = head_dim if dq_by_rows else head_dim // num_warpgroups

    # Blocks that begin with the same query tile would all add to the same part of dQ at once.
    same_start = isinstance(call.mask, (FullMask, PrefixMask)) and all(x is None for x in tokens)

    given = ({} if rows.tiles is None else {"tiles": rows.tiles}) | tokens.given()

    # With the largest tiles nothing is left of shared memory, and tokens are read from where they are.
    token_scratch = {} if fused and block_q > ROWS else token_memory(tokens, "query", num_stages, block_q)

    def kernel(
        query_ref, key_ref, value_ref, d_output_ref, lse_ref, pull_ref, bounds_ref, *refs,
        k_smem, v_smem, q_smem, do_smem, row_smem,
        k_ready, v_ready, q_ready, do_ready, free, done, ds_smem=None, dq_smem=None, ds_ready=None, spare=None,
        token_smem=None,
    ):  # fmt: skip
        optional = dict(zip(given, refs, strict=False))
        *dq_ref, dk_ref, dv_ref = refs[len(given) :]
        token_refs = Tokens(*(optional.get(name) for name in Tokens._fields))
        b, kv_head, j = schedule.block(jax.lax.axis_index("program"))
        warpgroup = jax.lax.axis_index("warpgroup")
        row = read_row(bounds_ref, optional.get("tiles"), b, j, shift=j * _SHIFT if same_start else None)

        @pl.when(warpgroup == num_warpgroups)
        def _load():
            plgpu.set_max_registers(tuning.load_registers, action="decrease")
            keys = pl.ds(j * block_kv, block_kv)
            plgpu.copy_gmem_to_smem(key_ref.at[b, keys, kv_head], k_smem, k_ready)
            plgpu.copy_gmem_to_smem(value_ref.at[b, keys, kv_head], v_smem, v_ready)

            @pl.loop(0, call.group_size)
            def _(member):
                head = kv_head * call.group_size + member

                @pl.loop(0, row.num_tiles)
                def _(rank):
                    step = member * row.num_tiles + rank
                    slot = jax.lax.rem(step, num_stages)
                    tile = pl.ds(row.tile(rank) * block_q, block_q)
                    pl.when(step >= num_stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                    plgpu.copy_gmem_to_smem(query_ref.at[b, tile, head], q_smem.at[slot], q_ready.at[slot])
                    plgpu.copy_gmem_to_smem(lse_ref.at[b, head, tile], row_smem.at[LSE, slot], q_ready.at[slot])
                    copy_tokens(token_refs, token_smem, "query", (b, tile), slot, q_ready.at[slot])
                    plgpu.copy_gmem_to_smem(d_output_ref.at[b, tile, head], do_smem.at[slot], do_ready.at[slot])
                    plgpu.copy_gmem_to_smem(pull_ref.at[b, head, tile], row_smem.at[PULL, slot], do_ready.at[slot])

            see_last(free, call.group_size * row.num_tiles, num_stages)

        @pl.when(warpgroup < num_warpgroups)
        def _compute():
            plgpu.set_max_registers(tuning.compute_registers, action="increase")
            my_keys = my_rows = pl.ds(warpgroup * ROWS, ROWS)
            my_first = j * block_kv + warpgroup * ROWS
            k, v = k_smem.at[my_keys], v_smem.at[my_keys]
            my_spare = None if spare is None else spare.at[warpgroup]
            my_dq_cols = pl.ds(0 if dq_by_rows else warpgroup * dq_cols, dq_cols)
            resident = resident_tokens(token_refs, "query", (b, pl.ds(my_first, ROWS)))
            plgpu.barrier_wait(k_ready)
            plgpu.barrier_wait(v_ready)

            def accumulate(dk_acc, dv_acc):
                def visit(rank, last, *, member):
                    head = kv_head * call.group_size + member
                    step = member * row.num_tiles + rank
                    slot = jax.lax.rem(step, num_stages)
                    q, do, tile = q_smem.at[slot], do_smem.at[slot], row.tile(rank)

                    def weigh(logits_acc, dp_acc):
                        plgpu.barrier_wait(q_ready.at[slot])
                        plgpu.wgmma(logits_acc, k, q.transpose((1, 0)))
                        plgpu.barrier_wait(do_ready.at[slot])
                        plgpu.wgmma(dp_acc, v, do.transpose((1, 0)))
                        logits = plgpu.wgmma_accumulator_load(logits_acc, wait_n=1)
                        lse = load_vector(row_smem.at[LSE, slot], rows=False)
                        q_first = tile * block_q
                        its_tokens = tile_tokens(
                            token_refs, token_smem, "query",
                            resident=resident, past=(b, pl.ds(q_first, block_q)), slot=slot,
                        )  # fmt: skip
                        allowed = functools.partial(
                            allowed_pairs, call, its_tokens, q_first, my_first,
                            kv_padded=call.kv_len % block_kv != 0, transposed=True,
                        )  # fmt: skip
                        weights, slope = weigh_pairs(logits, lse, call, rank < row.num_partial, allowed, rows=False)
                        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                        pull = load_vector(row_smem.at[PULL, slot], rows=False)
                        d_logits = weights * (dp - spread(pull, dp.shape, rows=False))
                        d_logits = d_logits if slope is None else d_logits * slope
                        return weights.astype(dtype), d_logits.astype(dtype)

                    logits_type = accumulator(block_q)
                    weights, d_logits = pl.run_scoped(weigh, logits_type, logits_type)

                    if not fused:
                        multiply(dv_acc, weights, do, my_spare)
                        multiply(dk_acc, d_logits, q, my_spare)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(free.at[slot])
                        return last

                    # The last step's dQ is made in this one, so that warpgroups may run half a step apart and one
                    # weighs while the other multiplies.
                    pl.when(step > 0)(lambda: plgpu.barrier_wait(ds_ready))
                    ds_smem.at[jax.lax.rem(step, _DS_BUFFERS), my_keys][...] = d_logits
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ds_ready)

                    def multiply_all(dq_acc):
                        start_dq(dq_acc, step - 1)
                        multiply(dv_acc, weights, do, my_spare)
                        multiply(dk_acc, d_logits, q, my_spare)
                        send_dq(dq_acc, last, wait_n=2, predicate=step > 0)
                        plgpu.wgmma_wait(0)

                    pl.run_scoped(multiply_all, dq_type)
                    plgpu.barrier_arrive(free.at[slot])
                    return tile, head

                dq_type = accumulator(dq_cols)

                def start_dq(dq_acc, step):
                    ds = ds_smem.at[jax.lax.rem(step + _DS_BUFFERS, _DS_BUFFERS)]
                    ds = ds.at[:, my_rows] if dq_by_rows else ds
                    plgpu.wgmma(dq_acc, ds.transpose((1, 0)), k_smem.at[:, my_dq_cols])

                def send_dq(dq_acc, where, *, wait_n: int, predicate=None):
                    tile, head = where
                    # The copy engine has read what dQ's buffer held.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    dq_smem.at[warpgroup][...] = plgpu.wgmma_accumulator_load(dq_acc, wait_n=wait_n)
                    plgpu.commit_smem()
                    rows = pl.ds(tile * block_q + (warpgroup * ROWS if dq_by_rows else 0), ROWS)
                    dq_part = dq_ref[0].at[b, rows, head, my_dq_cols]
                    plgpu.copy_smem_to_gmem(dq_smem.at[warpgroup], dq_part, predicate, reduction_op="add")

                # One loop for all kinds of tiles: with one for each, registers spill.
                def visit_all(member, last):
                    return jax.lax.fori_loop(0, row.num_tiles, functools.partial(visit, member=member), last)

                last = jax.lax.fori_loop(0, call.group_size, visit_all, (jnp.int32(0), jnp.int32(0)))
                if fused:

                    @pl.when(row.num_tiles > 0)
                    def _():
                        plgpu.barrier_wait(ds_ready)

                        def last_dq(dq_acc):
                            start_dq(dq_acc, call.group_size * row.num_tiles - 1)
                            send_dq(dq_acc, last, wait_n=0)

                        pl.run_scoped(last_dq, dq_type)

                dv = plgpu.wgmma_accumulator_load(dv_acc, wait_n=0)
                dk = plgpu.wgmma_accumulator_load(dk_acc, wait_n=0)
                # The other warpgroups' dQ reads these keys.
                plgpu.barrier_arrive(done)
                plgpu.barrier_wait(done)
                v[...] = dv.astype(dtype)
                k[...] = (dk * call.scale).astype(dtype)
                plgpu.commit_smem()
                keys = pl.ds(my_first, ROWS)
                plgpu.copy_smem_to_gmem(v, dv_ref.at[b, keys, kv_head])
                plgpu.copy_smem_to_gmem(k, dk_ref.at[b, keys, kv_head])
                plgpu.wait_smem_to_gmem(0)

            pl.run_scoped(accumulate, accumulator(head_dim), accumulator(value_dim))

    scratch = {
        "k_smem": matrix(block_kv, head_dim, dtype=dtype),
        "v_smem": matrix(block_kv, value_dim, dtype=dtype),
        "q_smem": matrix(num_stages, block_q, head_dim, dtype=dtype),
        "do_smem": matrix(num_stages, block_q, value_dim, dtype=dtype),
        "row_smem": vector(2, num_stages, block_q),
        "k_ready": plgpu.Barrier(),
        "v_ready": plgpu.Barrier(),
        "q_ready": plgpu.Barrier(
            num_arrivals=2 + (len(tokens.given("query")) if token_scratch else 0), num_barriers=num_stages
        ),
        "do_ready": plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
        "free": plgpu.Barrier(num_arrivals=num_warpgroups, num_barriers=num_stages),
        "done": plgpu.Barrier(num_arrivals=num_warpgroups),
        **token_scratch,
    }
    if interpret is not None:
        scratch["spare"] = matrix(num_warpgroups, ROWS, block_q, dtype=dtype)
    if fused:
        scratch |= {
            "ds_smem": matrix(_DS_BUFFERS, block_kv, block_q, dtype=dtype),
            "dq_smem": matrix(num_warpgroups, ROWS, dq_cols, dtype=jnp.float32),
            "ds_ready": plgpu.Barrier(num_arrivals=num_warpgroups),
        }
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
    inputs = (*operands, rows.bounds, *given.values())
    if not fused:
        return (*run(*inputs), None)
    d_query = jax.new_ref(jnp.zeros(operands.query.shape, jnp.float32))
    d_key, d_value = run(*inputs, d_query)
    return d_key, d_value, jax.freeze(d_query)
