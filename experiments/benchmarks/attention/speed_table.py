"""Writes a table of attention speeds in docs/benchmarks.md from the rows that were measured.

    python -m experiments.benchmarks.attention.speed_table --suite hopper
    python -m experiments.benchmarks.attention.speed_table --suite fa3
    python -m experiments.benchmarks.attention.speed_table --suite fa3_h200
    python -m experiments.benchmarks.attention.speed_table --suite windows

What stands between the suite's two markers in the page is replaced; a test holds the page to what this command writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from experiments.benchmarks.command_line import read_arguments
from kernels import Mask, parse_mask
from trainer.process.broken_pipe import reader_may_leave

REPOSITORY = Path(__file__).parents[3]
RESULTS = {
    suite: REPOSITORY / "experiments/benchmarks/results" / name
    for suite, name in (
        ("hopper", "attention_hopper_h200.jsonl"),
        ("fa3", "attention_fa3_h100.jsonl"),
        ("fa3_h200", "attention_fa3_h200.jsonl"),
        ("windows", "attention_windows_h100.jsonl"),
        ("windows_h200", "attention_windows_h200.jsonl"),
    )
}
"""Suite → the rows that its table and its picture are made from."""
SHAPE, OF_DIRECTION, ROOFLINE = "batch × heads × length × head dim", ("× cuDNN", "× next"), "of roofline"
VERSIONS = {
    "jax": "JAX",
    "nvidia-cudnn-cu13": "cuDNN",
    "torch": "PyTorch",
    "tokamax": "tokamax",
    "dew-flash-attn-cu13": "dew-flash-attn",
}
NEXT = {
    "pallas_mosaic": "JAX's Pallas, Mosaic",
    "pallas_triton": "JAX's Pallas, Triton",
    "tokamax_mosaic": "tokamax, Mosaic",
    "tokamax_triton": "tokamax, Triton",
    "fa3": "FlashAttention-3",
    "torch_flash": "FlashAttention-2",
    "torch_flex": "FlexAttention",
}
"""The systems besides cuDNN; a table has the fastest of them in each row."""


class Markers(NamedTuple):
    """The lines of a page that a suite's table stands between."""

    begin: str
    end: str

    @staticmethod
    def of(suite: str) -> Markers:
        """A suite's."""
        command = f"python -m experiments.benchmarks.attention.speed_table --suite {suite}"
        return Markers(f"<!-- begin attention speeds: {command} -->", f"<!-- end attention speeds: {suite} -->")


@dataclass(frozen=True)
class SpeedTableArguments:
    """Writes a table of attention speeds in docs/benchmarks.md."""

    suite: Literal["hopper", "fa3", "fa3_h200", "windows", "windows_h200"] = "hopper"
    """Whose table."""
    results: Path | None = None
    """JSON lines of `python -m experiments.benchmarks.attention`, of which the later one counts where a measurement was
    made twice; the suite's kept ones, if not given."""
    page: Path = REPOSITORY / "docs/benchmarks.md"
    """The page that has the two markers."""
    backend: str = "mosaic_gpu"
    """The backend whose TFLOP/s and ratios the table has."""


def make_table(rows: Iterable[dict[str, Any]], backend: str) -> str:
    """The table in Markdown, under a line with device, versions and dates.

    Raises:
      ValueError: no row with a time of the backend.
    """
    latest = latest_rows(rows, backend)
    circumstances = {
        ", ".join(
            [row["device"], *(f"{label} {row[name]}" for name, label in VERSIONS.items() if name in row), row["date"]]
        )
        for row in latest.values()
    }
    of_direction = (*OF_DIRECTION, *([ROOFLINE] if all(row.get("roofline") for row in latest.values()) else []))
    headings = (SHAPE, "forward", *of_direction, "backward", *of_direction)
    lines = ["; ".join(sorted(circumstances)) + ":", "", _line(headings), _line("---" for _ in headings)]
    for case in dict.fromkeys(case for case, _ in latest):
        directions = [latest.get((case, direction)) for direction in ("forward", "backward")]
        title = case_title(next(row for row in directions if row is not None))
        lines.append(_line([title, *(cell for row in directions for cell in _speeds(row, ROOFLINE in headings))]))
    return "\n".join(lines)


