"""A kernel's first act, as it is lowered: it refuses a second thread that lowers kernels, and names its dumps.

JAX makes wrong kernels where two threads lower some at a time. While JAX lowers what one thread of a warpgroup runs
alone, it says so in a variable that the whole process shares (`_ONCE_PER` in `jax.experimental.mosaic.gpu.utils`, JAX
0.11.2 and 0.12.0.1). What another Python thread lowers meanwhile is then run by all threads of its warpgroup. A tile
scheduler's counter goes up by 128 in place of 1, say, and blocks are left out, whose results are what the memory held
before.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

_LOWERING = "jax._src.pallas.mosaic_gpu.lowering"


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


def refuse_other_threads() -> None:
    """Called while a kernel is being lowered.

    Raises:
      RuntimeError: another thread is lowering one, too. Either of the two may be wrong.
    """
    for thread, frame in sys._current_frames().items():
        if thread != threading.get_ident() and _is_lowering(frame):
            raise RuntimeError(
                "expected one thread to lower Mosaic GPU kernels at a time, got two, of which JAX makes wrong kernels; "
                "trace and lower programs one after another (jax.jit(f).lower(…)), and compile them in as many threads "
                "as you like"
            )


def _is_lowering(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") == _LOWERING:
            return True
        frame = frame.f_back
    return False
