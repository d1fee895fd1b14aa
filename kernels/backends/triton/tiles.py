"""Shared by the Triton kernels: the launch, layouts of operands in memory, loads of their tiles, and the plan."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jaxtyping import Array, Float

from kernels.backends.triton.key_intervals import make_key_intervals, remaining_bounds
from kernels.backends.triton.tuning import TritonTiles, padded_head_dim
from kernels.call import AttentionCall, AttentionInputs
from kernels.masks.bounds import OF_KEYS, OF_QUERIES
from kernels.masks.intervals import array_namespace
from kernels.plan import make_rows

_LOG2_E = math.log2(math.e)
_POINTEES = {"float16": tl.float16, "float32": tl.float32, "int32": tl.int32, "uint32": tl.uint32}


class Layout(NamedTuple):
    """Where the head `[b, :, n]` of an array lies, in elements: at offset + b·batch + n·head, its rows `token` apart.

    A head's own elements are side by side.
    """

    offset: int
    batch: int
    token: int
    head: int


class Strided(NamedTuple):
    """`[B, L, N, W]` as a part of an array, read where it is."""

    array: jax.Array
    layout: Layout

    @staticmethod
    def of(array: Float[Array, "B L M W"], first_head: int = 0) -> Strided:
        """An array's heads from one of them on."""
        return Strided(array, layout_of(array.shape, first_head))


class Matrices(NamedTuple):
    """The operands of the matmuls: `[B, T, N, H]`, `[B, S, K, H]`, `[B, S, K, V]`."""

    query: Strided
    key: Strided
    value: Strided

    @staticmethod
    def of(inputs: AttentionInputs) -> Matrices:
        """The matrices of a call, each an array of its own."""
        return Matrices(Strided.of(inputs.query), Strided.of(inputs.key), Strided.of(inputs.value))


def layout_of(shape: tuple[int, ...], first_head: int = 0) -> Layout:
    """The layout of an array `[B, L, M, W]`, from one of its heads on."""
    _, length, num_heads, width = shape
    return Layout(first_head * width, length * num_heads * width, num_heads * width, width)


def launch(
    kernel: Any,
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, ...],
    constants: dict[str, Any],
    tiles: TritonTiles,
    compute_capability: float | None,
    zeroed: tuple[int, ...] = (),
    interpret: bool = False,
) -> list[jax.Array]:
    """Runs `kernel(*inputs, *outputs, **constants)` once for each point of a grid.

    Args:
      kernel: a `triton.jit` function of pointers to inputs and outputs, followed by constants.
      tiles: how many warps run a program, and how many stages of loads are in flight.
      compute_capability: of the GPU that it is compiled for; None to interpret it.
      zeroed: the outputs that must be zero to begin with.
    """
    if interpret:
        run = functools.partial(_interpret, kernel, outputs, grid, constants, zeroed)
        return jax.pure_callback(run, list(outputs), *inputs)
    # It needs JAX's GPU plugin.
    import jax_triton

    assert compute_capability is not None
    return jax_triton.triton_call(
        *inputs,
        kernel=kernel,
        out_shape=list(outputs),
        grid=grid,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        compute_capability=round(10 * compute_capability),
        zeroed_outputs=zeroed,
        **constants,
    )


def _interpret(kernel, outputs, grid, constants, zeroed, *inputs) -> list[np.ndarray]:
    operands = [np.ascontiguousarray(x) for x in inputs]
    results = [(np.zeros if i in zeroed else np.empty)(out.shape, out.dtype) for i, out in enumerate(outputs)]
    # Like a GPU's, an exponential of −inf or of a huge number isn't worth a warning.
    with np.errstate(over="ignore", invalid="ignore"):
        kernel[grid](*map(_pointer, operands + results), **constants)
    return results


def _pointer(array: np.ndarray) -> tl.tensor:
    """An array as the pointer that the interpreter expects; it makes one from a PyTorch tensor."""
    handle: Callable = triton.runtime.interpreter.TensorHandle
    pointer = tl.pointer_type(_POINTEES[array.dtype.name])
    return tl.tensor(handle(np.array([array.ctypes.data], np.uint64), pointer), pointer)


