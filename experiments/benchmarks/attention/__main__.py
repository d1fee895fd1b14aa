"""Measures attention backends side by side: speed, or error against float64.

    python -m experiments.benchmarks.attention --cases window_1024 --backends blockwise xla
    python -m experiments.benchmarks.attention --suite hopper --output rows.jsonl
    python -m experiments.benchmarks.attention --suite hopper --backends mosaic_gpu cudnn --check
    python -m experiments.benchmarks.attention --suite fa3 --output rows.jsonl

A backend's name is one of the backends' table, or with a form of its backward behind it (`triton_split`), or of another
attention, where that is installed: `xla`, which is `jax.nn.dot_product_attention(implementation="xla")` and builds the
T×T logits; JAX's own `pallas_mosaic` and `pallas_triton`; `tokamax_mosaic` and `tokamax_triton`; `fa3`,
FlashAttention-3; PyTorch's `torch_flash`, `torch_cudnn` (cuDNN, called without JAX) and `torch_flex`. What can't serve
a case has a row that says why. Where the logits don't fit into `--dense-gigabytes`, `xla` is timed at the longest power
of two that does, and its time is scaled by the square of the lengths' ratio; the row says so. A backward's time is
forward and backward together, less forward, of the same round.

Calls of less than `--program-ms` come several to a program, as they do in a training step, where the host doesn't wait
between layers: the row's `calls_per_program`, the same for all backends. PyTorch's are started one by one all the same.
Times are of one call; so are temporaries and compile seconds.

PyTorch and JAX share a GPU's memory: set `XLA_PYTHON_CLIENT_PREALLOCATE=false`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from experiments.benchmarks.attention.accuracy import measure_errors, quantities
from experiments.benchmarks.attention.cases import BOUNDS, CASES, FA3, HOPPER, TRITON, WINDOWS, Case
from experiments.benchmarks.attention.contenders import FORMS
from experiments.benchmarks.attention.measure import measure_speed
from experiments.benchmarks.attention.peers import PEERS
from experiments.benchmarks.attention.torch_peers import TORCH_PEERS
from experiments.benchmarks.command_line import append_rows, read_arguments, require_known, table_console
from kernels.backends import BACKENDS
from trainer.terminal.streams import reader_may_leave


@dataclass(frozen=True)
class Suite:
    """Cases and backends that belong together."""

    cases: tuple[str, ...]
    backends: tuple[str, ...]
    baseline: str


SUITES = {
    "hopper": Suite(tuple(HOPPER), ("mosaic_gpu", "cudnn", *PEERS, *TORCH_PEERS), "cudnn"),
    "cudnn": Suite(
        ("1x16x32768x128", "1x64/8x32768x128", "4x24x4096x64"), ("mosaic_gpu", "cudnn", "torch_cudnn"), "cudnn"
    ),
    "fa3": Suite(tuple(FA3), ("mosaic_gpu", "fa3", "cudnn"), "fa3"),
    "windows": Suite(tuple(WINDOWS), ("mosaic_gpu", "fa3", "cudnn"), "fa3"),
    "bounds": Suite(tuple(BOUNDS), ("mosaic_gpu", "torch_flex"), "torch_flex"),
    "triton": Suite(
        tuple(TRITON), ("triton_split", "triton_fused", "pallas_triton", "tokamax_triton", "cudnn"), "pallas_triton"
    ),
}


@dataclass(frozen=True)
class AttentionArguments:
    """Measures attention backends side by side."""

    cases: tuple[str, ...] | None = None
    """Names from CASES; the suite's, or `window_1024`, if not given."""
    suite: Literal["hopper", "cudnn", "fa3", "windows", "bounds", "triton"] | None = None
    """Cases and backends in one word: `hopper`, what is compared with other systems on an H200; `cudnn`, cuDNN through
    JAX and called directly; `fa3`, FlashAttention-3 and cuDNN on Hopper GPUs; `windows`, narrow windows beside these
    two; `bounds`, masks as data beside FlexAttention; `triton`, both forms of the Triton kernels and others' Triton
    kernels."""
    backends: tuple[str, ...] | None = None
    """Names of the backends' table and of other attentions; the suite's, or `blockwise` and `xla`, if not given."""
    baseline: str | None = None
    """The backend that the others are compared with; the suite's, or the last one, if not given."""
    check: bool = False
    """Instead of the speed, measure the errors of output and gradients against float64."""
    check_length: int | None = None
    """Tokens at which errors are measured, where a case is longer; a case's own length if not given. The truth takes
    12·T²·H operations in float64 for each query head, masked or not."""
    num_rounds: int = 5
    """Rounds in which each backend is timed once; the median counts."""
    sample_ms: float = 200.0
    """Least length of one timing, in ms: as many runs in a row as that takes. Long, so that a GPU comes to its
    power limit, as in training: a short one depends on what ran before it."""
    rest_ms: float = 0.0
    """Rest of the device before each timing, in ms. `--sample-ms 15 --rest-ms 350` measures bursts, which a cool GPU
    runs at its highest clock, as published figures often do."""
    program_ms: float = 1.0
    """Least length of one program, in ms: it makes as many calls, up to 16, each on inputs of its own, since a call
    that is over before the host has started the next one would be timed as the host."""
    dense_gigabytes: float = 6.0
    """Memory that the logits, weights and their gradients of `xla` may take."""
    output: Path | None = None
    """File that the JSON lines are appended to, each case's as soon as it is measured."""

    def __post_init__(self):
        require_known(self.chosen.cases, CASES, "cases")
        known = (*(backend.name for backend in BACKENDS), *FORMS, *PEERS, *TORCH_PEERS)
        require_known(self.chosen.backends, known, "backends")
        if self.chosen.baseline not in self.chosen.backends:
            raise ValueError(f"baseline={self.baseline!r} is none of the backends {', '.join(self.chosen.backends)}")

    @property
    def chosen(self) -> Suite:
        """The cases and backends to measure."""
        usual = SUITES[self.suite] if self.suite else Suite(("window_1024",), ("blockwise", "xla"), "xla")
        backends = usual.backends if self.backends is None else self.backends
        usual_baseline = usual.baseline if usual.baseline in backends else backends[-1]
        return Suite(
            usual.cases if self.cases is None else self.cases,
            backends,
            usual_baseline if self.baseline is None else self.baseline,
        )


