"""The machine that runs a kernel: a Hopper GPU, or Pallas's interpreter, which does some things differently.

The interpreter knows no threads within a warpgroup, no atomic operations and no MLIR. Its matmuls take no operand from
registers, and its accumulators can't be stored to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.hopper.begin_kernel import begin_kernel
from kernels.hopper.memory import matrix
from kernels.hopper.registers import (
    accumulator,
    column_indices,
    join_partial_sums,
    load_matrix,
    partial_sums,
)
from kernels.hopper.tile_scheduler import BlockClaims
from kernels.tracing.target import Target

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


class Output(NamedTuple):
    """An output that products add to and that softmax rescales.

    On a GPU it grows in an accumulator, and a loop over tiles carries nothing of it. In the interpreter, where
    accumulators can't be stored to, the loop carries the output.
    """

    accumulator: Any
    memory: Any  # `operand_memory` of each warpgroup's p; None on a GPU
    warpgroup: jax.Array

    def zero(self) -> jax.Array | None:
        """The output at the start of a loop, as the loop carries it."""
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
        """Puts an output back, and returns it as a loop carries it."""
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
        """The length of a matrix that is copied in blocks must be a multiple of this number.

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


def machine_of(*, interpret: bool) -> Hopper:
    """The machine that runs kernels: Pallas's interpreter where `interpret` asks for it, else a Hopper GPU."""
    if interpret:
        return Interpreter(plgpu.InterpretGPUParams())  # type: ignore[attr-defined]  # new in JAX 0.11
    return Hopper()
