"""The rows that were measured of attention's speed, as the cells of a table.

`python -m experiments.benchmarks.tables` writes the tables of docs/benchmarks.md from them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kernels import Mask, parse_mask

REPOSITORY = Path(__file__).parents[3]
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
_BOUNDS = {
    "tree": "a tree",
    "forest": "a forest",
    "images": "images",
    "images_window_1024": "images, window 1,024",
    "window_4096": "window 4,096 as bounds",
}
"""The bounds of `experiments.benchmarks.attention.bounds`, with what the mask leaves beside them."""


def speed_cells(
    rows: Iterable[dict[str, Any]], backend: str, *, beside_cudnn: bool = True
) -> tuple[list[str], list[list[str]]]:
    """The headings and the lines of a table: a backend's TFLOP/s in each case, and its speed over that of the others.

    Where only one system besides cuDNN was timed, a heading names it. Else each cell names the fastest one.

    Args:
      rows: of `python -m experiments.benchmarks.attention`.
      backend: the one that the others are compared with.
      beside_cudnn: with a column for cuDNN.

    Raises:
      ValueError: no row with a time of the backend.
    """
    latest = latest_rows(rows, backend)
    others = {name for row in latest.values() for name in NEXT if name in row["speed_ratios"]}
    peer = NEXT[others.pop()] if len(others) == 1 else None
    direction_headings = [*(["× cuDNN"] if beside_cudnn else []), f"× {peer or 'next'}"]

    def cells(row: dict[str, Any] | None) -> list[str]:
        if row is None:
            return ["–"] * (1 + len(direction_headings))
        ratios = row["speed_ratios"]
        closest = min((name for name in NEXT if name in ratios), key=ratios.__getitem__, default=None)
        cudnn = [f"{ratios['cudnn']:.2f}" if "cudnn" in ratios else "–"] if beside_cudnn else []
        name = f" ({NEXT[closest].partition(',')[0]})" if peer is None and closest is not None else ""
        return [f"{row['tflops_per_s']:.0f}", *cudnn, "–" if closest is None else f"{ratios[closest]:.2f}{name}"]

    lines = []
    for case in dict.fromkeys(case for case, _ in latest):
        forward, backward = (latest.get((case, direction)) for direction in ("forward", "backward"))
        lines.append([short_title(forward or backward or {}), *cells(forward), *cells(backward)])
    return ["shape", "forward", *direction_headings, "backward", *direction_headings], lines


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


def short_title(row: dict[str, Any]) -> str:
    """A row's title in few words: masks are causal where it names none, and documents are packed."""
    title = case_title({"document_length": None} | row).replace(" × ", "×").replace(", causal", "")
    return title.replace("packed documents log-normal", "documents").replace("packed documents", "documents")


def case_title(row: dict[str, Any]) -> str:
    """A row's shape, mask or bounds, sinks and documents; sizes of keys and values that differ stand behind a slash."""
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
    bounds = row.get("bounds")
    mask = _BOUNDS[bounds] if bounds else mask_title(parse_mask(row["mask"]))
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
