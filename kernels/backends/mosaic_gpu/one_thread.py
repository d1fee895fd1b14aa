"""Refuses to lower Mosaic GPU kernels in two threads at a time: JAX would make some of them wrong.

While JAX lowers what one thread of a warpgroup runs alone, it says so in a variable that the whole process shares
(`_ONCE_PER` in `jax.experimental.mosaic.gpu.utils`, JAX 0.11.2 and 0.12.0.1). What another Python thread lowers
meanwhile is then run by all threads of its warpgroup. A tile scheduler's counter goes up by 128 in place of 1, say, and
blocks are left out, whose results are what the memory held before.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

_LOWERING = "jax._src.pallas.mosaic_gpu.lowering"


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
