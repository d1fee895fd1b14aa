"""How every kernel of this backend is launched: consumer warpgroups, and a producer that copies ahead of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.backends.mosaic_gpu.machine import Hopper
from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning, MosaicForwardTuning


def launch(
    make_context: Callable[..., Any],
    producer: Callable[[Any], None],
    consumers: Sequence[Callable[[Any], None]],
    operands: tuple[Any, ...],
    *,
    out_type: Any,
    scratch: tuple[Any, Any],
    num_programs: int,
    tuning: MosaicForwardTuning | MosaicBackwardTuning,
    machine: Hopper,
) -> Any:
    """Runs one role in each warpgroup of each program, and returns the outputs.

    Args:
      make_context: (references to operands and outputs, shared memory, barriers, program) → what the roles are given.
      producer: the last warpgroup's role. It gives most of its registers to the others.
      consumers: one role for all other warpgroups, or one for each.
      operands: trees of arrays in global memory.
      out_type: the outputs' shapes and dtypes.
      scratch: trees of shared memory and of barriers.
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
        out_type=out_type,
        scratch_types=scratch,
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=num_consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=machine.interpret,
    )(*operands)
