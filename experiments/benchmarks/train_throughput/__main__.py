"""Measures whole training steps: tokens per second, MFU, memory, compile seconds, and where the time goes.

    python -m experiments.benchmarks.train_throughput --workloads 124m_32k 1b_32k --output train_throughput.jsonl

Each workload runs in a process of its own, so that its peak memory is its own. Exit status: 0; 1 if a workload failed;
2 for a mistake in the command, or without an accelerator.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.benchmarks.command_line import read_arguments
from experiments.benchmarks.train_throughput.report import breakdown_table, read_baselines, throughput_table
from experiments.benchmarks.train_throughput.workloads import WORKLOADS
from kernels.collectives import Collectives
from kernels.context import Exchange
from trainer.config import LossImplementation, MeshConfig
from trainer.errors import UserMistake
from trainer.hardware import expected_platform
from trainer.terminal.streams import reader_may_leave


@dataclass(frozen=True)
class ThroughputArguments:
    """Measures training steps on an accelerator, one sequence of random tokens to a step."""

    workloads: tuple[str, ...] = ("124m_32k",)
    """Names from WORKLOADS in workloads.py."""
    implementation: str | None = None
    """Attention backend; None: the fastest that serves the call."""
    remat: str | None = None
    """Activations that the backward pass recomputes; None: as the workload says."""
    scan_layers: bool | None = None
    """One loop over the layers; None: as the experiment says."""
    chunk_size: int | None = None
    """Tokens of which logits exist at one time; None: as the experiment says."""
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
    trace: bool = True
    """Trace some steps more, and say where the time goes."""
    baseline: Path | None = None
    """JSON lines with `tag` and `tok_s` of nanoGPT's runs, to print ratios to; the best of a tag counts."""
    baseline_tokens_per_s: float | None = None
    """The same, one number for all workloads."""
    output: Path | None = None
    """File that the JSON lines are appended to, each as soon as it is measured."""

    def check(self) -> None:
        """Raises UserMistake for what can't be measured."""
        if unknown := sorted(set(self.workloads) - set(WORKLOADS)):
            raise UserMistake(f"unknown workloads {', '.join(unknown)}; expected some of {', '.join(WORKLOADS)}")
        if expected_platform() == "cpu":
            raise UserMistake(
                "train_throughput measures accelerators, but only CPUs are to be seen; "
                "install JAX for your accelerator, or set JAX_PLATFORMS if it is there"
            )

    def baselines(self) -> dict[str, float]:
        """Tokens per second to compare with, by workload."""
        if self.baseline_tokens_per_s is not None:
            return dict.fromkeys(self.workloads, self.baseline_tokens_per_s)
        peers = {} if self.baseline is None else read_baselines(self.baseline)
        return {name: peers[tag] for name in self.workloads if (tag := WORKLOADS[name].peer) in peers}


def measure_apart(name: str, arguments: ThroughputArguments) -> dict[str, Any] | int:
    """Measures a workload in a process of its own; returns the result, or that process's exit status."""
    names = ("implementation", "remat", "scan_layers", "chunk_size", "exchange", "collectives", "loss_implementation")
    fields = {name: getattr(arguments, name) for name in names} | {"mesh": asdict(arguments.mesh)}
    request = json.dumps({"workload": name, "trace": arguments.trace, "seed": arguments.seed, "fields": fields})
    command = [sys.executable, "-m", "experiments.benchmarks.train_throughput.measure", request]
    # By default JAX takes three quarters of a GPU's memory. The longest sequences need more.
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"} | os.environ
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.returncode


def main(command_line: Sequence[str]) -> int:
    """Measures, prints the tables and returns the exit status."""
    arguments = read_arguments(ThroughputArguments, command_line)
    try:
        arguments.check()
        baselines = arguments.baselines()
    except UserMistake as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    results, status = [], 0
    for name in arguments.workloads:
        result = measure_apart(name, arguments)
        if isinstance(result, int):
            print(f"{name}: ended with status {result}", file=sys.stderr)
            status = max(status, 1 if result < 0 else result)
            continue
        results.append(result)
        if arguments.output is not None:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            with arguments.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    if any(result["breakdown"] for result in results):
        console.print(breakdown_table(results))
    if results:
        console.print(throughput_table(results, baselines))
    return status


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(sys.argv[1:]))
