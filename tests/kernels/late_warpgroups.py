"""Warpgroups of interpreted kernels that are late."""

import itertools
import time
from collections.abc import Iterator


def lateness(monkeypatch, warpgroup: int) -> Iterator[int]:
    """Lets a warpgroup of interpreted programs begin to wait late, and counts how often it did."""
    # The interpreter lets nobody choose the order of its threads (seen in JAX 0.11.2).
    from jax._src.pallas.mosaic_gpu.interpret.shared_memory import Barrier

    wait, num_late = Barrier.wait, itertools.count()

    def wait_late(barrier, thread, *args, **keywords):
        if thread.warpgroup_id == warpgroup:
            next(num_late)
            time.sleep(0.02)
        return wait(barrier, thread, *args, **keywords)

    monkeypatch.setattr(Barrier, "wait", wait_late)
    return num_late
