"""dK and dV of wide heads: a block of 64 keys and values stays, query tiles stream past it.

Above a head dim of 128 one warpgroup's registers don't hold a row of both gradients. Two warpgroups divide the work by
products: one makes the weights and dV, the other the logits' gradients and dK. Every product is made once; the weights
go from one to the other through shared memory, in float32.

Either warpgroup adds up the last tile's gradient while it weighs this tile, and the first may be a tile ahead of the
second.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.backward import LSE, PULL, Operands, multiply, see_last, weigh_pairs
from kernels.backends.mosaic_gpu.memory import (
    WGMMA_ROWS as ROWS,
)
from kernels.backends.mosaic_gpu.memory import (
    accumulator,
    load_matrix,
    load_vector,
    matrix,
    spread,
    vector,
)
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

_DV, _DK, _LOAD = 0, 1, 2
# Tiles by which the weights' warpgroup may be ahead.
_WEIGHT_BUFFERS = 2


def wide_key_value_pass(
    operands: Operands, tokens: Tokens, rows: Rows, call: AttentionCall, tuning: MosaicBackwardTuning, interpret
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"], None]:
    """dK, dV and, as `key_value_pass` does without fusing, None for dQ.

    Args:
      operands, tokens: padded to whole tiles.
      rows: the query tiles of each block of 64 keys.
      call: the call, with the lengths before padding.
      tuning: how the kernel runs.
      interpret: parameters of Pallas's interpreter, or None.
    """
    batch, _, _, head_dim = operands.query.shape
    _, kv_len, num_kv_heads, value_dim = operands.value.shape
    dtype = operands.query.dtype
    block_q, num_stages = tuning.block_q, tuning.num_stages
    schedule = Schedule(batch, num_kv_heads, pl.cdiv(kv_len, ROWS), tuning.heads_at_once, last_blocks_first=False)
    given = ({} if rows.tiles is None else {"tiles": rows.tiles}) | tokens.given()

    def kernel(
        query_ref, key_ref, value_ref, d_output_ref, lse_ref, pull_ref, bounds_ref, *refs,
        k_smem, v_smem, q_smem, do_smem, row_smem, p_smem,
        k_ready, v_ready, q_ready, do_ready, q_free, do_free, p_ready, p_free, done, spare=None,
        token_smem=None,
    ):  # fmt: skip
        optional = dict(zip(given, refs, strict=False))
        dk_ref, dv_ref = refs[len(given) :]
        token_refs = Tokens(*(optional.get(name) for name in Tokens._fields))
        b, kv_head, j = schedule.block(jax.lax.axis_index("program"))
        warpgroup = jax.lax.axis_index("warpgroup")
        row = read_row(bounds_ref, optional.get("tiles"), b, j)
        keys = pl.ds(j * ROWS, ROWS)
        num_steps = call.group_size * row.num_tiles

        def where(step):
            """Query head and tile of a step."""
            member = jax.lax.div(step, row.num_tiles)
            rank = step - member * row.num_tiles
            return kv_head * call.group_size + member, row.tile(rank), rank

        @pl.when(warpgroup == _LOAD)
        def _load():
            plgpu.set_max_registers(tuning.load_registers, action="decrease")
            plgpu.copy_gmem_to_smem(key_ref.at[b, keys, kv_head], k_smem, k_ready)
            plgpu.copy_gmem_to_smem(value_ref.at[b, keys, kv_head], v_smem, v_ready)

            @pl.loop(0, num_steps)
            def _(step):
                slot = jax.lax.rem(step, num_stages)
                head, tile, _ = where(step)
                queries = pl.ds(tile * block_q, block_q)
                pl.when(step >= num_stages)(lambda: plgpu.barrier_wait(q_free.at[slot]))
                plgpu.copy_gmem_to_smem(query_ref.at[b, queries, head], q_smem.at[slot], q_ready.at[slot])
                plgpu.copy_gmem_to_smem(lse_ref.at[b, head, queries], row_smem.at[LSE, slot], q_ready.at[slot])
                copy_tokens(token_refs, token_smem, "query", (b, queries), slot, q_ready.at[slot])
                pl.when(step >= num_stages)(lambda: plgpu.barrier_wait(do_free.at[slot]))
                plgpu.copy_gmem_to_smem(d_output_ref.at[b, queries, head], do_smem.at[slot], do_ready.at[slot])
                plgpu.copy_gmem_to_smem(pull_ref.at[b, head, queries], row_smem.at[PULL, slot], do_ready.at[slot])

            see_last(q_free, num_steps, num_stages)
            see_last(do_free, num_steps, num_stages)

        def ring(step):
            return jax.lax.rem(step, num_stages)

        def write(gradient, smem, ref):
            # The other warpgroup reads keys and values no more.
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)
            smem[...] = gradient.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, ref.at[b, keys, kv_head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def add_product(acc, a, b):
            multiply(acc, a, b, None if spare is None else spare.at[warpgroup])

        @pl.when(warpgroup == _DV)
        def _weigh_and_make_dv():
            plgpu.set_max_registers(tuning.compute_registers, action="increase")
            resident = resident_tokens(token_refs, "query", (b, keys))
            plgpu.barrier_wait(k_ready)

            def weigh(logits, step, rank, tile):
                slot, buffer = ring(step), jax.lax.rem(step, _WEIGHT_BUFFERS)
                lse = load_vector(row_smem.at[LSE, slot], rows=False)
                its_tokens = tile_tokens(token_refs, token_smem, "query", resident=resident, slot=slot)
                allowed = functools.partial(
                    allowed_pairs, call, its_tokens, tile * block_q, j * ROWS,
                    kv_padded=call.kv_len % ROWS != 0, transposed=True, interpreted=interpret is not None,
                )  # fmt: skip
                weights, slope = weigh_pairs(logits, lse, call, rank < row.num_partial, allowed, rows=False)
                plgpu.barrier_arrive(q_free.at[slot])
                pl.when(step >= _WEIGHT_BUFFERS)(lambda: plgpu.barrier_wait(p_free.at[buffer]))
                p_smem.at[buffer][...] = weights if slope is None else weights * slope
                plgpu.barrier_arrive(p_ready.at[buffer])
                return weights.astype(dtype)

            def accumulate(dv_acc):
                def first(logits_acc):
                    _, tile, rank = where(0)
                    plgpu.wgmma(logits_acc, k_smem, q_smem.at[0].transpose((1, 0)))
                    return weigh(plgpu.wgmma_accumulator_load(logits_acc, wait_n=0), 0, rank, tile)

                def visit(step, weights):
                    slot, last = ring(step), ring(step - 1)
                    _, tile, rank = where(step)
                    plgpu.barrier_wait(q_ready.at[slot])

                    def products(logits_acc):
                        plgpu.wgmma(logits_acc, k_smem, q_smem.at[slot].transpose((1, 0)))
                        plgpu.barrier_wait(do_ready.at[last])
                        add_product(dv_acc, weights, do_smem.at[last])
                        logits = plgpu.wgmma_accumulator_load(logits_acc, wait_n=1)
                        new_weights = weigh(logits, step, rank, tile)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(do_free.at[last])
                        return new_weights

                    return pl.run_scoped(products, accumulator(block_q))

                @pl.when(num_steps > 0)
                def _():
                    plgpu.barrier_wait(q_ready.at[0])
                    weights = pl.run_scoped(first, accumulator(block_q))
                    weights = jax.lax.fori_loop(1, num_steps, visit, weights)
                    last = ring(num_steps - 1)
                    plgpu.barrier_wait(do_ready.at[last])
                    add_product(dv_acc, weights, do_smem.at[last])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(do_free.at[last])

                    @pl.loop(jnp.maximum(num_steps - _WEIGHT_BUFFERS, 0), num_steps)
                    def _(step):
                        plgpu.barrier_wait(p_free.at[jax.lax.rem(step, _WEIGHT_BUFFERS)])

                write(plgpu.wgmma_accumulator_load(dv_acc, wait_n=0), v_smem, dv_ref)

            pl.run_scoped(accumulate, accumulator(value_dim))

        @pl.when(warpgroup == _DK)
        def _differentiate_and_make_dk():
            plgpu.set_max_registers(tuning.compute_registers, action="increase")
            plgpu.barrier_wait(v_ready)

            def differentiate(dp, step):
                slot, buffer = ring(step), jax.lax.rem(step, _WEIGHT_BUFFERS)
                pull = load_vector(row_smem.at[PULL, slot], rows=False)
                plgpu.barrier_arrive(do_free.at[slot])
                dp = dp - spread(pull, dp.shape, rows=False)
                plgpu.barrier_wait(p_ready.at[buffer])
                d_logits = dp * load_matrix(p_smem.at[buffer])
                plgpu.barrier_arrive(p_free.at[buffer])
                return d_logits.astype(dtype)

            def accumulate(dk_acc):
                def first(dp_acc):
                    plgpu.wgmma(dp_acc, v_smem, do_smem.at[0].transpose((1, 0)))
                    return differentiate(plgpu.wgmma_accumulator_load(dp_acc, wait_n=0), 0)

                def visit(step, d_logits):
                    slot, last = ring(step), ring(step - 1)
                    plgpu.barrier_wait(do_ready.at[slot])

                    def products(dp_acc):
                        plgpu.wgmma(dp_acc, v_smem, do_smem.at[slot].transpose((1, 0)))
                        plgpu.barrier_wait(q_ready.at[last])
                        add_product(dk_acc, d_logits, q_smem.at[last])
                        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                        new_d_logits = differentiate(dp, step)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(q_free.at[last])
                        return new_d_logits

                    return pl.run_scoped(products, accumulator(block_q))

                @pl.when(num_steps > 0)
                def _():
                    plgpu.barrier_wait(do_ready.at[0])
                    d_logits = pl.run_scoped(first, accumulator(block_q))
                    d_logits = jax.lax.fori_loop(1, num_steps, visit, d_logits)
                    last = ring(num_steps - 1)
                    plgpu.barrier_wait(q_ready.at[last])
                    add_product(dk_acc, d_logits, q_smem.at[last])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(q_free.at[last])

                write(plgpu.wgmma_accumulator_load(dk_acc, wait_n=0) * call.scale, k_smem, dk_ref)

            pl.run_scoped(accumulate, accumulator(head_dim))

    scratch = {
        "k_smem": matrix(ROWS, head_dim, dtype=dtype),
        "v_smem": matrix(ROWS, value_dim, dtype=dtype),
        "q_smem": matrix(num_stages, block_q, head_dim, dtype=dtype),
        "do_smem": matrix(num_stages, block_q, value_dim, dtype=dtype),
        "row_smem": vector(2, num_stages, block_q),
        "p_smem": matrix(_WEIGHT_BUFFERS, ROWS, block_q, dtype=jnp.float32),
        "k_ready": plgpu.Barrier(),
        "v_ready": plgpu.Barrier(),
        "q_ready": plgpu.Barrier(num_arrivals=2 + len(tokens.given("query")), num_barriers=num_stages),
        "do_ready": plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
        "q_free": plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
        "do_free": plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
        "p_ready": plgpu.Barrier(num_barriers=_WEIGHT_BUFFERS),
        "p_free": plgpu.Barrier(num_barriers=_WEIGHT_BUFFERS),
        "done": plgpu.Barrier(num_arrivals=2),
        **token_memory(tokens, "query", num_stages, block_q),
    }
    if interpret is not None:
        scratch["spare"] = matrix(2, ROWS, block_q, dtype=dtype)
    run = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(operands.key.shape, dtype),
            jax.ShapeDtypeStruct(operands.value.shape, dtype),
        ),
        scratch_types=scratch,
        grid=(schedule.num_programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return (*run(*operands, rows.bounds, *given.values()), None)
