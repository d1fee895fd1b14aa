"""Compiles ahead of time in timed stages, and reads what a program takes in memory.

An event of `jax.monitoring` tells of a hit in the cache. Its name is the same from JAX 0.10.2 to 0.12.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax

from trainer.compile.kernels import compile_kernels
from trainer.terminal.units import format_seconds

_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on each device while a compiled program runs."""

    arguments: int
    """Inputs, donated ones included."""
    outputs: int
    """Results, including those written over a donated input."""
    aliased: int
    """The part of the outputs that is written over donated inputs."""
    temporaries: int
    """Intermediate values, at their peak."""
    code: int
    """The program itself."""
    peak: int
    """The sum of the above less the aliased.

    On CPUs and GPUs temporaries are one block for the whole program, whose size XLA states. XLA's own
    `peak_memory_in_bytes` is the same on GPUs, but leaves temporaries out on CPUs (jaxlib 0.10.2 to 0.12). On TPUs
    libtpu compares `peak_memory_in_bytes` with the chip's memory, so temporaries are what it leaves after the others.
    The size that is stated for them there can exceed the whole chip in a program that libtpu accepts (libtpu 0.0.42
    and 0.0.48). What is offloaded to the host is in that peak, too: its arguments and outputs beside the device's, and
    of the device's temporaries and the host's the larger (libtpu 0.0.42 and 0.0.50).
    """
    host: int = 0
    """Bytes of the host's pinned memory that the program takes for each device: offloaded arguments, outputs and
    temporaries. On CPUs, whose memory is the host's, they are counted above."""


@dataclass(frozen=True)
class CompileReport:
    """The cost of compiling one function."""

    name: str
    trace_s: float
    """Python to jaxpr."""
    lower_s: float
    """jaxpr to StableHLO."""
    compile_s: float
    """StableHLO to a device's program, its kernels included, or the time to read that from the cache."""
    cache_hit: bool
    """True: the program came from the persistent cache."""
    memory: MemoryReport | None
    """None where the backend can't tell."""

    def to_json(self) -> dict[str, Any]:
        """As a dict of JSON's types."""
        return asdict(self)


def format_stages(report: CompileReport, origin: str | None = None) -> str:
    """The seconds of each stage, and where the program came from: as `origin` says, or the report.

    >>> format_stages(CompileReport("step", 1.0, 0.25, 60.0, True, None))
    'trace 1.0 s, lower 250.0 ms, XLA 1 min 0 s (read from the cache)'
    """
    trace, lower, compile_ = map(format_seconds, (report.trace_s, report.lower_s, report.compile_s))
    origin = origin or ("read from the cache" if report.cache_hit else "compiled")
    return f"trace {trace}, lower {lower}, XLA {compile_} ({origin})"


def compile_in_stages(jitted: Any, *args: Any, name: str, **kwargs: Any) -> tuple[jax.stages.Compiled, CompileReport]:
    """Trace, lower and compile a jitted function, timing each.

    Args:
      jitted: what `jax.jit` returned.
      *args, **kwargs: its arguments, arrays or `jax.ShapeDtypeStruct`s, and static values.
      name: what to call it in the report.

    Returns:
      The executable, which takes only arguments of these shapes, and the report.

    >>> double, report = compile_in_stages(jax.jit(lambda x: 2 * x), 1.0, name="double")
    >>> float(double(3.0)), report.name
    (6.0, 'double')
    """
    return compile_lowering(lower_in_stages(jitted, *args, **kwargs), name=name)


@dataclass(frozen=True)
class Lowering:
    """A function lowered to StableHLO, not yet compiled by XLA."""

    lowered: jax.stages.Lowered
    trace_s: float
    """Python to jaxpr."""
    lower_s: float
    """jaxpr to StableHLO."""
    device: jax.Device | None
    """One that the program is for; None if no argument tells."""


def lower_in_stages(jitted: Any, *args: Any, **kwargs: Any) -> Lowering:
    """The first two stages of `compile_in_stages`, which need no device."""
    begun = time.perf_counter()
    traced = jitted.trace(*args, **kwargs)
    was_traced = time.perf_counter()
    lowered = traced.lower()
    lower_s = time.perf_counter() - was_traced
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves((args, kwargs)))
    sharding = next((sharding for sharding in shardings if sharding is not None), None)
    return Lowering(lowered, was_traced - begun, lower_s, None if sharding is None else _own_device(sharding))


def _own_device(sharding: jax.sharding.Sharding) -> jax.Device:
    """A device of this process, or the first one where none is attached."""
    devices: set[Any] = sharding.device_set
    return min(devices, key=lambda device: (device.process_index != jax.process_index(), device.id))


def compile_lowering(lowering: Lowering, *, name: str) -> tuple[jax.stages.Compiled, CompileReport]:
    """The last stage of `compile_in_stages`."""
    begun = time.perf_counter()
    if lowering.device is not None and lowering.device.platform == "gpu":
        compile_kernels(lowering.lowered, lowering.device)
    with _count_cache_hits() as cache_hits:
        compiled = lowering.lowered.compile()
    compile_s = time.perf_counter() - begun
    return compiled, CompileReport(
        name, lowering.trace_s, lowering.lower_s, compile_s, bool(cache_hits), memory_report(compiled)
    )


def memory_report(compiled: jax.stages.Compiled) -> MemoryReport | None:
    """The memory that a compiled program takes on each device, or None where the backend can't tell."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    arguments, outputs, aliased, temporaries, code = (
        getattr(stats, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp", "generated_code")
    )
    host_arguments, host_outputs, host_aliased, host_temporaries = (
        getattr(stats, f"host_{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")
    )
    host_state = host_arguments + host_outputs - host_aliased
    shardings = jax.tree.leaves(compiled.output_shardings)
    if shardings and next(iter(shardings[0].device_set)).platform == "tpu":
        stated = stats.peak_memory_in_bytes - (arguments + outputs - aliased) - host_state
        temporaries = max(min(stated, temporaries) if host_temporaries else stated, 0)
    peak = arguments + outputs - aliased + temporaries + code
    host = host_state + host_temporaries
    return MemoryReport(arguments, outputs, aliased, temporaries, code, peak, host)


@contextlib.contextmanager
def _count_cache_hits() -> Iterator[list[str]]:
    """Collects this thread's hits in the persistent cache."""
    hits: list[str] = []
    thread = threading.get_ident()

    def listen(event: str, **_: Any) -> None:
        if event == _CACHE_HIT_EVENT and threading.get_ident() == thread:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(listen)
