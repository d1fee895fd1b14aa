"""GPUs, as a kernel sees them that runs on all: the others' memory, and flags that they raise for each other."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm


class GpuPeers(NamedTuple):
    """The GPUs along a mesh axis, as a kernel sees them. The others go by how many ranks after this one's they stand.

    Attributes:
      axis: the mesh axis.
      num_ranks: how many GPUs there are.
      rank: of this GPU.
      flags: semaphores by which GPUs tell each other what has arrived.
    """

    axis: str
    num_ranks: int
    rank: jax.Array
    flags: Any

    @staticmethod
    def of(axis: str, num_flags: int, num_ranks: int) -> GpuPeers:
        """Within a kernel."""
        flags = pl.get_global(plgpu.SemaphoreType.REGULAR((num_flags,)))
        return GpuPeers(axis, num_ranks, lax.axis_index(axis), flags)

    @property
    def others(self) -> range:
        """All other GPUs, the next one first."""
        return range(1, self.num_ranks)

    def distance_back(self, distance: int) -> int:
        """How many ranks after another GPU this one stands."""
        return self.num_ranks - distance

    def rank_after(self, distance: int) -> jax.Array:
        """The rank of a GPU; after the last comes the first."""
        return 1 - self.rank if self.num_ranks == 2 else lax.rem(self.rank + distance, self.num_ranks)

    def reference_there(self, reference: Any, distance: int) -> Any:
        """An array of the kernel in another GPU's memory."""
        device: Any = {self.axis: self.rank_after(distance)}
        return plgpu.remote_ref(reference, device)

    def signal(self, flag, distance: int) -> None:
        """Raises a flag of another GPU, once what this warpgroup has copied there has arrived."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
        pl.semaphore_signal(self.flags.at[flag], device_id={self.axis: self.rank_after(distance)})

    def wait(self, flag, num_signals: int = 1) -> None:
        """Waits until a flag of this GPU was raised `num_signals` times. Then the copy engine may read what arrived."""
        pl.semaphore_wait(self.flags.at[flag], value=num_signals, decrement=False)
        _fence_copy_engine()


@plgpu.inline_mgpu()
def _fence_copy_engine(context) -> None:
    """Orders what threads have seen before what the copy engine reads (PTX: the async proxy)."""
    nvvm.fence_proxy(nvvm.ProxyKind.async_)
