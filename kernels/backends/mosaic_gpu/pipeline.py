"""The full and empty barriers of a ring of stages in shared memory, as CUTLASS's asynchronous pipelines have them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Pipeline(NamedTuple):
    """Barriers between a producer that fills stages and the consumers that read them."""

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
