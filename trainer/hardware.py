"""The platform that a config is made for: this machine's, found without starting a device, or another."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
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


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _visible_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))