def replace_block(markdown: str, table: str, markers: Markers) -> str:
    """A page with another table between two markers.

    Raises:
      ValueError: not exactly one marker of each kind, the end behind the beginning.
    """
    before, _, rest = markdown.partition(markers.begin)
    _, end, after = rest.partition(markers.end)
    if not end or markers.begin in rest or markers.end in after:
        raise ValueError(
            f"expected one {markers.begin!r} and one {markers.end!r} behind it; put them around the table's place"
        )
    return f"{before}{markers.begin}\n{table}\n{markers.end}{after}"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def latest_rows(rows: Iterable[dict[str, Any]], backend: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of a backend that have a time, by case and direction. Of a measurement made twice, the later one counts.

    Raises:
      ValueError: there is none.
    """
    latest = {(row["case"], row["direction"]): row for row in rows if row["backend"] == backend and "seconds" in row}
    if not latest:
        raise ValueError(f"no row of backend={backend!r} with a time; measure it with experiments.benchmarks.attention")
    return latest


def _line(columns: Iterable[str]) -> str:
    return f"| {' | '.join(columns)} |"


def _speeds(row: dict[str, Any] | None, has_roofline: bool) -> tuple[str, ...]:
    """TFLOP/s, how many times as fast as cuDNN and as the fastest of the others, and the share of the roofline."""
    if row is None:
        return ("–",) * (3 + has_roofline)
    ratios = row["speed_ratios"]
    others = {name: ratios[name] for name in NEXT if name in ratios}
    closest = min(others, key=others.__getitem__, default=None)
    return (
        f"{row['tflops_per_s']:.0f}",
        f"{ratios['cudnn']:.2f}" if "cudnn" in ratios else "–",
        "–" if closest is None else f"{others[closest]:.2f} ({NEXT[closest]})",
        *([f"{100 * max(row['roofline'].values()) / row['seconds']:.0f} %"] if has_roofline else []),
    )


def case_title(row: dict[str, Any]) -> str:
    """A row's shape, mask, sinks and documents: what its keys and values have apart stands behind a slash."""
    # Rows of before these fields were there have none of the three.
    kv_length, value_dim, has_sinks = (row.get(name) for name in ("kv_length", "value_dim", "has_sinks"))
    heads = f"{row['num_heads']}" + ("" if row["num_kv_heads"] == row["num_heads"] else f"/{row['num_kv_heads']}")
    length = f"{row['length']:,}" + (f"/{kv_length:,}" if kv_length else "")
    head_dim = f"{row['head_dim']}" + (f"/{value_dim}" if value_dim else "")
    sinks = ", sinks" if has_sinks else ""
    documents = ""
    if row["document_length"] is not None:
        around = "log-normal around" if row["document_spread"] else "of"
        documents = f", packed documents {around} {row['document_length']:,}"
    mask = mask_title(parse_mask(row["mask"]))
    return f"{row['batch']} × {heads} × {length} × {head_dim}, {mask}{sinks}{documents}"


def mask_title(mask: Mask) -> str:
    """A mask as the table has it."""
    match mask.window:
        case (None, None):
            return "no mask"
        case (None, 0):
            return "causal"
        case (int(left), 0):
            return f"window {left + 1:,}"
    return repr(mask)


def main(arguments: SpeedTableArguments) -> None:
    """Rewrites the block."""
    table = make_table(read_rows(arguments.results or RESULTS[arguments.suite]), arguments.backend)
    page = replace_block(arguments.page.read_text(encoding="utf-8"), table, Markers.of(arguments.suite))
    arguments.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    with reader_may_leave():
        main(read_arguments(SpeedTableArguments))
