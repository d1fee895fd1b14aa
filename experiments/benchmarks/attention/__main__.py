"""Times attention: named cases × backends × direction, interleaved in one process.

    python -m experiments.benchmarks.attention --cases window_1024 --backends blockwise xla
    python -m experiments.benchmarks.attention --suite hopper --backends cudnn mosaic_gpu --baseline cudnn

A backend's name is one of the backends' table; `xla` is `jax.nn.dot_product_attention(implementation="xla")`, which
builds the T×T logits, and `torch_flex` is PyTorch's FlexAttention. Where the logits don't fit into
`--dense-gigabytes`, `xla` is timed at the longest power of two that does, and its time is scaled by the square of the
lengths' ratio; the row says so. A backward's time is forward and backward together, less forward, of the same round.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import jax
import tyro
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.attention.cases import CASES, Case, Direction, describe, known_cases, make_problem
from experiments.benchmarks.attention.contenders import Contender, compile_contender

SUITES = {"hopper": tuple(name for name in CASES if "x" in name)}
DIRECTIONS: tuple[Direction, ...] = ("forward", "forward_backward")


@dataclass(frozen=True)
class Arguments:
    """Times attention backends side by side."""

    cases: tuple[str, ...] = ("window_1024",)
    """Names from CASES."""
    suite: Literal["hopper"] | None = None
    """A list of cases, in place of `--cases`: `hopper`, those that are compared with other systems on an H200."""
    backends: tuple[str, ...] = ("blockwise", "xla")
    """Names of the backends' table, `xla` and `torch_flex`."""
    baseline: str | None = None
    """The backend that the others are compared with; the last one if not given."""
    num_rounds: int = 5
    """Rounds in which each backend is timed once; the median counts."""
    sample_ms: float = 0.0
    """Least length of one timing, in ms: as many runs in a row as that takes, for programs that are over in no time."""
    dense_gigabytes: float = 6.0
    """Memory that `xla` may take, by XLA's own estimate."""
    output: Path | None = None
    """File that the JSON lines are appended to."""

    @property
    def chosen_cases(self) -> dict[str, Case]:
        """The cases to time."""
        return known_cases(self.cases if self.suite is None else SUITES[self.suite])


def measure(name: str, case: Case, arguments: Arguments) -> list[dict[str, Any]]:
    """The rows of one case: backend × (forward, backward, both)."""
    problem = make_problem(case)
    pairs: dict[str, tuple[Contender, Contender]] = {}
    rows: list[dict[str, Any]] = []
    common = {"case": name, **describe(case), "num_pairs": problem.num_pairs, **_where()}
    for backend in arguments.backends:
        try:
            forward, both = (
                compile_contender(problem, backend, direction, arguments.dense_gigabytes) for direction in DIRECTIONS
            )
        except (ValueError, ImportError) as refusal:
            rows.append({**common, "backend": backend, "refused": str(refusal).split("\n")[0]})
            continue
        pairs[backend] = (forward, both)
    contenders = [contender for pair in pairs.values() for contender in pair]
    for contender in contenders:
        contender.time(1)  # A first run also loads the program.
    num_runs = [1 + int(arguments.sample_ms / 1e3 / max(contender.time(1), 1e-6)) for contender in contenders]
    for _ in range(arguments.num_rounds):
        for contender, runs in zip(contenders, num_runs, strict=True):
            contender.seconds.append(contender.time(runs))

    baseline = arguments.backends[-1] if arguments.baseline is None else arguments.baseline
    for direction in ("forward", "backward", "forward_backward"):
        seconds = {backend: _seconds(case, pair, direction) for backend, pair in pairs.items()}
        for backend, (forward, both) in pairs.items():
            median = statistics.median(seconds[backend])
            row = {
                **common,
                "backend": backend,
                "direction": direction,
                "seconds": median,
                "fastest_s": min(seconds[backend]),
                "slowest_s": max(seconds[backend]),
                "measured_at_length": forward.length,
                "tflops_per_s": problem.flops(direction) / median / 1e12,
                "compile_s": forward.compile_s if direction == "forward" else both.compile_s,
                "temporary_bytes": forward.temporary_bytes if direction == "forward" else both.temporary_bytes,
            }
            if baseline in seconds:
                ratios = [theirs / ours for theirs, ours in zip(seconds[baseline], seconds[backend], strict=True)]
                row |= {"baseline": baseline, "speed_ratio": statistics.median(ratios)}
            rows.append(row)
    return rows


def _seconds(case: Case, pair: tuple[Contender, Contender], direction: str) -> list[float]:
    """A contender's times in each round, brought to the case's length."""
    forward, both = pair
    scale = (case.length / forward.length) ** 2
    if direction == "forward":
        return [s * scale for s in forward.seconds]
    if direction == "forward_backward":
        return [s * scale for s in both.seconds]
    return [(b - f) * scale for f, b in zip(forward.seconds, both.seconds, strict=True)]


def _where() -> dict[str, str]:
    """Device, versions and date."""
    versions = {}
    for distribution in ("jax", "jaxlib", "nvidia-cudnn-cu13", "torch"):
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


def main(arguments: Arguments) -> None:
    """Measures, prints the table and appends the rows."""
    table = Table("case", "direction", "backend", "ms", "TFLOP/s", "× baseline", "temporaries", "compile")
    for name, case in arguments.chosen_cases.items():
        rows = measure(name, case, arguments)
        for row in rows:
            if "refused" in row:
                table.add_row(name, "", row["backend"], row["refused"])
                continue
            scaled = "" if row["measured_at_length"] == case.length else f" (from {row['measured_at_length']:,})"
            memory = row["temporary_bytes"]
            table.add_row(
                name,
                row["direction"],
                row["backend"],
                f"{row['seconds'] * 1e3:,.3f}{scaled}",
                f"{row['tflops_per_s']:,.1f}",
                f"{row['speed_ratio']:.3f}" if "speed_ratio" in row else "",
                "" if memory is None else f"{memory / 1e6:,.0f} MB",
                f"{row['compile_s']:.1f} s",
            )
        if arguments.output is not None:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            with arguments.output.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
