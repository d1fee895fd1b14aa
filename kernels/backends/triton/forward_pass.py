"""The forward kernel: online softmax of one block of queries over the key/value tiles that it visits.

Source: FlashAttention-2 (arXiv:2307.08691).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float

from kernels.backends.triton.tiles import (
    Matrices,
    QueryTokens,
    add_tile,
    capped,
    head_start,
    launch_pass,
    layout_of,
    load_intervals,
    load_rows,
    load_tokens,
    may_attend,
    next_run,
    partial_tile,
    read_row,
    store_rows,
)
from kernels.backends.triton.tuning import TritonTuning
from kernels.call import AttentionCall, AttentionInputs


def run_forward(
    matrices: Matrices, inputs: AttentionInputs, call: AttentionCall, tuning: TritonTuning
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse of a call whose mask all heads share, under a tuning with nothing left open.

    Of the inputs only the sinks and what is known of each token are read.
    """
    assert tuning.forward is not None
    sinks = jnp.zeros(1, jnp.float32) if inputs.sinks is None else inputs.sinks.astype(jnp.float32)
    shape = (call.batch, call.q_len, call.num_heads, call.value_dim)
    lse_shape = (call.batch, call.num_heads, call.q_len)
    output, lse = launch_pass(
        _forward_kernel,
        matrices._asdict(),
        [sinks],
        (jax.ShapeDtypeStruct(shape, call.dtype), jax.ShapeDtypeStruct(lse_shape, jnp.float32)),
        {"output_at": layout_of(shape), "has_sinks": call.has_sinks},
        inputs,
        call,
        tuning.forward,
        interpret=tuning.interpret,
    )
    return output, lse.swapaxes(1, 2)


