"""Draws the pictures of the documentation: plots of measured results, and the block maps of masks.

    python -m experiments.benchmarks.plots

A plot's metadata holds a digest of the figures that it shows. A test compares it with the results.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.benchmarks.attention.speed_table import NEXT, REPOSITORY, case_title, latest_rows, read_rows
from experiments.benchmarks.command_line import read_arguments
from kernels import (
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    MultiHeadMask,
    PrefixMask,
    block_bounds,
    document_bounds,
    prefix_bounds,
    tree_bounds_of_parents,
    window_bounds,
)
from kernels.masks.drawing import Panel, save_panels, save_png
from trainer.evaluate.pictures import draw_retrieval
from trainer.evaluate.results import read_lines
from trainer.observers.plots import draw_losses
from trainer.terminal.streams import reader_may_leave

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = dict[str, Any]
Series = dict[str, dict[str, dict[str, list[Any]]]]
"""The curves of a plot: panel → curve → "x" and "y", lists of one length."""

OURS = "this project"
_CONTENDERS = {
    OURS: ("o", "#08519c"),
    "cuDNN": ("s", "#76a832"),
    "tokamax, Mosaic": ("D", "#d09a2c"),
    "FlashAttention-3": ("*", "#54278f"),
    "FlashAttention-2": ("^", "#8c6bb1"),
    "FlexAttention": ("v", "#b4442c"),
    "JAX's Pallas, Mosaic": ("P", "#777777"),
    "JAX's Pallas, Triton": ("X", "#777777"),
    "tokamax, Triton": ("d", "#777777"),
}
"""Marker and colour of each."""
_SOURCES = {
    "ours": (OURS, "#08519c"),
    "upstream_lazy": ("JAX's lazy masks", "#d09a2c"),
    "dense": ("a dense mask", "#b4442c"),
}
"""Name and colour of each source of tiles."""
_MASKS = {
    "causal": "CausalMask()",
    "window_4096": "CausalMask() & LocalMask(4095, 0)",
    "prefix_1024": "CausalMask() | PrefixMask(1024)",
    "two_masks": "heads in turn causal, LocalMask(4095, 0)",
}

_WIDTH = 9.0
"""Inches: at the 830 pixels that GitHub gives a README, letters of 10 points are 13 pixels high."""

SPEED_PLOTS = {
    "attention_speed.svg": "attention_hopper_h200.jsonl",
    "attention_speed_fa3.svg": "attention_fa3_h100.jsonl",
}
"""The rows that each plot of speeds shows."""

MASK_PICTURES = {
    "masks.png": (
        CausalMask(),
        CausalMask() & LocalMask(1023, 0),
        ChunkedCausalMask(1024),
        CausalMask() | PrefixMask(1024),
    ),
    "masks_composed.png": (
        LocalMask(511, 511),
        CausalMask() & (LocalMask(511, 0) | PrefixMask(256)),
        CausalMask() & ~LocalMask(1535, 0),
        ChunkedCausalMask(1024) | PrefixMask(256),
    ),
}
"""The masks of each picture, drawn at 4,096 tokens."""


@dataclass(frozen=True)
class PlotArguments:
    """Draws the pictures of the documentation from the measured results."""

    results: Path = REPOSITORY / "experiments/benchmarks/results"
    """The folder of the measured results."""
    output: Path = REPOSITORY / "docs/images"
    """The folder that the pictures are written to."""


def attention_speeds(results: Iterable[Result], backend: str = "mosaic_gpu") -> Series:
    """TFLOP/s of a backend and of the systems timed beside it, for each case, forward and backward.

    Raises:
      ValueError: no result of the backend has a time.
    """
    results = list(results)
    labels = {backend: OURS, "cudnn": "cuDNN", **NEXT}
    speeds: Series = {"forward": {}, "backward": {}}
    for name, label in labels.items():
        for key, result in latest_rows(results, backend).items():
            if key[1] in speeds and name in {backend, *result["speed_ratios"]}:
                curve = speeds[key[1]].setdefault(label, {"x": [], "y": []})
                curve["x"].append(round(latest_rows(results, name)[key]["tflops_per_s"], 1))
                curve["y"].append(case_title(result))
    return speeds


def trace_seconds(results: Iterable[Result]) -> Series:
    """Seconds of the first trace against the length, for each mask, of the sources of its tiles."""
    seconds: Series = {title: {} for title in _MASKS.values()}
    measured = [result for result in results if result["status"] == "measured"]
    for result in sorted(measured, key=lambda result: result["length"]):
        curve = seconds[_MASKS[result["mask"]]].setdefault(_SOURCES[result["source"]][0], {"x": [], "y": []})
        # A length that two sweeps measured is shown as the first of them has it.
        if result["length"] not in curve["x"]:
            curve["x"].append(result["length"])
            curve["y"].append(round(result["first_trace_s"], 4))
    return seconds


def digest(series: Series) -> str:
    """The digest of these figures that a plot has in its metadata."""
    return hashlib.sha256(json.dumps(series, sort_keys=True).encode()).hexdigest()


def draw_attention_speeds(series: Series, path: Path) -> None:
    """Draws `attention_speeds` into an SVG file: a line for each case, a panel for each direction."""

    def fill(axes: Axes, direction: str) -> None:
        for label, (marker, color) in _CONTENDERS.items():
            if label in series[direction]:
                curve = series[direction][label]
                indices = [titles.index(title) for title in curve["y"]]
                axes.plot(curve["x"], indices, marker, color=color, label=label, zorder=3 if label == OURS else 2)
        axes.set(title=direction, xlabel="TFLOP/s", xlim=(0, None), yticks=range(len(titles)))
        if direction == "forward":
            axes.set_yticklabels([re.sub("packed |log-normal ", "", title) for title in titles])
            axes.set_ylabel("batch × heads × tokens × head dim, mask")
        else:
            axes.set_yticklabels([])
        axes.grid(alpha=0.3)
        axes.invert_yaxis()

    titles = list(dict.fromkeys(series["forward"][OURS]["y"] + series["backward"][OURS]["y"]))
    _draw(series, path, fill, size=(_WIDTH, 5.5))


def draw_trace_seconds(series: Series, path: Path) -> None:
    """Draws `trace_seconds` into an SVG file: a panel for each mask, both axes logarithmic."""

    def fill(axes: Axes, mask: str) -> None:
        for label, color in _SOURCES.values():
            if label in series[mask]:
                curve = series[mask][label]
                axes.loglog(curve["x"], curve["y"], "o-", color=color, label=label)
        axes.set_title(mask, fontsize=10)
        axes.set(xlabel="tokens", ylim=(0.02, 300), xticks=[4096, 32768, 131072], xlim=(3000, 180_000))
        axes.set_xticklabels(["4,096", "32,768", "131,072"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set_ylabel("seconds to trace")

    _draw(series, path, fill, size=(_WIDTH, 6))


def _draw(series: Series, path: Path, fill: Callable[[Axes, str], None], size: tuple[float, float]) -> None:
    """Draws a panel for each entry of `series`, two in a line, and one legend under all."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the plots need matplotlib: pip install -e '.[plots]' in the clone") from error

    # Without the salt and the date the same figures give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "flax-longcontext"}):
        figure: Figure = Figure(figsize=size, layout="constrained")
        for axes, panel in zip(figure.subplots(len(series) // 2, 2).flat, series, strict=True):
            fill(axes, panel)
        curves = {
            label: handle
            for axes in figure.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(curves.values(), curves.keys(), loc="outside lower center", ncols=5, frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": digest(series)})


def panels_of_bounds(length: int) -> list[Panel]:
    """Masks as data: one of each constructor."""
    eighths = lambda *sizes: np.array(sizes) * (length // 8)  # noqa: E731
    images = np.repeat([0, 1, 0, 2, 0], eighths(1, 2, 2, 1, 2))
    tree = tree_bounds_of_parents(np.array([-1, 0, 1, 1, 0]), eighths(3, 1, 1, 1, 2), length)
    prefixes = prefix_bounds(eighths(2, 1), document_lengths=eighths(5, 3), length=length)
    return [
        Panel("CausalMask(), tree_bounds_of_parents", CausalMask(), tree),
        Panel("prefix_bounds", FullMask(), prefixes),
        Panel("block_bounds", FullMask(), block_bounds(images)),
        Panel(f"block_bounds, left={length // 8 - 1}", FullMask(), block_bounds(images, length // 8 - 1)),
        Panel(f"window_bounds, left={length // 4 - 1}", CausalMask(), window_bounds(length // 4 - 1, length)),
        Panel("CausalMask(), document_bounds", CausalMask(), document_bounds(images)),
    ]


def main(arguments: PlotArguments) -> None:
    """Draws every picture and prints where it lies."""
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, rows in SPEED_PLOTS.items():
        draw_attention_speeds(attention_speeds(read_rows(arguments.results / rows)), arguments.output / name)
    seconds = trace_seconds(read_rows(arguments.results / "compile_time_v5p.jsonl"))
    draw_trace_seconds(seconds, arguments.output / "trace_time.svg")
    record = json.loads((arguments.results / "gpt_32k_cpu.json").read_text())
    draw_losses(
        arguments.results / "gpt_32k_cpu_metrics.jsonl",
        arguments.output / "loss.png",
        title="make train on two CPU cores: 56 steps of 32,768 tokens",
        unigram_nats_per_token=record["data"]["unigram_nats_per_token"],
    )
    evaluations = read_lines(arguments.results / "long_context_h200_evaluations.jsonl")
    draw_retrieval(evaluations, max(line.step for line in evaluations), arguments.output / "retrieval_before_after.png")
    for name, masks in MASK_PICTURES.items():
        save_png(MultiHeadMask(masks), arguments.output / name, 4096)
    save_panels(panels_of_bounds(4096), arguments.output / "masks_as_data.png")
    print(*sorted(arguments.output.iterdir()), sep="\n")


if __name__ == "__main__":
    with reader_may_leave():
        main(read_arguments(PlotArguments))
