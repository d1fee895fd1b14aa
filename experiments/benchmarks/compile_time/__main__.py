"""Compile time against context length: dense masks, JAX's lazy ones, and ours.

    python -m experiments.benchmarks.compile_time --target v5p:2x2x1 --output compile_time.jsonl --plot compile_time.png

No TPU is needed: programs for one are compiled ahead of time by libtpu (the `tpu` extra). Without `--target` the
programs are for this machine's devices. Most of a sweep's time goes into the dense cases and those that run into
their limit; each case is printed as it is done, and Ctrl-C keeps what was measured.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.benchmarks.command_line import read_arguments
from experiments.benchmarks.compile_time.measure import CompileCase, Source, Subject, read_mask
from experiments.benchmarks.compile_time.report import compare_tiles, describe, draw, make_table, ratios
from experiments.benchmarks.compile_time.sweep import Limits, Row, check_target, sources_for, sweep
from trainer.errors import UserMistake
from trainer.terminal.streams import reader_may_leave


@dataclass(frozen=True)
class Arguments:
    """Measures trace, lower and compile seconds and resident memory against the length."""

    target: str | None = None
    """Topology to compile for, such as v5p:2x2x1 or h200:1; None: this machine's devices."""
    subjects: tuple[Subject, ...] = ("attention",)
    """attention: forward and backward of one call; train_step: the whole step of `config`."""
    sources: tuple[Source, ...] | None = None
    """Source of the kernel's mask; None: all three for attention on a TPU, else ours, the only one."""
    masks: tuple[str, ...] = ("causal",)
    """Names from MASKS in measure.py, or masks as Python writes them."""
    lengths: tuple[int, ...] = (4096, 8192, 16_384, 32_768, 65_536, 131_072)
    """Tokens in a sequence."""
    limit_s: float = 300.0
    """Seconds for a case; one that takes longer is stopped, and the longer ones of its series aren't tried."""
    limit_gigabytes: float = round(0.75e-9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 1)
    """Limit on a case's resident memory; by default three quarters of this machine's."""
    config: str = "experiments/gpt_32k.py"
    """Config of the training step; its layers all get the mask."""
    num_heads: int = 16
    num_kv_heads: int = 2
    head_dim: int = 256
    num_repeats: int = 7
    """Traces of which the median counts, where one takes less than a second."""
    output: Path | None = None
    """File that the JSON lines are appended to, each as soon as it is measured."""
    plot: Path | None = None
    """PNG file (the `plots` extra)."""

    def __post_init__(self):
        for mask in self.masks:
            read_mask(mask, self.num_heads)

    def series(self) -> Iterator[list[CompileCase]]:
        """Cases that differ in length only, together."""
        for subject in self.subjects:
            for mask in self.masks:
                for source in self.sources or sources_for(self.target, subject):
                    yield [
                        CompileCase(
                            subject=subject,
                            source=source,
                            mask=mask,
                            length=length,
                            target=self.target,
                            config=self.config,
                            num_heads=self.num_heads,
                            num_kv_heads=self.num_kv_heads,
                            head_dim=self.head_dim,
                            num_repeats=self.num_repeats,
                        )
                        for length in sorted(self.lengths)
                    ]


def main(arguments: Arguments) -> int:
    """Measures, writes, prints, draws; returns the exit status."""
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    rows: list[Row] = []
    status = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        check_target(arguments.target, arguments.subjects, arguments.sources or ())
        series = list(arguments.series())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=sum(map(len, series)))

            def on_start(case: CompileCase) -> None:
                progress.update(task, description=f"{case.subject}, {case.mask}, {case.source}, {case.length:,}")

            limits = Limits(arguments.limit_s, int(arguments.limit_gigabytes * 1e9))
            for row in sweep(series, limits, on_start):
                rows.append(row)
                if arguments.output is not None:
                    arguments.output.parent.mkdir(parents=True, exist_ok=True)
                    with arguments.output.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                progress.console.print(describe(row), markup=False, soft_wrap=True)
                progress.advance(task)
    except UserMistake as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        console.print("stopped; this is what was measured")
        status = 130
    if not rows:
        return status
    console.print(make_table(rows))
    for line in [*ratios(rows), *compare_tiles(rows)]:
        console.print(line, markup=False)
    if arguments.plot is not None:
        draw(rows, arguments.plot)
        console.print(f"drawn: {arguments.plot}", markup=False)
    return status


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(read_arguments(Arguments)))
