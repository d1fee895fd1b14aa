"""Judges whether a program fits in its devices' memory: what there is, what it needs, and libtpu's refusals."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import jax

from trainer.compile.topology import DeviceMemory, documented_memory
from trainer.step.functions import StepFunctions
from trainer.step.sharding import bytes_per_device


@dataclass(frozen=True)
class StateMemory:
    """The arguments of a step on each device, in bytes, before the device's own padding."""

    parameters: int
    optimizer_state: int
    """The optimizer's moments and the counters."""
    batch: int
    optimizer_state_on_host: int = 0
    """The moments that wait in the host's memory, for each device."""


@dataclass(frozen=True)
class Fit:
    """The memory that a program needs on a device, beside the memory that there is."""

    needed: int
    """Bytes on each device."""
    available: DeviceMemory | None
    """None: unknown."""
    is_refused: bool = False
    """libtpu refused to compile the program for lack of memory. `needed` is then its estimate."""

    @property
    def fits(self) -> bool | None:
        if self.is_refused:
            return False
        return None if self.available is None else self.needed <= self.available.size

    @property
    def spare(self) -> int | None:
        """Bytes to spare; negative: bytes too many."""
        return None if self.available is None else self.available.size - self.needed


# libtpu's refusals (openxla.org/xla/errors/error_1000, and as met with libtpu 0.0.42 and 0.0.48). Sizes are powers of
# 1024. All sizes of a message but the last are needed together: TensorCore and SparseCore share the memory.
_SIZE = r"([\d.]+)([KMGTP]?)i?B?"
_REFUSALS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"the total memory required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)",
        rf"Ran out of memory in memory space hbm\. Used {_SIZE} of {_SIZE} hbm",
        rf"unlikely to have enough memory\. Requires {_SIZE}, has {_SIZE} available",
        rf"TensorCore Hbm usage: {_SIZE}, SparseCore Hbm usage:? {_SIZE}, exceeding available bytes: {_SIZE}",
    )
)


def parse_refusal(message: str) -> Fit | None:
    """The verdict in a compiler's error; None: it is about something else.

    >>> fit = parse_refusal("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 49.5G of 32.00G hbm.")
    >>> fit.needed, fit.available
    (53150220288, DeviceMemory(size=34359738368, source="libtpu's limit"))
    """
    for pattern in _REFUSALS:
        found = pattern.search(message)
        if found:
            groups = found.groups()
            *needed, available = (
                round(float(number) * 1024 ** " KMGTP".index(unit or " "))
                for number, unit in zip(groups[::2], groups[1::2], strict=True)
            )
            return Fit(sum(needed), DeviceMemory(available, "libtpu's limit"), is_refused=True)
    return None


def device_memory(device: Any, num_devices: int) -> DeviceMemory | None:
    """The memory that a program may take on a device.

    Args:
      device: the device; it may be a topology's.
      num_devices: devices that take part. CPU devices share the machine's memory.
    """
    if device.platform == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        share = f", shared by {num_devices} devices" if num_devices > 1 else ""
        return DeviceMemory(total // num_devices, f"this machine's{share}")
    try:
        stats = device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # the device isn't there
        stats = {}
    if "bytes_limit" in stats:
        share = ", the share that XLA_PYTHON_CLIENT_MEM_FRACTION sets" if device.platform == "gpu" else ""
        return DeviceMemory(stats["bytes_limit"], f"its runtime's limit{share}")
    return documented_memory(device.device_kind)


def state_memory(functions: StepFunctions) -> StateMemory:
    """The bytes of the state and of a batch on each device, by their shardings."""
    state = functions.abstract_state
    return StateMemory(
        parameters=bytes_per_device(state.params),
        optimizer_state=bytes_per_device((state.step, state.opt_state, state.skipping)),
        batch=bytes_per_device(functions.abstract_batch),
        optimizer_state_on_host=bytes_per_device(state.opt_state, on_host=True),
    )
