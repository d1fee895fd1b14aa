"""The machine, asked without starting a device: its platform (or the one compiled for), memory and versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

Platform = Literal["cpu", "gpu", "tpu"]
_PLATFORM_OF: dict[str, Platform] = {"cpu": "cpu", "tpu": "tpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu"}
_TARGET: ContextVar[Platform | None] = ContextVar("target platform", default=None)
_GPU_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin", "jax_rocm7_plugin", "jax_rocm60_plugin")


def expected_platform() -> Platform:
    """The platform that JAX will choose, without starting a device.

    A config file asks this to fit the model to the machine; starting the devices there would cost seconds, and memory
    on every accelerator, before a mistake in the config is noticed. It follows JAX's own order: `JAX_PLATFORMS` if set,
    else TPU, GPU, CPU, where an accelerator counts if both the device and JAX's plugin for it are present. Inside
    `compiling_for` it is the platform compiled for.

    Returns:
      "cpu", "gpu" or "tpu".
    """
    target = _TARGET.get()
    if target is not None:
        return target
    requested = os.environ.get("JAX_PLATFORMS", "").split(",")[0].strip()
    if requested in _PLATFORM_OF:
        return _PLATFORM_OF[requested]
    if _installed("libtpu") and (Path("/dev/accel0").exists() or Path("/dev/vfio/0").exists()):
        return "tpu"
    if any(map(_installed, _GPU_PLUGINS)) and _visible_gpu():
        return "gpu"
    return "cpu"


@contextlib.contextmanager
def compiling_for(platform: Platform | None) -> Iterator[None]:
    """Makes `expected_platform()` return another machine's platform inside, for configs that are compiled for it.

    Args:
      platform: None changes nothing.

    >>> with compiling_for("tpu"):
    ...     expected_platform()
    'tpu'
    """
    token = _TARGET.set(platform)
    try:
        yield
    finally:
        _TARGET.reset(token)


def resident_bytes(pid: int | str = "self") -> int | None:
    """Bytes that a process has resident now; None if it has ended, or the system isn't Linux and can't tell."""
    return _from_proc("VmRSS", pid)


def peak_resident_bytes() -> int:
    """Most bytes that this process has had resident since it started."""
    # getrusage starts from the peak of the parent process, /proc doesn't.
    peak = _from_proc("VmHWM")
    if peak is not None:
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def installed_versions(distributions: Sequence[str]) -> dict[str, str | None]:
    """The version of each distribution; None if it isn't installed."""
    versions: dict[str, str | None] = {}
    for name in distributions:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _visible_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def _from_proc(name: str, pid: int | str = "self") -> int | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024
