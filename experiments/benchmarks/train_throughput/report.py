"""The tables of a run, and the figures of other trainers that it is compared with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.benchmarks.train_throughput.breakdown import PARTS
from trainer.errors import UserMistake
from trainer.terminal.units import format_bytes


def read_baselines(path: Path) -> dict[str, float]:
    """The best tokens per second of each tag in a file of JSON lines that hold `tag` and `tok_s`.

    Raises:
      UserMistake: it can't be read, or has another form.
    """
    best: dict[str, float] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            run = json.loads(line)
            best[run["tag"]] = max(best.get(run["tag"], 0.0), float(run["tok_s"]))
    except OSError as error:
        raise UserMistake(f"--baseline {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        expected = '{"tag": "gpt2_124m_32k", "tok_s": 150000}'
        raise UserMistake(f"--baseline {path}: expected lines of JSON such as {expected}, got {error!r}") from error
    return best


def throughput_table(results: Sequence[Mapping[str, Any]], baselines: Mapping[str, float]) -> Table:
    """One line for each workload.

    Args:
      results: from `measure`.
      baselines: tokens per second to compare with, by workload.
    """
    table = Table(
        "workload", "attention", "tokens/s", "× baseline", "step", "MFU causal", "noncausal", "peak memory", "compile"
    )
    for result in results:
        baseline = baselines.get(result["workload"])
        stages = result["compile"]
        table.add_row(
            result["workload"],
            ", ".join(dict.fromkeys(result["attention"])),
            f"{result['tokens_per_s']:,.0f}",
            "" if baseline is None else f"{result['tokens_per_s'] / baseline:.3f}",
            f"{result['step_s'] * 1e3:,.1f} ms",
            *("" if (mfu := result[name]) is None else f"{mfu:.1%}" for name in ("mfu_causal", "mfu_noncausal")),
            "" if result["device_peak_bytes"] is None else format_bytes(result["device_peak_bytes"]),
            f"{stages['trace_s'] + stages['lower_s'] + stages['compile_s']:.1f} s",
        )
    return table


def breakdown_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """Milliseconds of a step by part, a column for each workload that was traced."""
    traced = [result for result in results if result["breakdown"] is not None]
    table = Table("ms of a step", *(result["workload"] for result in traced))
    for part in PARTS:
        table.add_row(part, *(f"{result['breakdown']['parts_ms'][part]:.2f}" for result in traced))
    table.add_row("idle", *(f"{result['breakdown']['idle_ms']:.2f}" for result in traced), end_section=True)
    table.add_row("traced step", *(f"{result['breakdown']['traced_step_s'] * 1e3:.2f}" for result in traced))
    return table
