"""Numbers that programs draw, none of them twice: by them a program takes its next block when it is done with one.

A program's loading warpgroup draws, and shows its numbers to the warpgroups that compute: in shared memory with room
for two, since it is ahead of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, memref
from jaxtyping import Array, Int

_SLOTS = 2


class Tickets(NamedTuple):
    """A program's numbers in shared memory, and the barriers by which its warpgroups pass them on."""

    numbers: Any
    ready: Any
    read: Any

    @staticmethod
    def memory(num_readers: int) -> Tickets:
        """What a kernel allocates for so many warpgroups that read."""
        return Tickets(
            plgpu.SMEM((_SLOTS,), jnp.int32),
            plgpu.Barrier(num_barriers=_SLOTS),
            plgpu.Barrier(num_arrivals=num_readers, num_barriers=_SLOTS),
        )

    def draw(self, counter_ref, turn) -> Int[Array, ""]:
        """The program's turn-th number: how many all programs have drawn before.

        Args:
          counter_ref: int32 `[1]`, in global memory, from 0.
        """
        slot = jax.lax.rem(turn, _SLOTS)
        pl.when(turn >= _SLOTS)(lambda: plgpu.barrier_wait(self.read.at[slot]))
        _draw(counter_ref, self.numbers.at[pl.ds(slot, 1)])
        plgpu.barrier_arrive(self.ready.at[slot])
        # Only one of the threads that wait here has stored it.
        plgpu.barrier_wait(self.ready.at[slot])
        return self.numbers[slot]

    def see(self, turn) -> Int[Array, ""]:
        """The program's turn-th number, as a warpgroup reads it that doesn't draw."""
        slot = jax.lax.rem(turn, _SLOTS)
        plgpu.barrier_wait(self.ready.at[slot])
        number = self.numbers[slot]
        plgpu.barrier_arrive(self.read.at[slot])
        return number


def _draw(counter_ref, number_ref) -> None:
    """Stores what the counter was, int32 `[1]`, and adds one to it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def draw(_, counter, number):
        one, zero = mgpu.c(1, ir.IntegerType.get_signless(32)), mgpu.c(0, ir.IndexType.get())
        # Each thread arrives at the barrier that follows, so that this one's number is there when all have.
        with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
            before = llvm.atomicrmw(
                llvm.AtomicBinOp.add, utils.memref_ptr(counter), one, llvm.AtomicOrdering.monotonic, syncscope="device"
            )
            memref.store(before, number, [zero])

    draw(counter_ref, number_ref)