def measure(name: str, case: Case, arguments: AttentionArguments) -> list[dict[str, Any]]:
    """The rows of one case."""
    chosen = arguments.chosen
    if arguments.check:
        return measure_errors(name, case, chosen.backends, baseline=chosen.baseline, length=arguments.check_length)
    return measure_speed(
        name,
        case,
        chosen.backends,
        num_rounds=arguments.num_rounds,
        sample_ms=arguments.sample_ms,
        program_ms=arguments.program_ms,
        rest_ms=arguments.rest_ms,
        dense_gigabytes=arguments.dense_gigabytes,
    )


def headings(case: Case, arguments: AttentionArguments) -> tuple[str, ...]:
    """Headings of the printed table of a case."""
    baseline = arguments.chosen.baseline
    if arguments.check:
        return ("backend", *(f"{quantity}: rms (× {baseline}), largest" for quantity in quantities(case)))
    return ("backend", "direction", "ms", "TFLOP/s", f"× {baseline}", "temporaries", "compile")


def cells(row: dict[str, Any], baseline: str) -> Iterator[str]:
    """One row of a printed table."""
    yield row["backend"]
    if "errors" in row:
        for quantity, error in row["errors"].items():
            ratio = f" ({row['error_ratios'][quantity]:.2f})" if quantity in row["error_ratios"] else ""
            yield f"{error['rms']:.1e}{ratio}, {error['largest']:.1e}"
    else:
        scaled = "" if row["measured_at_length"] == row["length"] else f" (from {row['measured_at_length']:,})"
        memory = row["temporary_bytes"]
        yield from (row["direction"], f"{row['seconds'] * 1e3:,.3f}{scaled}", f"{row['tflops_per_s']:,.1f}")
        yield f"{row['speed_ratios'][baseline]:.3f}" if baseline in row["speed_ratios"] else ""
        yield "" if memory is None else f"{memory / 1e6:,.0f} MB"
        yield f"{row['compile_s']:.1f} s"


def main(arguments: AttentionArguments) -> int:
    """Measures case after case: appends the rows and prints a table of them, and under it what was refused.

    Returns:
      The exit status: 1 if nothing was measured.
    """
    num_measured = 0
    console = table_console()
    for name in arguments.chosen.cases:
        case = CASES[name]
        rows = measure(name, case, arguments)
        append_rows(arguments.output, rows)
        table = Table(*headings(case, arguments), title=name, title_justify="left")
        for row in rows:
            if row.keys() & {"seconds", "errors"}:
                table.add_row(*cells(row, arguments.chosen.baseline))
        num_measured += table.row_count
        console.print(table)
        for row in rows:
            if "refused" in row:
                refused = " ".join([row["backend"], *([row["direction"]] if "direction" in row else ())])
                console.print(f"{refused}: {row['refused']}", markup=False, soft_wrap=True)
    return 0 if num_measured else 1


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(read_arguments(AttentionArguments)))
