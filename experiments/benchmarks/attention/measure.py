"""The times of one case, as rows of JSON."""

from __future__ import annotations

import datetime
import math
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax

from experiments.benchmarks.attention.cases import Case, Direction, describe, make_problem
from experiments.benchmarks.attention.contenders import compile_calls, compile_contender
from experiments.benchmarks.attention.timing import AttentionContender, how_many_last, speed_ratio, time_in_rounds

DIRECTIONS: tuple[Direction, ...] = ("forward", "forward_backward")
# More rounds don't change the figures, and take memory and time to compile.
_MOST_CALLS = 16


def measure_speed(
    name: str,
    case: Case,
    backends: Sequence[str],
    *,
    num_rounds: int = 5,
    sample_ms: float = 200.0,
    program_ms: float = 1.0,
    rest_ms: float = 0.0,
    dense_gigabytes: float = 6.0,
) -> list[dict[str, Any]]:
    """Times of one case, backend × (forward, backward, both); the arguments are the command's.

    A row's `speed_ratios` are the others' times over its own. A backend that can't serve a direction has a row with the
    reason in place of the times.
    """
    problem = make_problem(case)
    common = {"case": name, **describe(case), "num_pairs": problem.num_pairs, **where()}
    rows: list[dict[str, Any]] = []
    contenders: dict[str, dict[Direction, AttentionContender]] = {backend: {} for backend in backends}
    forward_s = math.inf  # of the fastest
    for backend in backends:
        for direction in DIRECTIONS:
            try:
                contender = compile_contender(problem, backend, direction, dense_gigabytes)
                contender.prepare(sample_ms)
            except Exception as refusal:  # other systems raise anything, and one that fails must not end the others
                rows.append({**common, "backend": backend, "direction": direction, "refused": reason(refusal)})
                break
            contenders[backend][direction] = contender
            if direction == "forward":
                # Many in a row: waiting for a single one can take longer than it does.
                forward_s = min(forward_s, contender.time(contender.num_runs))
    num_calls = min(how_many_last(program_ms, forward_s), _MOST_CALLS)
    if num_calls > 1:
        for backend, served in contenders.items():
            for direction, single in served.items():
                served[direction] = compile_calls(single, problem, backend, direction, num_calls)
                served[direction].prepare(sample_ms)
    time_in_rounds([list(served.values()) for served in contenders.values()], num_rounds, rest_ms)

    for measured in ("forward", "backward", "forward_backward"):
        compiled: Direction = "forward" if measured == "forward" else "forward_backward"
        seconds = {b: _seconds(case, served, measured) for b, served in contenders.items() if compiled in served}
        for backend, times in seconds.items():
            contender = contenders[backend][compiled]
            row = {
                **common,
                "backend": backend,
                "direction": measured,
                "seconds": statistics.median(times),
                "fastest_s": min(times),
                "slowest_s": max(times),
                "num_rounds": num_rounds,
                "sample_ms": sample_ms,
                "rest_ms": rest_ms,
                "runs_per_sample": contender.num_runs,
                "calls_per_program": contender.calls_per_program,
                "measured_at_length": contender.length,
                "tflops_per_s": problem.flops(measured) / statistics.median(times) / 1e12,
                "compile_s": contender.compile_s,
                "temporary_bytes": contender.temporary_bytes,
                "speed_ratios": {other: speed_ratio(theirs, times) for other, theirs in seconds.items()},
            }
            rows.append(row)
    return rows


def _seconds(case: Case, served: dict[Direction, AttentionContender], measured: str) -> list[float]:
    """A backend's times in each round, scaled to the case's length."""
    forward = served["forward"]
    scale = (case.length / forward.length) ** 2
    if measured == "forward":
        return [scale * seconds for seconds in forward.seconds]
    both = [scale * seconds for seconds in served["forward_backward"].seconds]
    if measured == "forward_backward":
        return both
    return [total - scale * seconds for total, seconds in zip(both, forward.seconds, strict=True)]


def reason(refusal: Exception) -> str:
    """A refusal in one line. What isn't the plain kind names its type."""
    line = f"{refusal}".partition("\n")[0]
    return line if line and isinstance(refusal, ValueError) else f"{type(refusal).__name__}: {line}".removesuffix(": ")


def where() -> dict[str, str]:
    """Device, versions and date."""
    versions = {}
    for distribution in ("jax", "jaxlib", "nvidia-cudnn-cu13", "torch", "tokamax", "dew-flash-attn-cu13"):
        try:
            versions[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        **versions,
        "date": datetime.date.today().isoformat(),
    }
