"""Two GPUs, as a kernel sees them that runs on both: the other's memory, and flags that they raise for each other."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm


class GpuPair(NamedTuple):
    """The two GPUs, as a kernel sees them.

    Attributes:
      axis: the mesh axis of the two.
      rank: of this GPU.
      flags: semaphores by which each tells the other what has arrived.
    """

    axis: str
    rank: jax.Array
    flags: Any

    @staticmethod
    def of(axis: str, num_flags: int) -> GpuPair:
        """Within a kernel."""
        return GpuPair(axis, lax.axis_index(axis), pl.get_global(plgpu.SemaphoreType.REGULAR((num_flags,))))

    @property
    def other(self) -> jax.Array:
        """The other GPU's rank."""
        return 1 - self.rank

    def reference_there(self, reference: Any) -> Any:
        """An array of the kernel in the other GPU's memory."""
        device: Any = {self.axis: self.other}
        return plgpu.remote_ref(reference, device)

    def signal(self, flag) -> None:
        """Raises a flag of the other GPU, once what this warpgroup has copied there has arrived."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
        pl.semaphore_signal(self.flags.at[flag], device_id={self.axis: self.other})

    def wait(self, flag, num_signals: int = 1) -> None:
        """Waits until a flag of this GPU has been raised so many times. Then the copy engine may read what arrived."""
        pl.semaphore_wait(self.flags.at[flag], value=num_signals, decrement=False)
        _fence_copy_engine()


@plgpu.inline_mgpu()
def _fence_copy_engine(context) -> None:
    """Orders what threads have seen before what the copy engine reads (PTX: the async proxy)."""
    nvvm.fence_proxy(nvvm.ProxyKind.async_)
