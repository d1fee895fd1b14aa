"""How much of the host's memory XLA may pin for what is offloaded from GPUs."""

from __future__ import annotations

import os
from pathlib import Path

_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # in GiB, whatever its name says
# The rest is for the process itself, the page cache of its data and files, and the system.
_PINNED_SHARE = 0.8


def limit_pinned_memory(nvidia_gpus: Path = Path("/proc/driver/nvidia/gpus")) -> None:
    """Shares most of the host's memory out to its GPUs evenly, unless the environment has a limit already.

    Call it before JAX starts its devices. XLA's own limit is 64 GiB for each GPU. Up to the limit its pool grows by
    regions of 1, 2, 4, … GiB: without one, two GPUs that offload 97 GiB each pin 128 GiB each, and a host of 251 GiB
    kills the run.

    Args:
      nvidia_gpus: the driver's folder with an entry for each GPU of the host.
    """
    num_gpus = len(list(nvidia_gpus.iterdir())) if nvidia_gpus.is_dir() else 0
    if num_gpus:
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        os.environ.setdefault(_LIMIT, str(max(1, int(_PINNED_SHARE * host_bytes / num_gpus) // 2**30)))
