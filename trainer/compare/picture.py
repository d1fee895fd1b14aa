"""The comparison as a picture: losses over steps, tokens and seconds, then speed, memory, compilation, evaluations."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.compare.compared_run import AXES, Axis, ComparedRun, Measured, shared_end
from trainer.compare.table import compile_seconds, evaluation_figures, needed_bytes
from trainer.evaluate.results import format_length
from trainer.files.atomic import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DOTS_PER_INCH = 120
_NUM_COLORS = 10  # of matplotlib's cycle, C0 to C9


def draw_comparison(runs: Sequence[ComparedRun], window: float, picture: Path) -> bool:
    """Draws runs side by side, each in its colour. Dotted lines show where a later phase begins.

    Args:
      runs: in the order of the colours.
      window: as `CompareCommand.window`.
      picture: PNG file, written whole or not at all.

    Returns:
      Whether the picture was drawn, which takes matplotlib (the `plots` extra).

    Raises:
      OSError: the file can't be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    # pyplot would keep figures and a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    evaluations: dict[str, dict[str, list[Measured | None]]] = {"accuracy": {}, "loss": {}}
    for (measure, name, length), figures in evaluation_figures(runs).items():
        evaluations[measure][f"{name}, {format_length(length)}"] = figures
    evaluations = {measure: rows for measure, rows in evaluations.items() if rows}
    heights = [4.0, 1.0 + 0.3 * len(runs), *(1.0 + 0.22 * len(rows) for rows in evaluations.values())]
    figure = Figure(figsize=(15.0, sum(heights)), layout="constrained", facecolor="white")
    losses, costs, *measured = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for panel, axis in zip(losses.subplots(1, len(AXES), sharey=True), AXES, strict=True):
        _draw_losses(panel, runs, axis, window * shared_end(runs, axis))
    bars = {
        "tokens/s, newest phase": [_newest(run, "tokens_per_s") for run in runs],
        "memory of a step per device, GB": [(found := needed_bytes(run)) and found.value / 1e9 for run in runs],
        "seconds to compile": [(found := compile_seconds(run)) and found.value for run in runs],
    }
    for panel, (title, values) in zip(costs.subplots(1, len(bars), sharey=True), bars.items(), strict=True):
        shown = panel.barh(range(len(runs)), [value or 0.0 for value in values], color=_colors(runs))
        panel.bar_label(shown, ["unknown" if value is None else f"{value:,.4g}" for value in values], padding=3)
        panel.set_yticks(range(len(runs)), [run.name for run in runs], parse_math=False)
        panel.margins(x=0.2)
        panel.set_title(title)
    costs.axes[0].invert_yaxis()
    for part, (measure, rows) in zip(measured, evaluations.items(), strict=True):
        _draw_dots(part.subplots(), runs, measure, rows)
    content = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(content, format="png", dpi=_DOTS_PER_INCH)
    write_atomically(picture, content.getvalue())
    return True


def _colors(runs: Sequence[ComparedRun]) -> list[str]:
    return [f"C{index % _NUM_COLORS}" for index in range(len(runs))]


def _newest(run: ComparedRun, name: str) -> float | None:
    """A speed of the newest phase that was begun."""
    return next((value for speed in reversed(run.speeds) if (value := speed[name]) is not None), None)


def _draw_losses(axes: Axes, runs: Sequence[ComparedRun], axis: Axis, width: float) -> None:
    known = set(runs[0].curves.digests) - {None}
    for run, color in zip(runs, _colors(runs), strict=True):
        curves = run.curves
        axes.plot(curves.done[axis], curves.smoothed(axis, width), color=color, linewidth=1.2, label=run.name)
        places = curves.at_steps(axis, curves.validated)
        for digest in dict.fromkeys(curves.digests):
            of_digest = [index for index, each in enumerate(curves.digests) if each == digest]
            compares = run is runs[0] or digest in known
            axes.plot(
                places[of_digest],
                curves.validation[of_digest],
                "o--",
                color=color,
                markerfacecolor=color if compares else "white",
                markersize=4,
                linewidth=0.8,
                label=f"{run.name}, validation" + ("" if compares else " on other data"),
            )
        for phase in run.phases[1:]:
            if len(curves.done["steps"]) and phase.first_step <= curves.done["steps"][-1]:
                axes.axvline(curves.at_steps(axis, [phase.first_step])[0], color=color, linestyle=":", linewidth=1)
    axes.set(xlabel={"steps": "step", "tokens": "tokens trained on", "seconds": "seconds of steps"}[axis])
    axes.grid(alpha=0.3)
    if axis == AXES[0]:
        axes.set_ylabel("nats per token")
        for text in axes.legend(fontsize=8).get_texts():
            text.set_parse_math(False)


def _draw_dots(axes: Axes, runs: Sequence[ComparedRun], measure: str, rows: dict[str, list[Measured | None]]) -> None:
    """A row for each evaluation, a dot for each run: hollow where it doesn't compare with the first run's."""
    for index, color in enumerate(_colors(runs)):
        for row, figures in enumerate(rows.values()):
            if (found := figures[index]) is not None:
                first = figures[0]
                is_hollow = index > 0 and (first is None or not found.compares_with(first))
                axes.plot(found.value, row, "o", color=color, markerfacecolor="white" if is_hollow else color)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=9, parse_math=False)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(alpha=0.3)
    axes.set_title(f"{'accuracy' if measure == 'accuracy' else 'nats per token'} at length, newest step")
    if measure == "accuracy":
        axes.set_xlim(-0.02, 1.02)
