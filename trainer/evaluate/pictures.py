"""Draws evaluations: the loss by position, and accuracies over depth and length, of one step or of two beside it.

Pictures have a white ground, so that they read alike on light and dark pages.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.evaluate.results import RETRIEVAL, Line, format_length, newest_of, step_before
from trainer.files.atomic import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# At the 830 pixels that GitHub gives a README, letters of 10 points are 13 pixels high.
_WIDTH_INCHES, _DOTS_PER_INCH = 9.0, 120
_LIGHT = 0.6  # accuracies from here on have a light ground


def draw_loss_by_position(lines: Sequence[Line], step: int, picture: Path) -> bool:
    """Draws losses against the position in the document, of a step and of the earliest other one.

    Args:
      lines: of any steps; of equal ones the last counts.
      step: the one that has just been evaluated.
      picture: PNG file, written whole or not at all.

    Returns:
      Whether a picture was drawn. That takes matplotlib (the `plots` extra) and a loss.

    Raises:
      OSError: the file can't be written.
    """
    curves = {shown: _curve(lines, shown) for shown in _steps(lines, step)}
    if not curves.get(step) or (figure := _figure(_WIDTH_INCHES, 4.5)) is None:
        return False
    axes = figure.add_subplot()
    for shown, points in curves.items():
        style: dict[str, Any] = {"color": "#08519c"} if shown == step else {"color": "#777777", "linestyle": "--"}
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=f"step {shown}", **style)
    axes.set_xscale("log", base=2)
    ticks = sorted({length for points in curves.values() for length, _ in points})[:: 1 + len(curves[step]) // 10]
    axes.set_xticks(ticks, [format_length(length) for length in ticks])
    axes.minorticks_off()
    axes.set(xlabel="tokens before, up to", ylabel="nats per token", title="loss by position in the document")
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        axes.legend()
    _save(figure, picture)
    return True


def draw_retrieval(lines: Sequence[Line], step: int, picture: Path) -> bool:
    """Draws heat maps of accuracies: for each task depths against lengths, in a row for each step.

    Args, returns and raises as `draw_loss_by_position`.
    """
    found = {shown: _accuracies(lines, shown) for shown in _steps(lines, step)}
    of_step = found.get(step, {}).values()
    tasks = list(dict.fromkeys(str(line.task) for line in of_step))
    if not tasks:
        return False
    shown_steps = [shown for shown in found if found[shown]]
    num_columns = min(len(tasks) * len(shown_steps), 2)
    groups = [tasks[at : at + num_columns] for at in range(0, len(tasks), num_columns)]
    panels = [(task, shown) for group in groups for shown in shown_steps for task in group]
    num_rows = -(-len(panels) // num_columns)
    figure = _figure(_WIDTH_INCHES, 2.9 * num_rows + 0.3)
    if figure is None:
        return False
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes in grid.flat:
        axes.set_visible(False)
    for number, (task, shown) in enumerate(panels):
        axes = grid[divmod(number, num_columns)]
        _heat_map(axes, [line for line in found[shown].values() if line.task == task])
        axes.set_title(task.replace("_", " ") + (f", step {shown}" if len(shown_steps) > 1 else ""), fontsize=11)
    _save(figure, picture)
    return True


def _heat_map(axes: Axes, lines: Sequence[Line]) -> None:
    axes.set_visible(True)
    lengths = sorted({line.length for line in lines})
    depths = sorted({line.depth for line in lines}, key=lambda depth: -1.0 if depth is None else depth)
    values = {(line.depth, line.length): line.accuracy or 0.0 for line in lines}
    rows = [[values.get((depth, length), float("nan")) for length in lengths] for depth in depths]
    axes.imshow(rows, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(lengths)), [format_length(length) for length in lengths])
    axes.set_yticks(range(len(depths)), ["any" if depth is None else f"{depth:.0%}" for depth in depths], fontsize=9)
    axes.set(xlabel="tokens", ylabel="depth")
    for (depth, length), value in values.items():
        place = lengths.index(length), depths.index(depth)
        color = "black" if value >= _LIGHT else "white"
        axes.text(*place, f"{value:.0%}", ha="center", va="center", color=color, fontsize=9)


def _steps(lines: Sequence[Line], step: int) -> list[int]:
    first = step_before(lines, step)
    return [step] if first is None else [first, step]


def _curve(lines: Sequence[Line], step: int) -> list[tuple[int, float]]:
    of_step = newest_of(line for line in lines if line.step == step and line.kind == "loss_by_position").values()
    return sorted((line.length, line.loss) for line in of_step if line.loss is not None)


def _accuracies(lines: Sequence[Line], step: int) -> dict[tuple, Line]:
    of_step = newest_of(line for line in lines if line.step == step and line.kind == RETRIEVAL)
    return {key: line for key, line in of_step.items() if line.accuracy is not None}


def _figure(width: float, height: float) -> Figure | None:
    """An empty figure, or None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    # pyplot would keep figures and a backend for the whole process.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _save(figure: Any, picture: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    content = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(content, format="png", dpi=_DOTS_PER_INCH)
    write_atomically(picture, content.getvalue())
