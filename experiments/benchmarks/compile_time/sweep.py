"""The sweep: case after case, each within its limits, and a row with the reason for those that exceed them."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.benchmarks.compile_time.measure import CompileCase, Source, Subject
from trainer.compile.topology import parse_topology
from trainer.errors import UserMistake
from trainer.hardware import expected_platform, installed_versions, resident_bytes
from trainer.terminal.units import format_bytes

Row = dict[str, Any]
"""A case's fields, `status`, and where that is "measured" the fields of a `Measurement`; versions and machine."""

_POLL_S = 0.2


@dataclass(frozen=True)
class Limits:
    """Limits of one case."""

    seconds: float
    resident_bytes: int
    """Limit on the process's memory, on Linux: dense masks of long sequences don't fit into memory."""


def run_case(case: CompileCase, limits: Limits) -> Row:
    """Measures one case in a process of its own.

    Args:
      case: the program to compile.
      limits: a case that passes one of them is stopped.

    Returns:
      The row, with `status` "measured", "stopped" (`message` says at which limit) or "failed" (`message` is the error),
      and `process_s`, seconds of the whole process.

    Raises:
      UserMistake: the case can't be compiled at all.
    """
    row: Row = asdict(case) | {"limit_s": limits.seconds, "limit_bytes": limits.resident_bytes}
    environment = dict(os.environ)
    if case.target is not None:
        environment |= parse_topology(case.target).environment()
    command = [sys.executable, "-m", "experiments.benchmarks.compile_time.measure", json.dumps(asdict(case))]
    begun = time.perf_counter()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            output, errors, stopped = _communicate(process, limits)
        except BaseException:
            process.kill()
            raise
    row["process_s"] = time.perf_counter() - begun
    if stopped:
        return row | {"status": "stopped", "message": stopped}
    if process.returncode == 2:
        raise UserMistake(errors.splitlines()[-1].removeprefix("error: "))
    if process.returncode:
        return row | {"status": "failed", "message": describe_failure(process.returncode, errors)}
    return row | {"status": "measured"} | json.loads(output.splitlines()[-1])


def _communicate(process: subprocess.Popen[str], limits: Limits) -> tuple[str, str, str]:
    """Output, errors, and the limit at which the process was stopped, or nothing."""
    begun = time.perf_counter()
    stopped = ""
    while True:
        try:
            return *process.communicate(timeout=_POLL_S), stopped
        except subprocess.TimeoutExpired:
            if time.perf_counter() - begun > limits.seconds:
                stopped = f"at {limits.seconds:g} s"
            elif (resident_bytes(process.pid) or 0) > limits.resident_bytes:
                stopped = f"at {format_bytes(limits.resident_bytes)}"
            if stopped:
                process.kill()


def describe_failure(status: int, errors: str) -> str:
    """The error at the end of a traceback; JAX puts a hint to its own settings behind it."""
    if status == -signal.SIGKILL:
        return "killed from outside, most likely for want of memory"
    if status < 0:
        return f"crashed with {signal.Signals(-status).name}"
    said = [line for line in errors.splitlines() if line.strip()]
    raised = [line for line in said if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (raised or said or [f"exit status {status}"])[-1]


def sweep(
    series: Sequence[Sequence[CompileCase]], limits: Limits, on_start: Callable[[CompileCase], None] = lambda _: None
) -> Iterator[Row]:
    """Measures series of cases; one that is stopped or fails ends its series, whose longer cases are "not tried".

    Args:
      series: cases that differ in length only, the shortest first.
      limits: of each case.
      on_start: called with each case before it runs.
    """
    about = machine()
    for cases in series:
        ended_at = None
        for case in cases:
            on_start(case)
            if ended_at is None:
                row = run_case(case, limits)
                ended_at = case.length if row["status"] != "measured" else None
            else:
                row = asdict(case) | {"status": "not tried", "ended_at": ended_at}
            yield row | about


def machine() -> Row:
    """The versions and the machine that a row's figures are of."""
    return {
        **installed_versions(("jax", "jaxlib", "libtpu")),
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "num_cores": os.cpu_count(),
        "date": datetime.date.today().isoformat(),
    }


def sources_for(target: str | None, subject: Subject = "attention") -> tuple[Source, ...]:
    """The sources that a subject can have its masks from; the baselines are JAX's TPU kernel called by itself."""
    if subject == "train_step":
        return ("ours",)
    target_platform = expected_platform() if target is None else parse_topology(target).platform
    return ("ours", "upstream_lazy", "dense") if target_platform == "tpu" else ("ours",)


def check_target(target: str | None, subjects: Sequence[Subject], sources: Sequence[Source]) -> None:
    """Refuses a target, and sources, before any case is started.

    Raises:
      UserMistake: an unknown topology, its compiler is missing, or sources that the target or a step doesn't have.
    """
    if "train_step" in subjects and set(sources) - {"ours"}:
        raise UserMistake("a training step has our masks alone; give --subjects attention, or --sources ours")
    if target is not None:
        parse_topology(target).require_compiler()
    if absent := [source for source in sources if source not in sources_for(target)]:
        raise UserMistake(
            f"{' and '.join(absent)} masks are those of JAX's TPU kernel; give --target a TPU topology, "
            "or --sources ours"
        )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
