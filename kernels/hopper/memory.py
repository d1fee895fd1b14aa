"""Memory of the kernels: operands in global memory, and arrays, barriers and rings of stages in shared memory."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

_ALIGNMENT, _BARRIER_BYTES = 1024, 8


def zeroed_ref(shape: tuple[int, ...], dtype, call_array: Array) -> Any:
    """A reference to zeros in global memory, which a kernel adds to.

    The zeros are tied to an array of the call. JAX would otherwise take a reference to constants out of a scan, through
    `jax.shard_map`, whose results can't be references (seen in JAX 0.11.2).
    """
    zeros, _ = jax.lax.optimization_barrier((jnp.zeros(shape, dtype), call_array[:1, :1, :1, :1]))
    return jax.new_ref(zeros)


def num_bytes(scratch: Any) -> int:
    """Shared memory that Pallas allocates for a tree of arrays and barriers. Arrays begin at whole kilobytes."""
    size = 0
    for x in jax.tree.leaves(scratch):
        if isinstance(x, plgpu.Barrier):
            size += _BARRIER_BYTES * math.prod(jax.tree.leaves(x.num_barriers))
        else:
            size += pl.cdiv(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize, _ALIGNMENT) * _ALIGNMENT
    return size


def matrix(*shape: int, dtype, column_multiple: int | None = None):
    """A stack of matrices `[..., rows, columns]`, tiled and swizzled for the tensor cores.

    A product reads whole tiles. It may start at any multiple of `column_multiple` columns; None: at the first column.
    """
    itemsize, columns = jnp.dtype(dtype).itemsize, math.gcd(*filter(None, (shape[-1], column_multiple)))
    swizzle = next(size for size in (128, 64, 32) if columns * itemsize % size == 0)
    transforms = (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


class Pipeline(NamedTuple):
    """The barriers of a ring of stages, between a producer that fills stages and the consumers that read them.

    Source: CUTLASS's asynchronous pipelines.
    """

    full: Any  # a stage's copies have arrived
    empty: Any = None  # every consumer has read a stage; None for stages that are filled once

    @staticmethod
    def memory(
        num_stages: int = 1, *, num_consumers: int, num_copies: int = 1, cluster_axis: str | None = None
    ) -> Pipeline:
        """The barriers that a kernel allocates, for stages that `num_copies` copies fill.

        With `cluster_axis` the copies may go to all programs of a cluster: a stage is empty when the consumers of all
        of them have read it.
        """
        empty = (
            functools.partial(plgpu.ClusterBarrier, collective_axes=(cluster_axis,)) if cluster_axis else plgpu.Barrier
        )
        return Pipeline(
            plgpu.Barrier(num_arrivals=num_copies, num_barriers=num_stages),
            empty(num_arrivals=num_consumers, num_barriers=num_stages),
        )

    @property
    def num_stages(self) -> int:
        """Stages of the ring."""
        return self.full.shape[0]

    def slot(self, step):
        """The stage of a step."""
        # The compiler doesn't know that steps aren't negative, and so a remainder takes more instructions.
        is_power_of_two = self.num_stages & (self.num_stages - 1) == 0
        return step & (self.num_stages - 1) if is_power_of_two else jax.lax.rem(step, self.num_stages)

    def producer_acquire(self, step, slot) -> None:
        """Waits until the consumers have read what the stage held before this step."""
        pl.when(step >= self.num_stages)(lambda: plgpu.barrier_wait(self.empty.at[slot]))

    def producer_tail(self, num_steps, *in_step: Pipeline) -> None:
        """Waits until the consumers have read the last stages of this ring and of those `in_step` with it.

        A waiting thread must see each completion of a barrier.
        """

        @pl.loop(jnp.maximum(num_steps - self.num_stages, 0), num_steps)
        def _(step):
            for pipeline in (self, *in_step):
                plgpu.barrier_wait(pipeline.empty.at[pipeline.slot(step)])

    def copy(self, source, memory, slot, cluster_axis: str | None = None) -> None:
        """Starts to copy from global memory to a stage, or to the stages of a cluster, whose programs all call this."""
        plgpu.copy_gmem_to_smem(source, memory.at[slot], self.full.at[slot], collective_axes=cluster_axis)

    def consumer_wait(self, slot) -> None:
        """Waits for a stage's copies."""
        plgpu.barrier_wait(self.full.at[slot])

    def consumer_release(self, slot) -> None:
        """Says that this consumer has read a stage."""
        plgpu.barrier_arrive(self.empty.at[slot])
