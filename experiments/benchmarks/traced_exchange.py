"""The cost of an exchange of keys, from a profiler trace: bytes received, and seconds in which no kernel attends."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.benchmarks.train_throughput.breakdown import TracedKernel, read_kernels
from trainer.compile.collectives import received_bytes
from trainer.compile.hlo import Module, parse_module
from trainer.compile.kernels import CALL_TARGET

_COLLECTIVES = re.compile("nccl", re.IGNORECASE)
_EXCHANGING_KERNELS = ("gather_chunks", "sum_chunks")  # scopes of `kernels.collectives`


class TracedExchange(NamedTuple):
    """Times of one run of a program on the first GPU, the mean over the traced runs.

    Attributes:
      attention_s: kernels attend.
      exposed_s: no kernel attends: collectives, copies, preparations of kernels, and idle time.
      idle_s: nothing runs.
      collectives_s: all collectives, whether kernels attend meanwhile or not.
      waiting_s: the part of these that waits for later GPUs: the time beyond that of the GPU where it is shortest.
      received_bytes: from other GPUs, by XLA's collectives.
    """

    attention_s: float
    exposed_s: float
    idle_s: float
    collectives_s: float
    waiting_s: float
    received_bytes: float


def trace_exchange(run: Callable[[], Any], program: jax.stages.Compiled, *, num_runs: int = 3) -> TracedExchange | None:
    """Runs a program that has been run before under the profiler; None where the profiler sees no GPU.

    Args:
      run: of the program, which was compiled with `WITHOUT_CUDA_GRAPHS`.
      program: for its instructions.
      num_runs: to trace.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(num_runs):
                result = run()
            jax.block_until_ready(result)
        by_gpu = [read_kernels(Path(folder), gpu) for gpu in range(jax.local_device_count())]
    return summarize(by_gpu, parse_module(program.as_text() or ""), num_runs) if by_gpu[0] else None


def summarize(by_gpu: Sequence[Sequence[TracedKernel]], module: Module, num_runs: int) -> TracedExchange:
    """Sums up what the first GPU ran.

    Args:
      by_gpu: kernels that each GPU ran in these runs, by start; empty for a GPU without the program.
      module: the program.
      num_runs: how many there were.
    """
    kernels, *others = filter(None, by_gpu)
    attending = set(_attention_kernels(module))
    collectives = _collectives(kernels)
    durations = [
        [kernel.stop_ns - kernel.start_ns for kernel in each] for each in (collectives, *map(_collectives, others))
    ]
    whole = max(kernel.stop_ns for kernel in kernels) - kernels[0].start_ns
    attention = _covered_ns(kernel for kernel in kernels if kernel.instruction in attending)
    waiting = sum(durations[0]) - sum(map(min, zip(*durations, strict=True)))
    return TracedExchange(
        attention_s=attention / num_runs / 1e9,
        exposed_s=(whole - attention) / num_runs / 1e9,
        idle_s=(whole - _covered_ns(kernels)) / num_runs / 1e9,
        collectives_s=_covered_ns(collectives) / num_runs / 1e9,
        waiting_s=waiting / num_runs / 1e9,
        received_bytes=_received_bytes(kernels, module, 1 + len(others)) / num_runs,
    )


def _collectives(kernels: Iterable[TracedKernel]) -> list[TracedKernel]:
    """Kernels that wait for all GPUs; every GPU runs them in this order."""
    return [kernel for kernel in kernels if _COLLECTIVES.search(kernel.name)]


def _attention_kernels(module: Module) -> Iterator[str]:
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            is_kernel = instruction.attribute("custom_call_target") == CALL_TARGET
            if is_kernel and not any(scope in instruction.op_name for scope in _EXCHANGING_KERNELS):
                yield instruction.name


def _received_bytes(kernels: Sequence[TracedKernel], module: Module, num_gpus: int) -> float:
    """Bytes received in all runs; collectives run as often as the rest of their computation: few have names."""
    counts = Counter(kernel.instruction for kernel in kernels)
    return sum(
        max(counts[name] for name in computation.instructions) * received_bytes(computation, num_gpus)
        for computation in module.computations.values()
    )


def _covered_ns(kernels: Iterable[TracedKernel]) -> float:
    """Nanoseconds in which one of these ran at least; by start."""
    covered = busy_until = 0.0
    for kernel in kernels:
        covered += max(kernel.stop_ns - max(kernel.start_ns, busy_until), 0.0)
        busy_until = max(busy_until, kernel.stop_ns)
    return covered
