"""Explains that memory ran out, on a device or on this machine, in one message.

The message says what ran, what it needs, what there is, and what helps. `running` names the program that ran.
`explained`, around a whole run, makes the message.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp

from trainer.compile.fit import device_memory, parse_refusal
from trainer.config import TrainConfig
from trainer.errors import TrainingFailed, UserMistake
from trainer.hardware import peak_resident_bytes
from trainer.terminal.units import format_bytes

# Messages of the allocators of XLA's CPU and GPU clients, of CUDA, and of libtpu, when compiling and when running.
_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED.*?(?:out of memory|allocat|reserve|hbm|enough memory).*?$|CUDA_ERROR_OUT_OF_MEMORY.*?$",
    re.DOTALL | re.IGNORECASE | re.MULTILINE,
)
# These mean that a kernel's tiles are too large for on-chip memory, not that the run is too large.
_BESIDE_A_CORE = re.compile(r"memory space (?:vmem|smem|sflag)|shared memory", re.IGNORECASE)
# For others `trainer.compile` finds a change.
_REMEDIES = {
    "eval_step": "a smaller --loss.chunk-size, a larger --gradient-accumulation, or more devices (--mesh.fsdp)",
    "sampling": "fewer or shorter samples.prompts, a smaller --samples.num-tokens, or none in training",
}


class OutOfMemory(RuntimeError):
    """Memory ran out while a program ran.

    Args:
      program: its name in the record, or what was being done.
      reason: the original error's message.
      on_host: the host's memory ran out, not a device's.
    """

    def __init__(self, program: str, reason: str, *, on_host: bool):
        super().__init__(f"{program}: {reason}")
        self.program, self.reason, self.on_host = program, reason, on_host


def reason_of(error: BaseException) -> str | None:
    """The part of an error that is about missing memory; None if it is about something else.

    >>> reason_of(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17592186044416 bytes."))
    'RESOURCE_EXHAUSTED: Out of memory allocating 17592186044416 bytes.'
    >>> reason_of(ValueError("operands could not be broadcast together"))
    """
    text = str(error)
    if isinstance(error, MemoryError):
        return text or "Python got no memory for an object"
    if not isinstance(error, RuntimeError | ValueError) or isinstance(error, UserMistake | TrainingFailed):
        return None
    found = _OUT_OF_MEMORY.search(text)
    if found is None or _BESIDE_A_CORE.search(found[0]):
        return None
    # XLA goes on with a list of buffers.
    return " ".join(found[0].split())[:400]


@contextlib.contextmanager
def running(program: str) -> Iterator[None]:
    """Names the program that runs inside, in case memory runs out.

    Args:
      program: its name in the record, or what is being done.

    Raises:
      OutOfMemory: replaces JAX's or Python's error.
    """
    try:
        yield
    except (MemoryError, RuntimeError, ValueError) as error:
        reason = reason_of(error)
        if reason is None or isinstance(error, OutOfMemory):
            raise
        raise OutOfMemory(program, reason, on_host=isinstance(error, MemoryError)) from error


@contextlib.contextmanager
def explained(config: TrainConfig, command: Sequence[str], record: Any) -> Iterator[None]:
    """Makes the message that ends a run whose memory ran out, in a program or between them.

    Args:
      config: the experiment.
      command: the command line of `python -m trainer`.
      record: of the run, by its names; `compile` tells what the programs need.

    Raises:
      TrainingFailed: memory ran out inside.
    """
    try:
        with running("the run"):
            yield
    except OutOfMemory as error:
        raise TrainingFailed("\n  ".join(_describe(error, config, command, record))) from error


def _describe(error: OutOfMemory, config: TrainConfig, command: Sequence[str], record: Any) -> Iterator[str]:
    if error.on_host:
        yield f"{error.program}: this machine is out of memory: {error.reason}"
        yield describe_host()
        yield (
            f"what helps: less beside it on this machine, a smaller batch_size or sequence_length, or fewer than "
            f"--data.num-prefetch-batches {config.data.num_prefetch_batches}"
        )
        return
    device = jax.local_devices()[0]
    yield f"{error.program}: out of memory on {device.device_kind}: {error.reason}"
    refusal, memory = parse_refusal(error.reason), _memory_of(error.program, record)
    if refusal is not None:
        yield f"it needs about {format_bytes(refusal.needed)} on each device, by the compiler's estimate"
    elif memory is not None:
        size = {name: format_bytes(count) for name, count in memory.items()}
        yield (
            f"it needs {size['peak']} on each device: arguments {size['arguments']}, outputs {size['outputs']} "
            f"({size['aliased']} written over arguments), temporaries {size['temporaries']}, code {size['code']}"
        )
    elif error.program == "sampling":
        num_bytes = format_bytes(config.model.num_parameters * jnp.dtype(config.model.compute_dtype).itemsize)
        yield f"it needs, beside the training state, {num_bytes} of parameters on each device, and a cache"
    yield describe_device(device, math.prod(asdict(config.mesh).values()))
    if error.program in _REMEDIES:
        yield f"what helps: {_REMEDIES[error.program]}"
    else:
        yield f"the smallest change with which the step fits is found by: {_compile_command(command)}"
        yield "the longest context that fits, by the same with --longest-context"
    if device.platform == "gpu" and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        yield "or set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment: JAX takes three quarters by default"
    yield "then run the same command with it: it goes on from the newest checkpoint, if there is one"


def describe_device(device: jax.Device, num_devices: int) -> str:
    """The memory of a device, as far as it tells, where so many devices take part."""
    available = device_memory(device, num_devices)
    if available is None:
        return f"{device.device_kind} doesn't tell what it has"
    stats = {} if device.platform == "cpu" else device.memory_stats() or {}
    in_use = f", {format_bytes(stats['bytes_in_use'])} of it in use" if "bytes_in_use" in stats else ""
    return f"there is {format_bytes(available.size)} on each device ({available.source}){in_use}"


def describe_host() -> str:
    """The memory of this machine, and what this process held of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"there is {format_bytes(total)}; this process held {format_bytes(peak_resident_bytes())} at its peak"


def _memory_of(program: str, record: Any) -> dict[str, int] | None:
    """The bytes of a program's newest compilation, by category."""
    try:
        compilations = record["compile"]
    except KeyError:  # it is under way
        return None
    reports = (compilations.get(program), *compilations["recompiles"])
    memories = [report["memory"] for report in reports if report is not None and report["name"] == program]
    return memories[-1] if memories else None


def _compile_command(command: Sequence[str]) -> str:
    """The command line of `trainer.compile` for the same config."""
    arguments = list(command[command.index("trainer") + 1 :]) if "trainer" in command else ["--config", "FILE"]
    kept = [
        argument
        for before, argument in zip(["", *arguments], arguments, strict=False)
        if before != "--workdir" and not argument.startswith("--workdir")
    ]
    return shlex.join(["python", "-m", "trainer.compile", *kept])
