"""Compile time of attention against context length: dense masks, JAX's lazy ones, and ours.

    python -m experiments.benchmarks.compile_time --target v5p:2x2x1 --sources ours upstream_lazy --limit-s 120

No TPU is needed: programs for one are compiled ahead of time by libtpu (the `tpu` extra). Without `--target` the
programs are for this machine's devices. Each case has a process of its own, and is printed as soon as it is done. One
that is stopped or fails ends its series, of which the longer cases aren't tried.
`python -m trainer.compile` measures a whole training step.
"""

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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.benchmarks.command_line import append_rows, read_arguments
from experiments.benchmarks.compile_time.measure import CompileCase, Source, read_mask
from trainer.compile.topology import parse_topology
from trainer.errors import UserMistake
from trainer.hardware import expected_platform, installed_versions, resident_bytes
from trainer.terminal.streams import reader_may_leave
from trainer.terminal.units import format_bytes

Row = dict[str, Any]
"""A case's fields, `status` ("measured", "stopped" or "failed"), and the figures or a `message`."""

_STAGES = ("first_trace_s", "lower_s", "compile_s")
_POLL_S = 0.2


@dataclass(frozen=True)
class Arguments:
    """Measures trace, lower and compile seconds of forward and backward of one attention call."""

    target: str | None = None
    """Topology to compile for, such as v5p:2x2x1 or h200:1; None: this machine's devices."""
    sources: tuple[Source, ...] = ("ours",)
    """Source of the kernel's mask; `dense` and `upstream_lazy` are those of JAX's TPU kernel."""
    masks: tuple[str, ...] = ("causal",)
    """Names from MASKS in measure.py, or masks as Python writes them."""
    lengths: tuple[int, ...] = (4096, 32_768, 131_072)
    """Tokens in a sequence."""
    limit_s: float = 300.0
    """Seconds for a case."""
    limit_gigabytes: float = round(0.75e-9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 1)
    """Limit on a case's resident memory, on Linux; by default three quarters of this machine's."""
    num_heads: int = 16
    num_kv_heads: int = 2
    head_dim: int = 256
    output: Path | None = None
    """File that the JSON lines are appended to, each as soon as it is measured."""

    def __post_init__(self):
        for mask in self.masks:
            read_mask(mask, self.num_heads)

    def cases(self, mask: str, source: Source) -> list[CompileCase]:
        """Cases that differ in length only, the shortest first."""
        sizes = self.target, self.num_heads, self.num_kv_heads, self.head_dim
        return [CompileCase(source, mask, length, *sizes) for length in sorted(self.lengths)]


def run_case(case: CompileCase, limit_s: float, limit_bytes: float) -> Row:
    """Measures one case in a process of its own, which is stopped at a limit.

    Raises:
      UserMistake: the case can't be compiled at all.
    """
    row: Row = asdict(case)
    environment = dict(os.environ)
    if case.target is not None:
        environment |= parse_topology(case.target).environment()
    command = [sys.executable, "-m", "experiments.benchmarks.compile_time.measure", json.dumps(row)]
    row |= {"limit_s": limit_s, "limit_bytes": limit_bytes}
    begun = time.perf_counter()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while True:
                try:
                    output, errors = process.communicate(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    if time.perf_counter() - begun > limit_s:
                        return row | {"status": "stopped", "message": f"at {limit_s:g} s"}
                    if (resident_bytes(process.pid) or 0) > limit_bytes:
                        return row | {"status": "stopped", "message": f"at {format_bytes(int(limit_bytes))}"}
        finally:
            process.kill()
    if process.returncode == 2:
        raise UserMistake(errors.splitlines()[-1].removeprefix("error: "))
    if process.returncode:
        return row | {"status": "failed", "message": describe_failure(process.returncode, errors)}
    return row | {"status": "measured"} | json.loads(output.splitlines()[-1])


def describe_failure(status: int, errors: str) -> str:
    """The error at the end of a traceback; JAX puts a hint to its own settings behind it."""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    lines = [line for line in errors.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (raised or lines or [f"exit status {status}"])[-1]


def sweep(arguments: Arguments) -> Iterator[Row]:
    """Measures case after case."""
    about = {
        **installed_versions(("jax", "jaxlib", "libtpu")),
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "num_cores": os.cpu_count(),
        "date": datetime.date.today().isoformat(),
    }
    for mask in arguments.masks:
        for source in arguments.sources:
            for case in arguments.cases(mask, source):
                row = run_case(case, arguments.limit_s, 1e9 * arguments.limit_gigabytes) | about
                yield row
                if row["status"] != "measured":
                    break


def check_target(arguments: Arguments) -> None:
    """Refuses a target and sources before any case is started.

    Raises:
      UserMistake: an unknown topology, its compiler is missing, or sources that the target doesn't have.
    """
    target_platform = expected_platform()
    if arguments.target is not None:
        topology = parse_topology(arguments.target)
        topology.require_compiler()
        target_platform = topology.platform
    baselines = [source for source in arguments.sources if source != "ours"]
    if baselines and target_platform != "tpu":
        raise UserMistake(
            f"{' and '.join(baselines)} masks are those of JAX's TPU kernel; give --target a TPU topology, "
            "or --sources ours"
        )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def describe(row: Row) -> str:
    """A case in one line."""
    head = f"{row['mask']}, {row['source']}, {row['length']:,}"
    if row["status"] != "measured":
        return f"{head}: {row['status']}: {row['message']}"
    trace, lower, compiling = (f"{row[stage]:.3f} s" for stage in _STAGES)
    return f"{head}: trace {trace}, lower {lower}, compile {compiling}, {format_bytes(row['peak_bytes'])} resident"


def main(arguments: Arguments) -> int:
    """Measures, writes and prints; returns the exit status."""
    try:
        check_target(arguments)
        for row in sweep(arguments):
            append_rows(arguments.output, [row])
            print(describe(row), flush=True)
    except UserMistake as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(read_arguments(Arguments)))
