"""The backward kernels.

`_key_value_kernel` computes dK and dV of a block of keys and values, in a loop over query tiles. Its tiles are
transposed, with keys as rows, so that p and the logits' gradients are the left operands of dV's and dK's matmuls. The
fused form computes dQ, too, and adds each tile's part to a float32 dQ in memory, in no fixed order. It takes five
matmuls a tile.

`_query_kernel` computes dQ of a block of queries, in a loop over key/value tiles. The split form runs both kernels. It
takes seven matmuls a tile, and gives the same bits in every run.

Source: FlashAttention-2 (arXiv:2307.08691).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from kernels.backends.triton.tiles import (
    Matrices,
    QueryTokens,
    Strided,
    capped,
    head_start,
    launch_pass,
    layout_of,
    load_intervals,
    load_key_positions,
    load_rows,
    load_tokens,
    may_attend,
    next_run,
    partial_tile,
    read_row,
    store_rows,
)
from kernels.backends.triton.tuning import TritonTuning
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients


def run_backward(
    matrices: Matrices, inputs: AttentionInputs, call: AttentionCall, tuning: TritonTuning, cotangent: Cotangent
) -> Gradients:
    """The gradients of query, key and value. See `run_forward`."""
    assert tuning.key_value is not None
    assert tuning.query is not None
    operands = matrices._asdict() | {"d_output": Strided.of(cotangent.d_output)}
    vectors = cotangent.by_head()
    fused = tuning.backward == "fused"
    query_shape = (call.batch, call.q_len, call.num_heads, call.head_dim)
    key_shape = (call.batch, call.kv_len, call.num_kv_heads, call.head_dim)
    value_shape = (*key_shape[:3], call.value_dim)
    constants = {"d_query_at": layout_of(query_shape), "scale": call.scale}
    # The fused form's dQ is float32, without the scale.
    d_key, d_value, d_query = launch_pass(
        _key_value_kernel,
        operands,
        vectors,
        (
            jax.ShapeDtypeStruct(key_shape, call.dtype),
            jax.ShapeDtypeStruct(value_shape, call.dtype),
            jax.ShapeDtypeStruct(query_shape if fused else (1,), jnp.float32),
        ),
        constants | {"d_key_at": layout_of(key_shape), "d_value_at": layout_of(value_shape), "fused": fused},
        inputs,
        call,
        tuning.key_value,
        interpret=tuning.interpret,
        transposed=True,
        zeroed=(2,) if fused else (),
    )
    if fused:
        return (d_query * call.scale).astype(call.dtype), d_key, d_value
    outputs = [jax.ShapeDtypeStruct(query_shape, call.dtype)]
    (d_query,) = launch_pass(
        _query_kernel, operands, vectors, outputs, constants, inputs, call, tuning.query, interpret=tuning.interpret
    )
    return d_query, d_key, d_value


@triton.jit
def _key_value_kernel(
    query, key, value, d_output, lse, delta, bounds, intervals, key_tokens, query_ids, key_ids,
    d_key, d_value, d_query,
    query_at: tl.constexpr, key_at: tl.constexpr, value_at: tl.constexpr, d_output_at: tl.constexpr,
    d_key_at: tl.constexpr, d_value_at: tl.constexpr, d_query_at: tl.constexpr,
    scale: tl.constexpr, fused: tl.constexpr,
    bounds_stride: tl.constexpr, interval_stride: tl.constexpr, has_positions: tl.constexpr, has_ids: tl.constexpr,
    has_columns: tl.constexpr, has_k_start: tl.constexpr, has_k_end: tl.constexpr,
    has_q_start: tl.constexpr, has_q_end: tl.constexpr,
    to_cap: tl.constexpr, to_log2: tl.constexpr, group_size: tl.constexpr,
    q_len: tl.constexpr, kv_len: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    block_q: tl.constexpr, block_kv: tl.constexpr, block_h: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    row, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = row * block_kv
    inside: tl.constexpr = kv_len % block_kv == 0
    k = load_rows(
        head_start(key, key_at, batch, kv_head), begin, kv_len, key_at[2], head_dim, block_kv, block_h, inside
    )
    v = load_rows(
        head_start(value, value_at, batch, kv_head), begin, kv_len, value_at[2], value_dim, block_kv, block_v, inside
    )
    bounds += batch * bounds_stride
    num_partial, num_before, row_start, full_start, full_stop = read_row(bounds, row)
    key_tokens += batch * (kv_len * (has_positions + has_q_start + has_q_end))
    own_bounds = key_tokens + has_positions * kv_len
    own_tokens = _KeyTokens(
        load_key_positions(key_tokens, begin, kv_len, block_kv, has_positions)[:, None],
        load_tokens(key_ids + batch * kv_len, begin, kv_len, block_kv, 0)[:, None] if has_ids else None,
        load_tokens(own_bounds, begin, kv_len, block_kv, 0) if has_q_start else None,
        load_tokens(own_bounds + has_q_start * kv_len, begin, kv_len, block_kv, 0) if has_q_end else None,
        begin + tl.arange(0, block_kv),
    )

    dk = tl.zeros((block_kv, block_h), tl.float32)
    dv = tl.zeros((block_kv, block_v), tl.float32)
    if has_columns:
        tile, stop = row_start, full_stop + num_partial - num_before
        while tile < stop:
            run = next_run(bounds + 4 * tl.num_programs(0), row, tile, full_start, full_stop, stop)
            dk, dv = _add_query_run(
                dk, dv, k, v, query, d_output, d_query, lse, delta, own_tokens, intervals, query_ids, batch, kv_head,
                *run, query_at, d_output_at, d_query_at, fused, interval_stride, has_k_start, has_k_end,
                to_cap, to_log2, group_size, q_len, head_dim, value_dim, block_q, block_h, block_v,
            )  # fmt: skip
            tile = run[4]
    else:
        dk, dv = _add_query_run(
            dk, dv, k, v, query, d_output, d_query, lse, delta, own_tokens, intervals, query_ids, batch, kv_head,
            num_partial, num_before, row_start, full_start, full_stop,
            query_at, d_output_at, d_query_at, fused, interval_stride, has_k_start, has_k_end, to_cap, to_log2,
            group_size, q_len, head_dim, value_dim, block_q, block_h, block_v,
        )  # fmt: skip

    d_keys, d_values = head_start(d_key, d_key_at, batch, kv_head), head_start(d_value, d_value_at, batch, kv_head)
    store_rows(d_keys, begin, dk * scale, kv_len, d_key_at[2], head_dim, block_kv, block_h)
    store_rows(d_values, begin, dv, kv_len, d_value_at[2], value_dim, block_kv, block_v)


class _KeyTokens(NamedTuple):
    """The numbers that say which queries may attend to a block's keys; None for those that the call doesn't have."""

    position: tl.tensor
    ids: tl.tensor
    q_start: tl.tensor
    q_end: tl.tensor
    index: tl.tensor


@triton.jit
def _may_be_attended(
    keys, intervals, query_ids, at, q_len: tl.constexpr, block_q: tl.constexpr, has_k_start: tl.constexpr,
    has_k_end: tl.constexpr,
):  # fmt: skip
    """The pairs of a block's keys and the queries from `at` on that mask, documents and bounds allow."""
    row_first, row_last = load_intervals(intervals, at, q_len, block_q)
    allowed = (row_first[None, :] <= keys.position) & (keys.position <= row_last[None, :])
    if keys.ids is not None:
        allowed &= load_tokens(query_ids, at, q_len, block_q, 0)[None, :] == keys.ids
    bounds = intervals + 2 * q_len
    if has_k_start:
        allowed &= load_tokens(bounds, at, q_len, block_q, 0)[None, :] <= keys.index[:, None]
    if has_k_end:
        k_end = load_tokens(bounds + has_k_start * q_len, at, q_len, block_q, 0)[None, :]
        allowed &= keys.index[:, None] < k_end
    index = (at + tl.arange(0, block_q))[None, :]
    if keys.q_start is not None:
        allowed &= keys.q_start[:, None] <= index
    if keys.q_end is not None:
        allowed &= index < keys.q_end[:, None]
    return allowed


