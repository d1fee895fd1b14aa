"""How every kernel of this backend is launched: consumer warpgroups, and a producer that copies ahead of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.backends.mosaic_gpu.machine import Hopper
from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning, MosaicForwardTuning


def launch(
    kernel: Callable[..., None],
    operands: tuple[Any, ...],
    *,
    out_type: Any,
    scratch: tuple[Any, ...],
    num_programs: int,
    num_consumers: int,
    machine: Hopper,
) -> Any:
    """Runs `kernel(*operands, *outputs, *scratch)` in each warpgroup of each program, and returns the outputs.

    Args:
      operands: trees of arrays in global memory.
      out_type: the outputs' shapes and dtypes.
      scratch: trees of shared memory and of barriers.
      num_consumers: warpgroups beside the producer, which is the last one.
    """
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch,
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=num_consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=machine.interpret,
    )(*operands)


def run_as_producer(warpgroup, tuning: MosaicForwardTuning | MosaicBackwardTuning, role: Callable[[], None]) -> None:
    """Runs a role in the last warpgroup, which gives most of its registers to the others."""

    @pl.when(warpgroup == tuning.num_warpgroups)
    def _():
        plgpu.set_max_registers(tuning.load_registers, action="decrease")
        role()


def run_as_consumer(condition, tuning: MosaicForwardTuning | MosaicBackwardTuning, role: Callable[[], None]) -> None:
    """Runs a role in the warpgroups for which the condition holds."""

    @pl.when(condition)
    def _():
        plgpu.set_max_registers(tuning.compute_registers, action="increase")
        role()