@triton.jit
def _forward_kernel(
    query, key, value, sinks, bounds, intervals, key_tokens, query_ids, key_ids,
    output, lse,
    query_at: tl.constexpr, key_at: tl.constexpr, value_at: tl.constexpr, output_at: tl.constexpr,
    has_sinks: tl.constexpr,
    bounds_stride: tl.constexpr, interval_stride: tl.constexpr, has_positions: tl.constexpr, has_ids: tl.constexpr,
    has_columns: tl.constexpr, has_k_start: tl.constexpr, has_k_end: tl.constexpr,
    has_q_start: tl.constexpr, has_q_end: tl.constexpr,
    to_cap: tl.constexpr, to_log2: tl.constexpr, group_size: tl.constexpr,
    q_len: tl.constexpr, kv_len: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    block_q: tl.constexpr, block_kv: tl.constexpr, block_h: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    # A causal mask's last rows are its longest, so they start first.
    row, head, batch = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, kv_head = row * block_q, head // group_size
    keys, values = head_start(key, key_at, batch, kv_head), head_start(value, value_at, batch, kv_head)
    queries = head_start(query, query_at, batch, head)
    q = load_rows(queries, begin, q_len, query_at[2], head_dim, block_q, block_h, q_len % block_q == 0)
    bounds += batch * bounds_stride
    num_partial, num_before, row_start, full_start, full_stop = read_row(bounds, row)

    acc = tl.zeros((block_q, block_v), tl.float32)
    row_sum = tl.zeros((block_q,), tl.float32)
    # Less than any logit, but finite, so that exp2(−inf − it) is 0 where a row has seen no allowed pair.
    row_max = tl.full((block_q,), -1e30, tl.float32)

    row_first, row_last = load_intervals(intervals + batch * interval_stride, begin, q_len, block_q)
    own_bounds = intervals + batch * interval_stride + 2 * q_len
    row_tokens = QueryTokens(
        row_first,
        row_last,
        load_tokens(query_ids + batch * q_len, begin, q_len, block_q, 0)[:, None] if has_ids else None,
        load_tokens(own_bounds, begin, q_len, block_q, 0) if has_k_start else None,
        load_tokens(own_bounds + has_k_start * q_len, begin, q_len, block_q, 0) if has_k_end else None,
        begin + tl.arange(0, block_q),
    )
    if has_columns:
        tile, stop = row_start, full_stop + num_partial - num_before
        while tile < stop:
            run = next_run(bounds + 4 * tl.num_programs(0), row, tile, full_start, full_stop, stop)
            acc, row_sum, row_max = _add_run(
                acc, row_sum, row_max, q, keys, values, row_tokens, key_tokens, key_ids, batch, *run,
                key_at, value_at, has_positions, has_q_start, has_q_end, to_cap, to_log2,
                kv_len, head_dim, value_dim, block_kv, block_h, block_v,
            )  # fmt: skip
            tile = run[4]
    else:
        acc, row_sum, row_max = _add_run(
            acc, row_sum, row_max, q, keys, values, row_tokens, key_tokens, key_ids, batch,
            num_partial, num_before, row_start, full_start, full_stop,
            key_at, value_at, has_positions, has_q_start, has_q_end, to_cap, to_log2,
            kv_len, head_dim, value_dim, block_kv, block_h, block_v,
        )  # fmt: skip

    # A NaN isn't 0: only a row without an allowed pair has summed up nothing.
    attends = row_sum != 0
    if has_sinks:
        sink = tl.load(sinks + head) * 1.4426950408889634
        new_max = tl.maximum(row_max, sink)
        alpha = tl.where(attends, tl.exp2(row_max - new_max), 1.0)
        acc, row_sum = acc * alpha[:, None], row_sum * alpha + tl.exp2(sink - new_max)
        row_max = new_max
    row_sum = tl.where(attends, row_sum, 1.0)
    outputs = head_start(output, output_at, batch, head)
    store_rows(outputs, begin, acc / row_sum[:, None], q_len, output_at[2], value_dim, block_q, block_v)
    index = begin + tl.arange(0, block_q)
    row_lse = tl.where(attends, (row_max + tl.log2(row_sum)) * 0.6931471805599453, float("-inf"))
    tl.store(lse + (tl.cast(batch, tl.int64) * tl.num_programs(1) + head) * q_len + index, row_lse, mask=index < q_len)


@triton.jit
def _add_run(
    acc, row_sum, row_max, q, keys, values, row_tokens, key_tokens, key_ids, batch,
    num_partial, num_before, start, full_start, full_stop,
    key_at: tl.constexpr, value_at: tl.constexpr, has_positions: tl.constexpr,
    has_q_start: tl.constexpr, has_q_end: tl.constexpr, to_cap: tl.constexpr, to_log2: tl.constexpr,
    kv_len: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    block_kv: tl.constexpr, block_h: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Adds a row's PARTIAL tiles, then its FULL ones."""
    for rank in range(num_partial):
        at = partial_tile(rank, num_before, start, full_stop) * block_kv
        k = load_rows(keys, at, kv_len, key_at[2], head_dim, block_kv, block_h, kv_len % block_kv == 0)
        v = load_rows(values, at, kv_len, value_at[2], value_dim, block_kv, block_v, kv_len % block_kv == 0)
        allowed = may_attend(
            row_tokens, key_tokens, key_ids, batch, at, kv_len, block_kv, has_positions, has_q_start, has_q_end
        )
        logits = tl.where(allowed, capped(tl.dot(q, tl.trans(k)), to_cap), float("-inf"))
        acc, row_max, row_sum = add_tile(acc, row_max, row_sum, logits, v, to_log2)
    for tile in range(full_start, full_stop):
        k = load_rows(keys, tile * block_kv, kv_len, key_at[2], head_dim, block_kv, block_h, True)
        v = load_rows(values, tile * block_kv, kv_len, value_at[2], value_dim, block_kv, block_v, True)
        acc, row_max, row_sum = add_tile(acc, row_max, row_sum, capped(tl.dot(q, tl.trans(k)), to_cap), v, to_log2)
    return acc, row_sum, row_max