def launch_pass(
    kernel: Any,
    matrices: dict[str, Strided],
    vectors: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    constants: dict[str, Any],
    inputs: AttentionInputs,
    call: AttentionCall,
    tiles: TritonTiles,
    *,
    interpret: bool,
    transposed: bool = False,
    zeroed: tuple[int, ...] = (),
) -> list[jax.Array]:
    """Runs a kernel: one program for each head's query tiles, or if transposed for each head's key/value tiles.

    After matrices and vectors the kernel reads the bounds of each program's tiles `[W, R, 4]`, the queries' intervals
    of keys `[W, 2, T]`, key positions, and both sides' segment ids: one zero in place of each that isn't given. What a
    call's bounds add follows in the same arrays, so that calls without bounds keep their kernels: columns after rows,
    the queries' bounds after their intervals, and the keys' bounds after their positions. The kernel's further
    constants are strides between elements of the batch (0: shared), shapes, tiles, and how dot products become logits:
    these are capped after `to_cap`, if there is a cap, and `to_log2` converts them to units of log₂.
    """
    rows = make_rows(inputs, call, tiles.block_q, tiles.block_kv, transposed=transposed, only_intervals=True)
    bounds, num_rows = rows.bounds, rows.num_rows
    if rows.columns is not None:
        bounds = jnp.concatenate([jnp.broadcast_to(bounds, (call.batch, num_rows, 4)), rows.columns], axis=1)
    first, last, key_tokens = make_key_intervals(inputs, call)
    remaining = remaining_bounds(call)
    of_queries, of_keys = (
        [getattr(inputs.bounds, name) for name in names if name in remaining] for names in (OF_QUERIES, OF_KEYS)
    )
    xp = array_namespace(first, last, *of_queries)
    intervals = jnp.asarray(xp.stack(xp.broadcast_arrays(first, last, *of_queries), axis=1))
    if of_keys:
        key_tokens = jnp.stack([*([] if key_tokens is None else [key_tokens]), *of_keys], axis=1)
    plan = (bounds, intervals, key_tokens, inputs.query_segment_ids, inputs.key_value_segment_ids)
    absent = jnp.zeros(1, jnp.int32)
    cap = call.logits_soft_cap
    return launch(
        kernel,
        (*(x.array for x in matrices.values()), *vectors, *(absent if x is None else x for x in plan)),
        outputs,
        grid=(num_rows, call.num_kv_heads if transposed else call.num_heads, call.batch),
        constants={
            **{f"{name}_at": operand.layout for name, operand in matrices.items()},
            **constants,
            "bounds_stride": 4 * bounds.shape[1] if len(bounds) > 1 else 0,
            "interval_stride": intervals.shape[1] * call.q_len if len(intervals) > 1 else 0,
            "has_positions": call.has_positions,
            "has_ids": call.has_segment_ids,
            "has_columns": rows.columns is not None,
            **{f"has_{name}": name in remaining for name in OF_QUERIES + OF_KEYS},
            "to_cap": None if cap is None else call.scale / cap,
            "to_log2": _LOG2_E * (call.scale if cap is None else cap),
            "group_size": call.group_size,
            "q_len": call.q_len,
            "kv_len": call.kv_len,
            "head_dim": call.head_dim,
            "value_dim": call.value_dim,
            "block_q": tiles.block_q,
            "block_kv": tiles.block_kv,
            "block_h": padded_head_dim(call.head_dim),
            "block_v": padded_head_dim(call.value_dim),
        },
        tiles=tiles,
        compute_capability=call.target.compute_capability,
        zeroed=zeroed,
        interpret=interpret,
    )


@triton.jit
def head_start(array, layout: tl.constexpr, batch, head):
    """Pointer to the first element of a head."""
    return array + layout[0] + tl.cast(batch, tl.int64) * layout[1] + tl.cast(head, tl.int64) * layout[3]