@triton.jit
def _add_query_run(
    dk, dv, k, v, query, d_output, d_query, lse, delta, own_tokens, intervals, query_ids, batch, kv_head,
    num_partial, num_before, start, full_start, full_stop,
    query_at: tl.constexpr, d_output_at: tl.constexpr, d_query_at: tl.constexpr,
    fused: tl.constexpr, interval_stride: tl.constexpr, has_k_start: tl.constexpr,
    has_k_end: tl.constexpr,     to_cap: tl.constexpr, to_log2: tl.constexpr, group_size: tl.constexpr,
    q_len: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    block_q: tl.constexpr, block_h: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Adds a row's PARTIAL tiles of all heads of a group, then its FULL ones."""
    # One loop over the tiles of all heads, not one in another, which would take more registers.
    for step in range(group_size * num_partial):
        member, rank = _head_and_rank(step, num_partial, group_size)
        at = partial_tile(rank, num_before, start, full_stop) * block_q
        allowed = _may_be_attended(
            own_tokens, intervals + batch * interval_stride, query_ids + batch * q_len, at, q_len, block_q, has_k_start,
            has_k_end,
        )  # fmt: skip
        dk, dv = _add_query_tile(
            dk, dv, k, v, query, d_output, d_query, lse, delta, batch, kv_head * group_size + member, at, allowed, True,
            query_at, d_output_at, d_query_at, fused, to_cap, to_log2,
            group_size, q_len, head_dim, value_dim, block_q, block_h, block_v,
        )  # fmt: skip
    num_full = full_stop - full_start
    for step in range(group_size * num_full):
        member, rank = _head_and_rank(step, num_full, group_size)
        at = (full_start + rank) * block_q
        dk, dv = _add_query_tile(
            dk, dv, k, v, query, d_output, d_query, lse, delta, batch, kv_head * group_size + member, at, True, False,
            query_at, d_output_at, d_query_at, fused, to_cap, to_log2,
            group_size, q_len, head_dim, value_dim, block_q, block_h, block_v,
        )  # fmt: skip
    return dk, dv


@triton.jit
def _head_and_rank(step, num_tiles, group_size: tl.constexpr):
    """Which head of a group, and which of its tiles, comes at a step."""
    if group_size == 1:
        return 0, step
    else:
        # A loop without steps, too, works out where its first loads would be.
        num_tiles = tl.maximum(num_tiles, 1)
        return step // num_tiles, step % num_tiles


@triton.jit
def _add_query_tile(
    dk, dv, k, v, query, d_output, d_query, lse, delta, batch, head, at, allowed, masked: tl.constexpr,
    query_at: tl.constexpr, d_output_at: tl.constexpr, d_query_at: tl.constexpr,
    fused: tl.constexpr, to_cap: tl.constexpr, to_log2: tl.constexpr, group_size: tl.constexpr,
    q_len: tl.constexpr, head_dim: tl.constexpr, value_dim: tl.constexpr,
    block_q: tl.constexpr, block_h: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Adds one tile of one head's queries to dK and dV, and if fused to dQ in memory."""
    inside: tl.constexpr = q_len % block_q == 0
    rows = (tl.cast(batch, tl.int64) * (tl.num_programs(1) * group_size) + head) * q_len
    q = load_rows(head_start(query, query_at, batch, head), at, q_len, query_at[2], head_dim, block_q, block_h, inside)
    logits = capped(tl.dot(k, tl.trans(q)), to_cap)
    p = tl.exp2(logits * to_log2 - _load_lse(lse + rows, at, q_len, block_q)[None, :])
    if masked:
        p = tl.where(allowed, p, 0.0)
    d_outputs = head_start(d_output, d_output_at, batch, head)
    do = load_rows(d_outputs, at, q_len, d_output_at[2], value_dim, block_q, block_v, inside)
    dv = tl.dot(p.to(do.dtype), do, dv)
    row_delta = load_tokens(delta + rows, at, q_len, block_q, 0.0)[None, :]
    d_logits = p * (tl.dot(v, tl.trans(do)) - row_delta)
    if to_cap is not None:
        d_logits *= 1 - logits * logits
    d_logits = d_logits.to(q.dtype)
    dk = tl.dot(d_logits, q, dk)
    if fused:
        row, col = tl.arange(0, block_q)[:, None], tl.arange(0, block_h)[None, :]
        start = head_start(d_query, d_query_at, batch, head) + tl.cast(at, tl.int64) * d_query_at[2]
        inside_tile = (at + row < q_len) & (col < head_dim)
        dq = tl.dot(tl.trans(d_logits), k)
        tl.atomic_add(start + (row * d_query_at[2] + col), dq, mask=inside_tile, sem="relaxed")
    return dk, dv


@triton.jit
def _load_lse(start, first, q_len: tl.constexpr, block_q: tl.constexpr):
    """A tile's lse, in units of log₂: huge past the last row, where it leaves no weight. It is −∞ in rows that attend
    to nothing, whose infinite p the mask replaces.
    """
    return load_tokens(start, first, q_len, block_q, 1e30) * 1.4426950408889634


@triton.jit
def _query_kernel(
    query, key, value, d_output, lse, delta, bounds, intervals, key_tokens, query_ids, key_ids,
    d_query,
    query_at: tl.constexpr, key_at: tl.constexpr, value_at: tl.constexpr, d_output_at: tl.constexpr,
    d_query_at: tl.constexpr, scale: tl.constexpr,
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
    inside: tl.constexpr = q_len % block_q == 0
    keys, values = head_start(key, key_at, batch, kv_head), head_start(value, value_at, batch, kv_head)
    queries, d_outputs = head_start(query, query_at, batch, head), head_start(d_output, d_output_at, batch, head)
    q = load_rows(queries, begin, q_len, query_at[2], head_dim, block_q, block_h, inside)
    do = load_rows(d_outputs, begin, q_len, d_output_at[2], value_dim, block_q, block_v, inside)
    rows = (tl.cast(batch, tl.int64) * tl.num_programs(1) + head) * q_len
    row_lse = _load_lse(lse + rows, begin, q_len, block_q)[:, None]
    row_delta = load_tokens(delta + rows, begin, q_len, block_q, 0.0)[:, None]
    row_first, row_last = load_intervals(intervals + batch * interval_stride, begin, q_len, block_q)
    bounds += batch * bounds_stride
    num_partial, num_before, row_start, full_start, full_stop = read_row(bounds, row)
    own_bounds = intervals + batch * interval_stride + 2 * q_len
    row_tokens = QueryTokens(
        row_first,
        row_last,
        load_tokens(query_ids + batch * q_len, begin, q_len, block_q, 0)[:, None] if has_ids else None,
        load_tokens(own_bounds, begin, q_len, block_q, 0) if has_k_start else None,
        load_tokens(own_bounds + has_k_start * q_len, begin, q_len, block_q, 0) if has_k_end else None,
        begin + tl.arange(0, block_q),
    )

    dq = tl.zeros((block_q, block_h), tl.float32)
    if has_columns:
        tile, stop = row_start, full_stop + num_partial - num_before
        while tile < stop:
            run = next_run(bounds + 4 * tl.num_programs(0), row, tile, full_start, full_stop, stop)
            dq = _add_key_run(
                dq, q, do, keys, values, row_lse, row_delta, row_tokens, key_tokens, key_ids, batch, *run,
                key_at, value_at, has_positions, has_q_start, has_q_end, to_cap, to_log2,
                kv_len, head_dim, value_dim, block_kv, block_h, block_v,
            )  # fmt: skip
            tile = run[4]
    else:
        dq = _add_key_run(
            dq, q, do, keys, values, row_lse, row_delta, row_tokens, key_tokens, key_ids, batch,
            num_partial, num_before, row_start, full_start, full_stop,
            key_at, value_at, has_positions, has_q_start, has_q_end, to_cap, to_log2,
            kv_len, head_dim, value_dim, block_kv, block_h, block_v,
        )  # fmt: skip

    d_queries = head_start(d_query, d_query_at, batch, head)
    store_rows(d_queries, begin, dq * scale, q_len, d_query_at[2], head_dim, block_q, block_h)


@triton.jit
def _add_key_run(
    dq, q, do, keys, values, row_lse, row_delta, row_tokens, key_tokens, key_ids, batch,
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
        dq = _add_key_tile(dq, q, do, k, v, row_lse, row_delta, allowed, True, to_cap, to_log2)
    for tile in range(full_start, full_stop):
        k = load_rows(keys, tile * block_kv, kv_len, key_at[2], head_dim, block_kv, block_h, True)
        v = load_rows(values, tile * block_kv, kv_len, value_at[2], value_dim, block_kv, block_v, True)
        dq = _add_key_tile(dq, q, do, k, v, row_lse, row_delta, True, False, to_cap, to_log2)
    return dq


@triton.jit
def _add_key_tile(
    dq, q, do, k, v, row_lse, row_delta, allowed, masked: tl.constexpr, to_cap: tl.constexpr, to_log2: tl.constexpr
):
    """Adds one tile of keys to dQ."""
    logits = capped(tl.dot(q, tl.trans(k)), to_cap)
    p = tl.exp2(logits * to_log2 - row_lse)
    if masked:
        p = tl.where(allowed, p, 0.0)
    d_logits = p * (tl.dot(do, tl.trans(v)) - row_delta)
    if to_cap is not None:
        d_logits *= 1 - logits * logits
    return tl.dot(d_logits.to(k.dtype), k, dq)
