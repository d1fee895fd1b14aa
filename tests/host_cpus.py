"""How tests compile for CPUs, and on how many devices, in their own process and in those that they start."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

NUM_DEVICES = 8
"""CPU devices of each process of tests. What needs fewer takes the first ones, as the trainer does."""


def xla_flags(num_devices: int = NUM_DEVICES) -> str:
    """XLA_FLAGS for small inputs. A test of speed, or of the last bit of a real run, starts a process without them.

    Args:
      num_devices: CPU devices that JAX sees.
    """
    # XLA's own passes are those that users get. LLVM's would take half of all the time, and small inputs don't repay
    # it; nor do modules that are cut up for many cores.
    flags = ["backend_optimization_level=0", "llvm_disable_expensive_passes=true", "cpu_parallel_codegen_split_count=1"]
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        # The older emitter of fusions compiles in a third of the time. Later versions don't have it, and end at a flag
        # that they don't know.
        flags.append("cpu_use_fusion_emitters=false")
    flags.append(f"force_host_platform_device_count={num_devices}")
    return " ".join(f"--xla_{flag}" for flag in flags)


def environment_of_cpus(num_devices: int) -> dict[str, str]:
    """The environment of a process in which JAX sees so many CPU devices."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(num_devices),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
