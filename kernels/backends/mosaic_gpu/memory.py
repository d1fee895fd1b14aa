"""Shared memory, its barriers, and registers, as the tensor cores and the copy engine (TMA) use them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WGMMA_ROWS = 64
"""Rows of a WGMMA tile: a warpgroup's matmul."""
ROWS_OF_A_THREAD, THREADS_OF_A_ROW, COLUMNS_OF_A_THREAD = 2, 4, 2
"""Of an accumulator: a thread's registers hold two neighbouring columns each, alternately of two rows. Four threads
share eight columns of a row."""
_ALIGNMENT, _BARRIER_BYTES = 1024, 8
"""Of shared memory: arrays begin at multiples of the first."""
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
"""Layout of one number for each row of an accumulator."""


def matrix(*shape: int, dtype):
    """A stack of matrices `[..., rows, columns]`, tiled and swizzled for the tensor cores."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = next(size for size in (128, 64, 32) if shape[-1] * itemsize % size == 0)
    transforms = (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def vector(*shape: int):
    """A stack of float32 vectors `[..., rows]`."""
    return plgpu.SMEM(shape, jnp.float32)


def padded_head_dim(head_dim: int) -> int:
    """The head dim that the kernels work at: 32 or a multiple of 64."""
    return 32 if head_dim <= 32 else -(-head_dim // 64) * 64


def num_bytes(scratch: Any) -> int:
    """Shared memory that Pallas allocates for a tree of arrays and barriers."""
    size = 0
    for x in jax.tree.leaves(scratch):
        if isinstance(x, plgpu.Barrier):
            size += _BARRIER_BYTES * math.prod(jax.tree.leaves(x.num_barriers))
        else:
            array_bytes = math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
            size += -(-array_bytes // _ALIGNMENT) * _ALIGNMENT
    return size


def accumulator(num_columns: int) -> plgpu.WGMMAAccumulatorRef:
    """A warpgroup's float32 accumulator `[64, num_columns]`.

    Allocate it where everything is there that its first product reads: the assembler leaves out the zeros only if the
    product follows at once, with no wait in between.
    """
    return plgpu.WGMMAAccumulatorRef((WGMMA_ROWS, num_columns), jnp.float32)


def load_matrix(ref) -> jax.Array:
    """Loads a matrix from shared memory, laid out as an accumulator."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA)  # type: ignore[call-arg]  # as JAX 0.10 has it


def load_vector(ref, *, rows: bool, shared: bool = True) -> jax.Array:
    """Loads a vector from shared or else global memory: one number for each row of a matrix, or for each column."""
    layout = ROW_LAYOUT if rows else plgpu.Layout.WGMMA.reduce(0)
    return plgpu.load(ref, layout=layout, optimized=shared)  # type: ignore[call-arg]  # as JAX 0.10 has it


def spread(vector, shape, *, rows: bool) -> jax.Array:
    """A vector as a matrix: one number for each row, or for each column."""
    return jax.lax.broadcast_in_dim(vector, shape, [0 if rows else 1])


class Pipeline(NamedTuple):
    """Full and empty barriers of a ring of stages: a producer fills the stages, consumers read them (as in CUTLASS)."""

    full: Any  # a stage's copies have arrived
    empty: Any = None  # every consumer has read a stage; None for stages that are filled once

    @staticmethod
    def memory(num_stages: int = 1, *, num_consumers: int, num_copies: int = 1) -> Pipeline:
        """What a kernel allocates, for stages that `num_copies` copies fill."""
        return Pipeline(
            plgpu.Barrier(num_arrivals=num_copies, num_barriers=num_stages),
            plgpu.Barrier(num_arrivals=num_consumers, num_barriers=num_stages),
        )

    @property
    def num_stages(self) -> int:
        """Stages of the ring."""
        return self.full.shape[0]

    def slot(self, step):
        """The stage of a step."""
        return jax.lax.rem(step, self.num_stages)

    def producer_acquire(self, step, slot) -> None:
        """Waits until the consumers have read what the stage held before this step."""
        pl.when(step >= self.num_stages)(lambda: plgpu.barrier_wait(self.empty.at[slot]))

    def copy(self, source, memory, slot) -> None:
        """Starts to copy from global memory to a stage."""
        plgpu.copy_gmem_to_smem(source, memory.at[slot], self.full.at[slot])

    def consumer_wait(self, slot) -> None:
        """Waits for a stage's copies."""
        plgpu.barrier_wait(self.full.at[slot])

    def consumer_release(self, slot) -> None:
        """Says that this consumer has read a stage."""
        plgpu.barrier_arrive(self.empty.at[slot])


def producer_tail(num_steps, *pipelines: Pipeline) -> None:
    """Waits until the consumers have read the last stages: a waiting thread must see each completion of a barrier."""
    num_stages = pipelines[0].num_stages

    @pl.loop(jnp.maximum(num_steps - num_stages, 0), num_steps)
    def _(step):
        for pipeline in pipelines:
            plgpu.barrier_wait(pipeline.empty.at[pipeline.slot(step)])
