"""What runs a kernel: a Hopper GPU or Pallas's interpreter, which do some things differently. And how it is launched.

The interpreter knows no threads within a warpgroup and no atomic operations. Its matmuls take no operand from
registers, and its accumulators can't be stored to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.backends.mosaic_gpu.memory import matrix
from kernels.backends.mosaic_gpu.registers import accumulator, column_indices, join_partial_sums, partial_sums
from kernels.backends.mosaic_gpu.tile_scheduler import BlockClaims, TileScheduler
from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning, MosaicForwardTuning, MosaicGpuTuning
from kernels.target import Target

# Few, so that programs have several blocks each.
_INTERPRETED_MULTIPROCESSORS = 2


class HopperOutput(NamedTuple):
    """An output that grows in an accumulator: a loop over tiles carries nothing of it."""

    accumulator: Any

    def zero(self) -> Any:
        """What a loop carries of the output at its start."""

    def start_product(self, p, v) -> Any:
        """Issues `p @ v`, which adds to the output."""
        plgpu.wgmma(self.accumulator, p, v)

    def add(self, carried: Any, product: Any) -> jax.Array:
        """Waits for a product, and returns the output with it."""
        return plgpu.wgmma_accumulator_load(self.accumulator, wait_n=0)

    def store(self, output: jax.Array) -> Any:
        """Puts an output back, and returns what a loop carries of it."""
        self.accumulator[...] = output


class InterpretedOutput(NamedTuple):
    """The same where accumulators can't be stored to: a loop over tiles carries the output."""

    shape: tuple[int, int]
    memory: Any

    def zero(self) -> jax.Array:
        return jnp.zeros(self.shape, jnp.float32)

    def start_product(self, p, v) -> jax.Array:
        def product(part):
            self.memory[...] = p
            plgpu.wgmma(part, self.memory, v)
            return plgpu.wgmma_accumulator_load(part, wait_n=0)

        return pl.run_scoped(product, accumulator(self.shape[1]))

    def add(self, carried: Any, product: Any) -> jax.Array:
        return carried + product

    def store(self, output: jax.Array) -> jax.Array:
        return output


@dataclass(frozen=True)
class Hopper:
    """A Hopper GPU."""

    interpret: Any = None  # parameters of Pallas's interpreter; None on a GPU

    def num_multiprocessors(self, target: Target) -> int:
        """Persistent programs that run at the same time."""
        assert target.num_multiprocessors is not None, f"{target} is a GPU"
        return target.num_multiprocessors

    def block_claims(self, num_consumers: int) -> BlockClaims | None:
        """Memory of a dynamic tile scheduler, or None where there are no atomic operations."""
        return BlockClaims.memory(num_consumers)

    def operand_memory(self, *shape: int, dtype) -> Any:
        """Shared memory for operands that `multiply` takes from registers, or None where it needs none."""
        return None

    def multiply(self, accumulator, a, b, memory, warpgroup) -> None:
        """Adds `a @ b` to an accumulator, `a` in registers; `memory` is `operand_memory` of each warpgroup's `a`."""
        plgpu.wgmma(accumulator, a, b)

    def output(self, accumulator, memory, warpgroup) -> HopperOutput | InterpretedOutput:
        """An output that products add to and that softmax rescales; `memory` is `operand_memory` of each one's p."""
        return HopperOutput(accumulator)

    partial_sums = staticmethod(partial_sums)
    join_partial_sums = staticmethod(join_partial_sums)
    column_indices = staticmethod(column_indices)


@dataclass(frozen=True)
class Interpreter(Hopper):
    """Pallas's interpreter of the same kernels."""

    def num_multiprocessors(self, target: Target) -> int:
        return _INTERPRETED_MULTIPROCESSORS

    def block_claims(self, num_consumers: int) -> None:
        return None

    def operand_memory(self, *shape: int, dtype) -> Any:
        return matrix(*shape, dtype=dtype)

    def multiply(self, accumulator, a, b, memory, warpgroup) -> None:
        memory.at[warpgroup][...] = a
        plgpu.wgmma(accumulator, memory.at[warpgroup], b)

    def output(self, accumulator, memory, warpgroup) -> InterpretedOutput:
        return InterpretedOutput(accumulator.shape, memory.at[warpgroup])

    @staticmethod
    def partial_sums(p, limit: float) -> tuple[jax.Array, jax.Array]:
        sums = p.sum(axis=1)
        return sums, (sums > limit).any()

    @staticmethod
    def join_partial_sums(sums) -> jax.Array:
        return sums

    @staticmethod
    def column_indices(first, shape: tuple[int, int]) -> jax.Array:
        return first + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)


def machine_of(tuning: MosaicGpuTuning) -> Hopper:
    """What runs the kernels under a tuning."""
    if tuning.interpret:
        return Interpreter(plgpu.InterpretGPUParams())  # type: ignore[attr-defined]  # new in JAX 0.11
    return Hopper()


def launch(
    make_context: Callable[..., Any],
    producer: Callable[[Any], None],
    consumers: Sequence[Callable[[Any], None]],
    operands: tuple[Any, ...],
    outputs: Sequence[jax.ShapeDtypeStruct],
    scratch: tuple[Any, Any],
    scheduler: TileScheduler,
    *,
    tuning: MosaicForwardTuning | MosaicBackwardTuning,
    machine: Hopper,
) -> Any:
    """Runs one role in each warpgroup of each program, and returns the outputs.

    Args:
      make_context: (references to operands and outputs, shared memory, barriers, program) → what the roles are given.
      producer: the last warpgroup's role. It gives most of its registers to the others.
      consumers: one role for all other warpgroups, or one for each.
    """
    num_consumers = tuning.num_warpgroups

    def kernel(*refs):
        *gmem, smem, barriers = refs
        context = make_context(gmem, smem, barriers, jax.lax.axis_index("program"))

        @pl.when(context.warpgroup == num_consumers)
        def produce():
            plgpu.set_max_registers(tuning.load_registers, action="decrease")
            producer(context)

        for i, consumer in enumerate(consumers):

            def consume(consumer=consumer):
                plgpu.set_max_registers(tuning.compute_registers, action="increase")
                consumer(context)

            pl.when(context.warpgroup < num_consumers if len(consumers) == 1 else context.warpgroup == i)(consume)

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
