"""Launches a kernel whose warpgroups have roles: one producer, which copies, and consumers, which compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.hopper.machine import Hopper
from kernels.hopper.tile_scheduler import TileScheduler
from kernels.tracing.number_types import types_of_32_bits


class Warpgroups:
    """Registers of a kernel's warpgroups: those that compute, and one more, which copies and needs few."""

    num_warpgroups: int

    def check_counts(self, *counts: str) -> None:
        """Raises ValueError for a number of warpgroups, or another of these fields, that is out of range."""
        if self.num_warpgroups not in (1, 2, 3):
            raise ValueError(f"num_warpgroups={self.num_warpgroups} must be 1, 2 or 3")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def compute_registers(self) -> int:
        """Registers of a computing thread, of the multiprocessor's 65,536."""
        return {1: 240, 2: 240, 3: 160}[self.num_warpgroups]

    @property
    def load_registers(self) -> int:
        """Registers of a copying thread."""
        return {1: 40, 2: 24, 3: 32}[self.num_warpgroups]


class Roles(NamedTuple):
    """The roles of a kernel's warpgroups.

    Attributes:
      make_context: (references to operands and outputs, shared memory, barriers, program) → what the roles are given.
      producer: the last warpgroup's role. It gives most of its registers to the others.
      consumers: one role for all other warpgroups, or one for each.
    """

    make_context: Callable[..., Any]
    producer: Callable[[Any], None]
    consumers: Sequence[Callable[[Any], None]]


@types_of_32_bits()
def launch(
    roles: Roles,
    operands: tuple[Any, ...],
    outputs: Sequence[jax.ShapeDtypeStruct],
    scratch: tuple[Any, Any],
    scheduler: TileScheduler,
    *,
    name: str,
    warpgroups: Warpgroups,
    machine: Hopper,
) -> Any:
    """Runs one role in each warpgroup of each program, and returns the outputs.

    Args:
      name: of the kernel's dumps, before the first operand's shape.
      scratch: arrays and barriers in shared memory, a named tuple of each; the roles get references to them.
    """
    num_consumers = warpgroups.num_warpgroups

    def kernel(*refs):
        *gmem, smem, barriers = refs
        machine.begin_kernel(name, operands[0])
        context = roles.make_context(gmem, smem, barriers, jax.lax.axis_index("program"))

        @pl.when(context.warpgroup == num_consumers)
        def produce():
            plgpu.set_max_registers(warpgroups.load_registers, action="decrease")
            roles.producer(context)

        for i, consumer in enumerate(roles.consumers):

            def consume(consumer=consumer):
                plgpu.set_max_registers(warpgroups.compute_registers, action="increase")
                consumer(context)

            pl.when(context.warpgroup < num_consumers if len(roles.consumers) == 1 else context.warpgroup == i)(consume)

    return plgpu.kernel(
        kernel,
        out_type=list(outputs),
        scratch_types=scratch,
        grid=(scheduler.num_programs,),
        grid_names=("program",),
        num_threads=num_consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=machine.interpret,
    )(*operands)
