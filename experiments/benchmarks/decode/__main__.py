"""Times decoding: parallel sequences × prompt length × form of the cache, interleaved in one process.

    python -m experiments.benchmarks.decode --sequences 1 8 --prompts 0 8192

The forms: `unified` is one slab of slots for all sequences and skips the blocks in which a sequence sees nothing.
`unified_no_skipping` is the same with a summary that excludes no block. `per_sequence` has a slab for each sequence.
`xla_unified` and `xla_per_sequence` run `jax.nn.dot_product_attention(implementation="xla")` over every slot. A step
writes one token of every sequence and attends to it, in all layers. The grid of workloads follows llama.cpp's batched
benchmark.

The table compares the bytes that a step must read (the keys and values that its sequences see) with the device's copy
bandwidth. That is measured in the same process: bytes read plus bytes written per second, by JAX or, where it is
installed, by PyTorch, whichever is faster.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.command_line import read_arguments
from experiments.benchmarks.decode.bandwidth import copy_bandwidths
from experiments.benchmarks.decode.forms import FORMS, compile_form
from experiments.benchmarks.decode.workloads import DecodeWorkload
from kernels.backends import find_backend
from trainer.hardware import installed_versions
from trainer.terminal.streams import reader_may_leave


@dataclass(frozen=True)
class DecodeArguments:
    """Times decoding over each form of cache."""

    sequences: tuple[int, ...] = (1, 2, 3, 8, 32)
    """Sequences that are decoded in parallel."""
    prompts: tuple[int, ...] = (0, 512, 4096, 8192)
    """Tokens that each sequence holds before the first step."""
    generated: int = 32
    """Tokens that each sequence gains, one per step."""
    windows: tuple[int, ...] = (0,)
    """Tokens that a token sees, itself included; 0: itself and all before it."""
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 12
    head_dim: int = 64
    forms: tuple[str, ...] = tuple(FORMS)
    """Forms of cache and attention."""
    baseline: str = "per_sequence"
    """The form that the others' speed is compared with."""
    implementation: str | None = None
    """Implementation of `kernels.decode_attention`."""
    num_rounds: int = 7
    """Rounds in which each form is timed once; the median counts."""
    copy_gigabytes: float = 4.0
    """Size of the array whose copying gives the bandwidth."""
    output: Path | None = None
    """File that the JSON lines are appended to."""

    def __post_init__(self):
        if unknown := set(self.forms) - set(FORMS):
            raise ValueError(f"unknown forms {sorted(unknown)}; expected some of {', '.join(FORMS)}")
        for name in ("sequences", "generated", "num_layers", "num_heads", "num_kv_heads", "head_dim", "num_rounds"):
            if np.min(getattr(self, name)) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.implementation is not None:
            find_backend(self.implementation, "decoding", "implementation")

    @property
    def workloads(self) -> list[DecodeWorkload]:
        """Every combination to time."""
        return [
            DecodeWorkload(
                num_sequences=num_sequences,
                prompt=prompt,
                num_generated=self.generated,
                window=window or None,
                num_layers=self.num_layers,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
            )
            for prompt in self.prompts
            for window in self.windows
            for num_sequences in self.sequences
        ]


def measure(work: DecodeWorkload, arguments: DecodeArguments) -> list[dict[str, Any]]:
    """Times every form on one workload; returns a result for each form, of JSON's types."""
    with ThreadPoolExecutor() as pool:
        forms = list(pool.map(lambda name: compile_form(name, work, arguments.implementation), arguments.forms))
    for form in forms:
        form.time()  # A first run also loads the program.
    for _ in range(arguments.num_rounds):
        for form in forms:
            form.seconds.append(form.time())
    seconds = {form.name: form.seconds for form in forms}
    results = []
    for form in forms:
        median = statistics.median(form.seconds)
        result = {
            **work.describe(),
            "form": form.name,
            "seconds_per_step": median,
            "fastest_s": min(form.seconds),
            "slowest_s": max(form.seconds),
            "tokens_per_s": work.num_sequences / median,
            "bytes_per_step": work.bytes_per_step,
            "bytes_per_s": work.bytes_per_step / median,
        }
        if arguments.baseline in seconds:
            rounds = zip(seconds[arguments.baseline], form.seconds, strict=True)
            ratio = statistics.median(theirs / ours for theirs, ours in rounds)
            result |= {"baseline": arguments.baseline, "speed_ratio": ratio}
        results.append(result)
    return results


def main(arguments: DecodeArguments) -> None:
    """Measures, prints the table and appends the results."""
    bandwidths = copy_bandwidths(arguments.copy_gigabytes, arguments.num_rounds)
    bandwidth = max(bandwidths.values())
    common = {
        "copy_bytes_per_s": bandwidths,
        "implementation": arguments.implementation,
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        **installed_versions(("jax", "jaxlib", "jax-triton", "triton")),
        "date": datetime.date.today().isoformat(),
    }
    table = Table("sequences", "prompt", "window", "form", "µs/step", "tokens/s", "× baseline", "of copying")
    for work in arguments.workloads:
        results = [{**result, **common} for result in measure(work, arguments)]
        for result in results:
            table.add_row(
                str(work.num_sequences),
                f"{work.prompt:,}",
                "" if work.window is None else f"{work.window:,}",
                result["form"],
                f"{result['seconds_per_step'] * 1e6:,.0f}",
                f"{result['tokens_per_s']:,.0f}",
                f"{result['speed_ratio']:.2f}" if "speed_ratio" in result else "",
                f"{result['bytes_per_s'] / bandwidth:.0%}",
            )
        if arguments.output is not None:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            with arguments.output.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(result) + "\n" for result in results)
    console = Console()
    (console if console.is_terminal else Console(width=130)).print(table)
    console.print("copying moves " + ", ".join(f"{x / 1e9:,.0f} GB/s ({name})" for name, x in bandwidths.items()))


if __name__ == "__main__":
    with reader_may_leave():
        main(read_arguments(DecodeArguments))
