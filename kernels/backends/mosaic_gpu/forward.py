"""The forward kernel: a block of query rows stays, key/value tiles stream past it.

Each block has `num_warpgroups` warpgroups that compute, 64 query rows each, and one that loads key/value tiles ahead of
them. Two things overlap with the tensor cores' work: a warpgroup issues the next tile's QKᵀ before this tile's PV, so
that its softmax runs under a matmul; and warpgroups take turns in issuing, so that one's softmax runs under the other's
matmuls.

The running maximum is kept in units of log₂, of which exp2 makes the weights with one multiply-add.

Sources: FlashAttention-3 (arXiv:2407.08608); online softmax (arXiv:1805.02867).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.memory import ROWS, accumulator, matrix, multiply, vector
from kernels.backends.mosaic_gpu.pairs import (
    Tokens,
    allowed_pairs,
    copy_tokens,
    keep_allowed,
    tile_tokens,
    token_memory,
)
from kernels.backends.mosaic_gpu.walk import read_row
from kernels.backends.tile_walk import Rows
from kernels.call import AttentionCall
from kernels.tuning import MosaicForwardTuning

_LOG2_E = math.log2(math.e)
# Less than any logit, but finite: exp2(−inf − it) = 0 where a row has seen no allowed pair.
_INITIAL_MAX = -1e30


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
      rows: the key/value tiles of each block of query rows.
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
    num_rows = pl.cdiv(q_len, block_q)
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
        o_smem=None,
        spare=None,
        token_smem=None,
    ):
        optional = dict(zip(given, refs, strict=False))
        output_ref, lse_ref = refs[len(given) :]
        token_refs = Tokens(*(optional.get(name) for name in Tokens._fields))

        o_smem = q_smem if o_smem is None else o_smem
        b, head = jax.lax.axis_index("batch"), jax.lax.axis_index("head")
        # Under a causal mask the last rows have most to do: start them first.
        i = num_rows - 1 - jax.lax.axis_index("row")
        warpgroup = jax.lax.axis_index("warpgroup")
        row = read_row(bounds_ref, optional.get("tiles"), b, i)

        @pl.when(warpgroup == num_warpgroups)
        def _load():
            plgpu.set_max_registers(tuning.load_registers, action="decrease")
            kv_head = head // call.group_size

            @pl.loop(0, row.num_tiles)
            def _(step):
                slot = jax.lax.rem(step, num_stages)
                tile = pl.ds(row.tile(step) * block_kv, block_kv)
                for ref, smem, ready, free in (
                    (key_ref, k_smem, k_ready, k_free),
                    (value_ref, v_smem, v_ready, v_free),
                ):
                    pl.when(step >= num_stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
                    plgpu.copy_gmem_to_smem(ref.at[b, tile, kv_head], smem.at[slot], ready.at[slot])
                copy_tokens(token_refs, token_smem, "key_value", (b, tile), slot, k_ready.at[slot])

            # Whoever waits at a barrier must see each of its completions, the last ones, too.
            @pl.loop(jnp.maximum(row.num_tiles - num_stages, 0), row.num_tiles)
            def _(step):
                for free in (k_free, v_free):
                    plgpu.barrier_wait(free.at[jax.lax.rem(step, num_stages)])

        @pl.when(warpgroup < num_warpgroups)
        def _compute():
            plgpu.set_max_registers(tuning.compute_registers, action="increase")
            q_first = i * block_q + warpgroup * ROWS
            q_rows = pl.ds(q_first, ROWS)
            q = q_smem.at[warpgroup]
            plgpu.copy_gmem_to_smem(query_ref.at[b, q_rows, head], q, q_ready.at[warpgroup])

            def my_turn():
                if tuning.take_turns:
                    plgpu.barrier_wait(turn.at[warpgroup])

            def next_turn():
                if tuning.take_turns:
                    plgpu.barrier_arrive(turn.at[jax.lax.rem(warpgroup + 1, num_warpgroups)])

            if tuning.take_turns:
                pl.when(warpgroup == num_warpgroups - 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

            def softmax(logits, step, peak, total, is_partial):
                """Weights of a tile, and the running maximum and sum with it; by what all before it shrinks."""
                if soft_cap is not None:
                    logits = jnp.tanh(logits * (call.scale / soft_cap))
                allowed = functools.partial(
                    allowed_pairs,
                    call,
                    tile_tokens(
                        token_refs,
                        token_smem,
                        "key_value",
                        stay=(b, q_rows),
                        past=(b, pl.ds(row.tile(step) * block_kv, block_kv)),
                        slot=jax.lax.rem(step, num_stages),
                    ),
                    q_first,
                    row.tile(step) * block_kv,
                    kv_padded=call.kv_len % block_kv != 0,
                    transposed=False,
                )
                logits = keep_allowed(logits, is_partial, allowed)
                new_peak = jnp.maximum(peak, logits.max(axis=1) * to_log2)
                weights = jnp.exp2(logits * to_log2 - jax.lax.broadcast_in_dim(new_peak, logits.shape, [0]))
                shrink = jnp.exp2(peak - new_peak)
                return weights, new_peak, total * shrink + weights.sum(axis=1), shrink

            def first_tile(logits_acc):
                plgpu.barrier_wait(k_ready.at[0])
                my_turn()
                plgpu.wgmma(logits_acc, q, k_smem.at[0].transpose((1, 0)))
                next_turn()
                logits = plgpu.wgmma_accumulator_load(logits_acc, wait_n=0)
                peak = plgpu.layout_cast(jnp.full((ROWS,), _INITIAL_MAX, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
                total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
                weights, peak, total, _ = softmax(logits, 0, peak, total, row.num_partial > 0)
                plgpu.barrier_arrive(k_free.at[0])
                output = None if interpret is None else jnp.zeros((ROWS, value_dim), jnp.float32)
                return weights.astype(query.dtype), peak, total, output

            # Pallas's interpreter has no store to an accumulator: there the output is a value that the loop carries.
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

                def visit(step, carry, *, is_partial: bool):
                    weights, peak, total, output = carry
                    slot, last_slot = jax.lax.rem(step, num_stages), jax.lax.rem(step - 1, num_stages)

                    def tile(logits_acc):
                        plgpu.barrier_wait(k_ready.at[slot])
                        my_turn()
                        plgpu.wgmma(logits_acc, q, k_smem.at[slot].transpose((1, 0)))
                        plgpu.barrier_wait(v_ready.at[last_slot])
                        product = add_product(acc, weights, v_smem.at[last_slot])
                        next_turn()
                        logits = plgpu.wgmma_accumulator_load(logits_acc, wait_n=1)
                        if not has_tokens:
                            plgpu.barrier_arrive(k_free.at[slot])
                        new_weights, new_peak, new_total, shrink = softmax(logits, step, peak, total, is_partial)
                        if has_tokens:
                            plgpu.barrier_arrive(k_free.at[slot])
                        new_output = total_output(acc, product, output)
                        plgpu.barrier_arrive(v_free.at[last_slot])
                        new_output = new_output * jax.lax.broadcast_in_dim(shrink, new_output.shape, [0])
                        if interpret is None:
                            acc[...], new_output = new_output, None
                        return new_weights.astype(query.dtype), new_peak, new_total, new_output

                    return pl.run_scoped(tile, logits_type)

                carry = pl.run_scoped(first_tile, logits_type)
                # A loop for each kind of tile: a branch within one loop costs up to 6 % of the speed here.
                num_partial = jnp.maximum(row.num_partial, 1)
                carry = jax.lax.fori_loop(1, num_partial, functools.partial(visit, is_partial=True), carry)
                carry = jax.lax.fori_loop(num_partial, row.num_tiles, functools.partial(visit, is_partial=False), carry)
                weights, peak, total, output = carry
                slot = jax.lax.rem(row.num_tiles - 1, num_stages)
                plgpu.barrier_wait(v_ready.at[slot])
                product = add_product(acc, weights, v_smem.at[slot])
                result = total_output(acc, product, output)
                plgpu.barrier_arrive(v_free.at[slot])
                write(result, peak, total)

            def write(output, peak, total):
                attends = total > 0
                shrink = jnp.ones_like(total)
                if sinks is not None:
                    sink = optional["sinks"][head] * _LOG2_E
                    new_peak = jnp.maximum(peak, sink)
                    shrink = jnp.exp2(peak - new_peak)
                    peak, total = new_peak, total * shrink + jnp.exp2(sink - new_peak)
                total = jnp.where(attends, total, 1.0)
                lse = jnp.where(attends, peak * (1 / _LOG2_E) + jnp.log(total), -jnp.inf)
                output = output * jax.lax.broadcast_in_dim(shrink / total, output.shape, [0])
                o_smem.at[warpgroup][...] = output.astype(query.dtype)
                lse_smem.at[warpgroup][...] = lse
                send()

            def send():
                plgpu.commit_smem()
                # Nothing keeps a copy from writing past the end of a dimension that isn't the array's last.
                exists = None if q_len % block_q == 0 else q_first < q_len
                plgpu.copy_smem_to_gmem(o_smem.at[warpgroup], output_ref.at[b, q_rows, head], exists)
                plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_ref.at[b, head, q_rows], exists)
                plgpu.wait_smem_to_gmem(0)

            plgpu.barrier_wait(q_ready.at[warpgroup])
            acc_type = accumulator(value_dim)
            pl.when(row.num_tiles > 0)(lambda: pl.run_scoped(attend, acc_type))

            @pl.when(row.num_tiles == 0)
            def _():
                o_smem.at[warpgroup][...] = plgpu.layout_cast(
                    jnp.zeros((ROWS, value_dim), query.dtype), plgpu.Layout.WGMMA
                )
                lse_smem.at[warpgroup][...] = plgpu.layout_cast(
                    jnp.full((ROWS,), -jnp.inf, jnp.float32), plgpu.Layout.WGMMA.reduce(1)
                )
                send()

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
            # The query is read no more when the output is written.
            **token_memory(tokens, "key_value", num_stages, block_kv),
            **({} if interpret is None else {"spare": matrix(num_warpgroups, ROWS, block_kv, dtype=dtype)}),
            **({} if value_dim == head_dim else {"o_smem": matrix(num_warpgroups, ROWS, value_dim, dtype=dtype)}),
        ),
        grid=(num_heads, num_rows, batch) if tuning.heads_first else (num_rows, num_heads, batch),
        grid_names=("head", "row", "batch") if tuning.heads_first else ("row", "head", "batch"),
        num_threads=num_warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    return run(query, key, value, rows.bounds, *given.values())
