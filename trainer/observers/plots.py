"""Draws the losses and the mixture of a run as pictures, for somebody without TensorBoard at hand."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config import RunPhase
from trainer.files.atomic import write_atomically
from trainer.observers.metrics import read_entries
from trainer.observers.observer import MIXTURE, VALIDATION_LOSS

_SIZE_INCHES = (8.0, 4.5)
_DOTS_PER_INCH = 120


def draw_losses(
    metrics: Path,
    picture: Path,
    *,
    title: str,
    unigram_nats_per_token: float,
    phases: Sequence[RunPhase] = (),
) -> bool:
    """Draws the losses of `metrics.jsonl` against the steps.

    Args:
      metrics: the run's `metrics.jsonl`. Lines that don't read and losses that aren't finite are left out.
      picture: PNG file, written whole or not at all.
      title: of the picture.
      unigram_nats_per_token: entropy of the corpus's single tokens, drawn as a line for comparison.
      phases: of the run. A line with its sequence length stands where each later phase has begun.

    Returns:
      Whether a picture was drawn. That takes matplotlib (the `plots` extra) and at least one loss.

    Raises:
      OSError: the file can't be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    training, validation = _points(metrics, "loss"), _points(metrics, VALIDATION_LOSS)
    if not training and not validation:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    for points, style, label in ((training, "-", "training"), (validation, "o--", "validation")):
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4, linewidth=1.2)
    axes.axhline(unigram_nats_per_token, color="gray", linestyle=":", linewidth=1, label="unigram entropy")
    last_step = max(step for step, _ in training + validation)
    _draw_borders(axes, phases, last_step, behind=0.5)  # behind the last point of the phase before
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.set_title(title, parse_math=False)
    axes.legend()
    axes.grid(alpha=0.3)
    _write(figure, picture)
    return True


def draw_mixture(metrics: Path, picture: Path, *, title: str, phases: Sequence[RunPhase] = ()) -> bool:
    """Draws the shares of the tokens by source and by length of the documents, from `metrics.jsonl`.

    Args:
      metrics, picture, title, phases: as in `draw_losses`.

    Returns:
      Whether a picture was drawn. That takes matplotlib and a run on a mixture.

    Raises:
      OSError: the file can't be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    entries = [entry for entry in read_entries(metrics) if any(name.startswith(f"{MIXTURE}/") for name in entry)]
    if not entries:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    # A window's shares hold from the step after the window before.
    edges = [0, *(entry["step"] for entry in entries)]
    prefixes = {f"{MIXTURE}/": "source", f"{MIXTURE}_lengths/": "tokens of the document, at least"}
    for axes, (prefix, label) in zip(figure.subplots(1, 2, sharey=True), prefixes.items(), strict=True):
        names = list(dict.fromkeys(name for entry in entries for name in entry if name.startswith(prefix)))
        below = [0.0] * len(entries)
        for name in names:
            top = [lower + (entry.get(name) or 0.0) for lower, entry in zip(below, entries, strict=True)]
            axes.stairs(top, edges, baseline=below, fill=True, label=name.removeprefix(prefix))
            below = top
        _draw_borders(axes, phases, edges[-1])
        axes.set_xlabel("step")
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(0, 1)
        axes.legend(title=label, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False)
    figure.axes[0].set_ylabel("share of the tokens")
    figure.suptitle(title, parse_math=False)
    _write(figure, picture)
    return True


def _draw_borders(axes: Any, phases: Sequence[RunPhase], last_step: float, behind: float = 0.0) -> None:
    """Draws a line with its sequence length where each later phase begins, if it has begun by the last step.

    `behind` moves the lines to the right, in steps.
    """
    for phase in phases[1:]:
        if phase.first_step < last_step:
            border = phase.first_step + behind
            axes.axvline(border, color="gray", linewidth=0.8)
            axes.annotate(
                f"{phase.config.sequence_length:,}",
                (border, 1.0),
                xycoords=axes.get_xaxis_transform(),
                xytext=(3, -4),
                textcoords="offset points",
                rotation="vertical",
                verticalalignment="top",
                fontsize="small",
            )


def _write(figure: Any, picture: Path) -> None:
    # pyplot would keep figures and a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    content = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(content, format="png", dpi=_DOTS_PER_INCH)
    write_atomically(picture, content.getvalue())


def _points(metrics: Path, name: str) -> list[tuple[float, float]]:
    """(step, value) of each entry that has a number of this name."""
    return [(entry["step"], entry[name]) for entry in read_entries(metrics) if entry.get(name) is not None]
