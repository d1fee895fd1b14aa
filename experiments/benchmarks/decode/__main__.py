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
import importlib.util
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from experiments.benchmarks.command_line import append_rows, read_arguments, require_known, table_console
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
    implementation: str | None = None
    """Implementation of `kernels.decode_attention`."""
    num_rounds: int = 7
    """Rounds in which each form is timed once; the median counts."""
    copy_gigabytes: float = 4.0
    """Size of the array whose copying gives the bandwidth."""
    output: Path | None = None
    """File that the JSON lines are appended to."""

    def __post_init__(self):
        require_known(self.forms, FORMS, "forms")
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
    forms = [compile_form(name, work, arguments.implementation) for name in arguments.forms]
    for form in forms:
        form.time()  # A first run also loads the program.
    for _ in range(arguments.num_rounds):
        for form in forms:
            form.seconds.append(form.time())
    return [
        {
            **work.describe(),
            "form": form.name,
            "seconds_per_step": (median := statistics.median(form.seconds)),
            "fastest_s": min(form.seconds),
            "slowest_s": max(form.seconds),
            "tokens_per_s": work.num_sequences / median,
            "bytes_per_step": work.bytes_per_step,
            "bytes_per_s": work.bytes_per_step / median,
        }
        for form in forms
    ]


def copy_bandwidths(gigabytes: float, num_rounds: int) -> dict[str, float]:
    """Bytes read and written per second when an array is copied, the median of some rounds.

    Args:
      gigabytes: size of the array.
      num_rounds: copies that are timed.

    Returns:
      A figure for JAX, and one for PyTorch if it is installed and there is a GPU, where XLA's copy isn't the fastest.
    """
    size = int(gigabytes * 1e9) // 4
    array, copy = jnp.ones(size, jnp.float32), jax.jit(jnp.copy)
    seconds = {"jax": _median_seconds(lambda: jax.block_until_ready(copy(array)), num_rounds)}
    if jax.default_backend() == "gpu" and importlib.util.find_spec("torch") is not None:
        import torch

        source = torch.ones(size, device="cuda")
        target = torch.empty_like(source)

        def copy_by_torch():
            target.copy_(source)
            torch.cuda.synchronize()

        seconds["torch"] = _median_seconds(copy_by_torch, num_rounds)
        del source, target
        torch.cuda.empty_cache()
    return {name: 2 * 4 * size / s for name, s in seconds.items()}


def _median_seconds(run: Callable[[], object], num_rounds: int) -> float:
    run()
    seconds = []
    for _ in range(num_rounds):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


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
    table = Table("sequences", "prompt", "window", "form", "µs/step", "tokens/s", "of copying")
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
                f"{result['bytes_per_s'] / bandwidth:.0%}",
            )
        append_rows(arguments.output, results)
    console = table_console()
    console.print(table)
    console.print("copying moves " + ", ".join(f"{x / 1e9:,.0f} GB/s ({name})" for name, x in bandwidths.items()))


if __name__ == "__main__":
    with reader_may_leave():
        main(read_arguments(DecodeArguments))
