"""Measures whole training steps: tokens per second, MFU, memory and compile seconds.

    python -m experiments.benchmarks.train_throughput --workloads 124m_32k 1b_32k --output train_throughput.jsonl

`python -m trainer --profile-steps` shows where a step's time goes.
Each workload runs in a process of its own, so that its peak memory is its own. Exit status: 0; 1 if a workload failed;
2 for a mistake in the command, or without an accelerator.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.benchmarks.command_line import append_rows, read_arguments, require_known, table_console
from experiments.benchmarks.train_throughput.workloads import WORKLOADS
from kernels.collectives import Collectives
from kernels.context import Exchange
from trainer.config import LossImplementation, MeshConfig
from trainer.hardware import expected_platform
from trainer.terminal.streams import reader_may_leave
from trainer.terminal.units import format_bytes


@dataclass(frozen=True)
class ThroughputArguments:
    """Measures training steps on an accelerator, one sequence of random tokens to a step."""

    workloads: tuple[str, ...] = ("124m_32k",)
    """Names from WORKLOADS in workloads.py."""
    implementation: str | None = None
    """Attention backend; None: the fastest that serves the call."""
    mesh: MeshConfig = MeshConfig()  # noqa: RUF009  (frozen)
    """Sizes of the mesh; data and fsdp get a sequence each."""
    exchange: Exchange | None = None
    """Exchange of keys over mesh.context; None: the choice of `kernels.context`."""
    collectives: Collectives | None = None
    """Collectives of tokens over mesh.tensor; None: the kernels, where they serve."""
    loss_implementation: LossImplementation | None = None
    """Implementation of the loss; None: the kernel, where it serves."""
    seed: int | None = None
    """Seed of the tokens and documents, to compare meshes on the same data; None: a fresh one."""
    output: Path | None = None
    """File that the JSON lines are appended to, each as soon as it is measured."""

    def __post_init__(self):
        require_known(self.workloads, WORKLOADS, "workloads")


def measure_apart(name: str, arguments: ThroughputArguments) -> dict[str, Any] | int:
    """Measures a workload in a process of its own; returns the result, or that process's exit status."""
    names = ("implementation", "exchange", "collectives", "loss_implementation")
    fields = {name: getattr(arguments, name) for name in names} | {"mesh": asdict(arguments.mesh)}
    request = json.dumps({"workload": name, "seed": arguments.seed, "fields": fields})
    command = [sys.executable, "-m", "experiments.benchmarks.train_throughput.measure", request]
    # By default JAX takes three quarters of a GPU's memory. The longest sequences need more.
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"} | os.environ
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.returncode


def throughput_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each workload's result."""
    table = Table("workload", "attention", "tokens/s", "step", "MFU causal", "noncausal", "peak memory", "compile")
    for result in results:
        stages, peak = result["compile"], result["device_peak_bytes"]
        table.add_row(
            result["workload"],
            ", ".join(dict.fromkeys(result["attention"])),
            f"{result['tokens_per_s']:,.0f}",
            f"{result['step_s'] * 1e3:,.1f} ms",
            *("" if (mfu := result[name]) is None else f"{mfu:.1%}" for name in ("mfu_causal", "mfu_noncausal")),
            "" if peak is None else format_bytes(peak),
            f"{stages['trace_s'] + stages['lower_s'] + stages['compile_s']:.1f} s",
        )
    return table


def main(arguments: ThroughputArguments) -> int:
    """Measures, prints the table and returns the exit status."""
    if expected_platform() == "cpu":
        print(
            "error: train_throughput measures accelerators, but only CPUs are to be seen; "
            "install JAX for your accelerator, or set JAX_PLATFORMS if it is there",
            file=sys.stderr,
        )
        return 2
    results, status = [], 0
    for name in arguments.workloads:
        result = measure_apart(name, arguments)
        if isinstance(result, int):
            print(f"{name}: ended with status {result}", file=sys.stderr)
            status = max(status, 1 if result < 0 else result)
            continue
        results.append(result)
        append_rows(arguments.output, [result])
    if results:
        table_console().print(throughput_table(results))
    return status


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(read_arguments(ThroughputArguments)))
