"""Rows put together from chunks that several GPUs hold: each reads those that it needs from the others' memory.

The gradient of each chunk is the sum over all GPUs, in float32, rounded once.

Shapes: R GPUs, B batch, n chunks of one GPU, C chunks of a row, l tokens of a chunk, X features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.collectives.chunk_kernels import LINE, TILE_LINES, peer_gather_chunks, peer_sum_chunks
from kernels.tracing.slice_fusion import without_slice_fusion

_TILE = TILE_LINES * LINE


class ChunkTables(NamedTuple):
    """Where chunks are.

    Attributes:
      of_row: what stands in each place of this GPU's rows: n·s + i for the i-th chunk of the GPU that is s ranks after
        this one, where the first comes after the last. Any chunk may stand for one that isn't needed. `[B, C]`, int32.
      of_own: where each of this GPU's chunks stands: its place in this GPU's row, and then, for each other GPU, 1 + its
        place in that one's, or 0 if it isn't needed there; the next GPU first. `[B, n, R]`, int32.
      num_chunks: the number of each row's first places that are put together. The others hold anything. `[1]`, int32.
    """

    of_row: Int[Array, "B C"]
    of_own: Int[Array, "B n R"]
    num_chunks: Int[Array, " 1"]


def unsupported_reason(num_tokens: int, num_features: tuple[int, ...], dtype: jax.typing.DTypeLike) -> str | None:
    """Why the kernels can't read chunks of `num_tokens` tokens, or None if they can.

    Args:
      num_tokens: of a chunk.
      num_features: of all heads, for each array.
      dtype: of the arrays.
    """
    if jnp.dtype(dtype) not in map(jnp.dtype, (jnp.bfloat16, jnp.float16)):
        return f"takes bfloat16 and float16, not {jnp.dtype(dtype)}"
    for size in num_features:
        if num_tokens * size % _TILE:
            return (
                f"takes chunks of a multiple of {_TILE} numbers, not of {num_tokens} tokens × {size} features; "
                "a length that a larger power of two divides has larger chunks"
            )
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def gather_chunks(
    arrays: tuple[Float[Array, "B n l *X"], ...], tables: ChunkTables, axis: str, num_multiprocessors: int | None
) -> tuple[Float[Array, "B C l *X"], ...]:
    """Rows of all GPUs' chunks; inside `jax.shard_map`.

    Args:
      arrays: this GPU's chunks, bfloat16 or float16.
      tables: what is needed.
      axis: the mesh axis of the GPUs.
      num_multiprocessors: of a GPU.
    """
    kernel = functools.partial(peer_gather_chunks, num_ranks=tables.of_own.shape[2])
    return _by_shape(kernel, arrays, (tables.of_row, tables.num_chunks), axis, num_multiprocessors)


def _gather_chunks_backward(
    axis: str, num_multiprocessors: int | None, tables: ChunkTables, gradients: tuple[Array, ...]
):
    return _by_shape(peer_sum_chunks, gradients, (tables.of_own,), axis, num_multiprocessors), None


gather_chunks.defvjp(
    lambda arrays, tables, axis, num_multiprocessors: (
        gather_chunks(arrays, tables, axis, num_multiprocessors),
        tables,
    ),
    _gather_chunks_backward,
)


def _by_shape(
    kernel: Callable, arrays: tuple[Array, ...], tables: tuple[Array, ...], axis: str, num_multiprocessors: int | None
) -> tuple[Array, ...]:
    """Calls a kernel once for all arrays of one shape."""
    results: dict[int, Array] = {}
    for shape in dict.fromkeys(x.shape for x in arrays):
        alike = [i for i, x in enumerate(arrays) if x.shape == shape]
        in_lines = [arrays[i].reshape(*shape[:2], -1, LINE) for i in alike]
        whole = without_slice_fusion(*tables, *in_lines)
        outputs = kernel(whole[len(tables) :], *whole[: len(tables)], axis, num_multiprocessors)
        outputs = without_slice_fusion(*outputs)
        results |= {i: x.reshape(*x.shape[:2], *shape[2:]) for i, x in zip(alike, outputs, strict=True)}
    return tuple(results[i] for i in range(len(arrays)))
