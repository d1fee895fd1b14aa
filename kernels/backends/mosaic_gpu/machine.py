"""What runs a kernel: a Hopper GPU or Pallas's interpreter, which do some things differently. And how it is launched.

The interpreter knows no threads within a warpgroup, no atomic operations and no MLIR. Its matmuls take no operand from
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
from jaxlib.mlir import ir

from kernels.backends.mosaic_gpu.memory import matrix
from kernels.backends.mosaic_gpu.one_thread import refuse_other_threads
from kernels.backends.mosaic_gpu.registers import (
    accumulator,
    column_indices,
    join_partial_sums,
    load_matrix,
    partial_sums,
)
from kernels.backends.mosaic_gpu.tile_scheduler import BlockClaims, TileScheduler
from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning, MosaicForwardTuning, MosaicGpuTuning
from kernels.number_types import types_of_32_bits
from kernels.target import Target

# Few, so that programs have several blocks each.
_INTERPRETED_MULTIPROCESSORS = 2
# Rows of the tiles in which matrices are copied (`memory.matrix`).
_COPIED_ROWS = 8


def add_product(accumulator, a, b, memory, warpgroup) -> None:
    """Adds `a @ b` to an accumulator, `a` in registers; `memory` is `operand_memory` of each warpgroup's `a`."""
    if memory is not None:
        memory.at[warpgroup][...] = a
        a = memory.at[warpgroup]
    plgpu.wgmma(accumulator, a, b)


def begin_kernel(name: str, array: jax.Array | jax.ShapeDtypeStruct) -> None:
    """A kernel's first act, as it is lowered: refuses other threads that lower one, and names the files of its dumps.

    The name is a part of what is compiled. JAX counts the kernels that the process has lowered in it (seen in 0.11.2),
    so that no cache would know a kernel again: neither XLA's, when another program of the process has the same kernel,
    nor the persistent one, when another process has lowered other kernels before.

    Args:
      name: of the kernel.
      array: one of its operands or results, whose shape and dtype tell its calls apart.
    """
    basename = "_".join((name, *map(str, array.shape), array.dtype.name))

    @plgpu.inline_mgpu()
    def begin(context) -> None:
        refuse_other_threads()
        context.module.operation.attributes["mosaic_gpu.dump_basename"] = ir.StringAttr.get(basename)

    begin()


class Output(NamedTuple):
    """An output that products add to and that softmax rescales.

    On a GPU it grows in an accumulator, and a loop over tiles carries nothing of it. In the interpreter, where
    accumulators can't be stored to, the loop carries the output.
    """

    accumulator: Any
    memory: Any  # `operand_memory` of each warpgroup's p; None on a GPU
    warpgroup: jax.Array

    def zero(self) -> jax.Array | None:
        """What a loop carries of the output at its start."""
        return None if self.memory is None else jnp.zeros(self.accumulator.shape, jnp.float32)

    def start_product(self, p, v) -> jax.Array | None:
        """Issues `p @ v`, which adds to the output."""
        if self.memory is None:
            plgpu.wgmma(self.accumulator, p, v)
            return None

        def product(part):
            add_product(part, p, v, self.memory, self.warpgroup)
            return plgpu.wgmma_accumulator_load(part, wait_n=0)

        return pl.run_scoped(product, accumulator(self.accumulator.shape[1]))

    def add(self, carried: Any, product: Any) -> jax.Array:
        """Waits for a product, and returns the output with it."""
        return plgpu.wgmma_accumulator_load(self.accumulator, wait_n=0) if self.memory is None else carried + product

    def store(self, output: jax.Array) -> jax.Array | None:
        """Puts an output back, and returns what a loop carries of it."""
        if self.memory is not None:
            return output
        self.accumulator[...] = output
        return None


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
        """Shared memory for operands that products take from registers, or None where they need none."""
        return None

    def length_multiple(self, block: int) -> int:
        """What the length of a matrix that is copied in blocks must be a multiple of.

        Past a matrix's end the copy engine reads zeros and writes nothing, so that the last block needs no padding.
        """
        return _COPIED_ROWS

    def left_operand(self, memory) -> Any:
        """A left operand of many products, in registers, where products can take it from there."""
        return load_matrix(memory, shared=True)

    begin_kernel = staticmethod(begin_kernel)
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

    def length_multiple(self, block: int) -> int:
        return block

    def left_operand(self, memory) -> Any:
        return memory

    @staticmethod
    def begin_kernel(name: str, array: jax.Array | jax.ShapeDtypeStruct) -> None:
        pass

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


@types_of_32_bits()
def launch(
    make_context: Callable[..., Any],
    producer: Callable[[Any], None],
    consumers: Sequence[Callable[[Any], None]],
    operands: tuple[Any, ...],
    outputs: Sequence[jax.ShapeDtypeStruct],
    scratch: tuple[Any, Any],
    scheduler: TileScheduler,
    *,
    name: str,
    tuning: MosaicForwardTuning | MosaicBackwardTuning,
    machine: Hopper,
) -> Any:
    """Runs one role in each warpgroup of each program, and returns the outputs.

    Args:
      name: of the kernel's dumps, before the first operand's shape.
      scratch: arrays and barriers in shared memory, a named tuple of each; the roles get references to them.
      make_context: (references to operands and outputs, shared memory, barriers, program) → what the roles are given.
      producer: the last warpgroup's role. It gives most of its registers to the others.
      consumers: one role for all other warpgroups, or one for each.
    """
    num_consumers = tuning.num_warpgroups

    def kernel(*refs):
        *gmem, smem, barriers = refs
        machine.begin_kernel(name, operands[0])
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