@triton.jit
def load_rows(
    start, first, length: tl.constexpr, stride: tl.constexpr, width: tl.constexpr,
    num_rows: tl.constexpr, num_cols: tl.constexpr, inside: tl.constexpr,
):  # fmt: skip
    """Rows `first` … of a head, `[num_rows, num_cols]`: 0 past its width; past its last row that one again, unless
    all are inside. Such rows get no weight, and a row of numbers takes fewer registers than a tile of predicates.
    """
    row, col = tl.arange(0, num_rows)[:, None], tl.arange(0, num_cols)[None, :]
    if not inside:
        row = tl.minimum(row, length - 1 - first)
    pointers = start + tl.cast(first, tl.int64) * stride + (row * stride + col)
    if width < num_cols:
        return tl.load(pointers, mask=col < width, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_rows(
    start, first, values, length: tl.constexpr, stride: tl.constexpr, width: tl.constexpr,
    num_rows: tl.constexpr, num_cols: tl.constexpr,
):  # fmt: skip
    """The reverse of `load_rows`."""
    row, col = tl.arange(0, num_rows)[:, None], tl.arange(0, num_cols)[None, :]
    pointers = start + tl.cast(first, tl.int64) * stride + (row * stride + col)
    tl.store(pointers, values.to(start.dtype.element_ty), mask=(first + row < length) & (col < width))


@triton.jit
def load_tokens(start, first, length: tl.constexpr, size: tl.constexpr, other):
    """Elements `first` … of a vector, `other` past its length."""
    index = first + tl.arange(0, size)
    return tl.load(start + index, mask=index < length, other=other)


@triton.jit
def load_intervals(start, first, q_len: tl.constexpr, block_q: tl.constexpr):
    """The intervals of queries `first` …, as their first and their last keys; empty past the last query."""
    return load_tokens(start, first, q_len, block_q, 0), load_tokens(start + q_len, first, q_len, block_q, -1)


@triton.jit
def load_key_positions(start, first, kv_len: tl.constexpr, size: tl.constexpr, has_positions: tl.constexpr):
    """Positions of the keys from `first` on; no interval holds those past the last."""
    if has_positions:
        return load_tokens(start, first, kv_len, size, -2147483648)
    else:
        return first + tl.arange(0, size)


class QueryTokens(NamedTuple):
    """The numbers that say which keys a block's queries may attend to; None for those that the call doesn't have.

    Kernels make it where they need it: Triton 3.6 refuses functions that return None in a tuple.
    """

    first: tl.tensor
    last: tl.tensor
    ids: tl.tensor
    k_start: tl.tensor
    k_end: tl.tensor
    index: tl.tensor


@triton.jit
def may_attend(
    queries, key_tokens, key_ids, batch, at, kv_len: tl.constexpr, block_kv: tl.constexpr,
    has_positions: tl.constexpr, has_q_start: tl.constexpr, has_q_end: tl.constexpr,
):  # fmt: skip
    """The pairs of a block's queries and the keys from `at` on that mask, documents and bounds allow."""
    key_tokens += batch * (kv_len * (has_positions + has_q_start + has_q_end))
    position = load_key_positions(key_tokens, at, kv_len, block_kv, has_positions)[None, :]
    allowed = (queries.first[:, None] <= position) & (position <= queries.last[:, None])
    if queries.ids is not None:
        allowed &= queries.ids == load_tokens(key_ids + batch * kv_len, at, kv_len, block_kv, 0)[None, :]
    index = (at + tl.arange(0, block_kv))[None, :]
    if queries.k_start is not None:
        allowed &= queries.k_start[:, None] <= index
    if queries.k_end is not None:
        allowed &= index < queries.k_end[:, None]
    bounds = key_tokens + has_positions * kv_len
    if has_q_start:
        allowed &= load_tokens(bounds, at, kv_len, block_kv, 0)[None, :] <= queries.index[:, None]
    if has_q_end:
        q_end = load_tokens(bounds + has_q_start * kv_len, at, kv_len, block_kv, 0)[None, :]
        allowed &= queries.index[:, None] < q_end
    return allowed


@triton.jit
def read_row(bounds, row):
    """(Number of PARTIAL tiles, of those before the FULL ones, start, full_start, full_stop) of a query tile."""
    start, full_start = tl.load(bounds + 4 * row), tl.load(bounds + 4 * row + 1)
    full_stop, stop = tl.load(bounds + 4 * row + 2), tl.load(bounds + 4 * row + 3)
    return full_start - start + stop - full_stop, full_start - start, start, full_start, full_stop


@triton.jit
def next_run(columns, row, tile, full_start, full_stop, stop):
    """The first run of PARTIAL or of FULL tiles of a row's `tile:stop`, in the form of `read_row`.

    The last number is the tile to go on from. One call reads the columns of 128 tiles: it cuts a longer run, and finds
    none where all are EMPTY. The loops over a run's tiles have no branch, so that their loads stay in flight.
    """
    column = tile + tl.arange(0, 128)
    at, is_met = columns + 4 * column, column < stop
    first, first_full = tl.load(at, mask=is_met, other=0), tl.load(at + 1, mask=is_met, other=0)
    stop_full, stop_met = tl.load(at + 2, mask=is_met, other=0), tl.load(at + 3, mask=is_met, other=0)
    is_met &= (first <= row) & (row < stop_met)
    is_full = is_met & (first_full <= row) & (row < stop_full) & (full_start <= column) & (column < full_stop)
    stop = tl.minimum(stop, tile + 128)
    begin, begin_full = tl.min(tl.where(is_met, column, stop)), tl.min(tl.where(is_full, column, stop))
    goes_on = tl.where(begin == begin_full, is_full, is_met & (is_full == 0))
    stop = tl.min(tl.where((column > begin) & (goes_on == 0), column, stop))
    num_partial = tl.where(begin == begin_full, 0, stop - begin)
    return num_partial, num_partial, begin, begin + num_partial, stop


@triton.jit
def partial_tile(rank, num_before, start, full_stop):
    """The rank-th PARTIAL tile of a row."""
    return rank + tl.where(rank < num_before, start, full_stop - num_before)


@triton.jit
def capped(dots, to_cap: tl.constexpr):
    """Dot products after the soft cap, as a fraction of it; as they are without one."""
    if to_cap is not None:
        # tanh(x), where the exponential of 2x may be infinite.
        return 1 - 2 / (1 + tl.exp2(dots * (2 * 1.4426950408889634 * to_cap)))
    else:
        return dots


@triton.jit
def add_tile(acc, row_max, row_sum, logits, v, to_log2: tl.constexpr):
    """One step of the online softmax, kept in units of log₂."""
    new_max = tl.maximum(row_max, tl.max(logits, 1) * to_log2)
    p = tl.exp2(logits * to_log2 - new_max[:, None])
    alpha = tl.exp2(row_max - new_max)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return acc, new_max, row_sum * alpha + tl.sum(p, 1)
