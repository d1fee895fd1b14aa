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
    ends = sorted({length for points in curves.values() for length, _ in points})
    ticks = ends[:: -1 - len(ends) // 10]  # the longest among them
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
    if not found[step]:
        return False
    shown_steps = [shown for shown in found if found[shown]]
    maps = list(dict.fromkeys(_map_of(line) for line in found[step]))
    num_columns = min(len(maps) * len(shown_steps), 2)
    groups = [maps[at : at + num_columns] for at in range(0, len(maps), num_columns)]
    panels = [(name, shown) for group in groups for shown in shown_steps for name in group]
    num_rows = -(-len(panels) // num_columns)
    figure = _figure(_WIDTH_INCHES, 2.9 * num_rows + 0.3)
    if figure is None:
        return False
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes in grid.flat:
        axes.set_visible(False)
    for axes, (name, shown) in zip(grid.flat, panels, strict=False):
        if not (of_map := [line for line in found[shown] if _map_of(line) == name]):
            continue  # the other step was evaluated with other tasks
        axes.set_visible(True)
        _heat_map(axes, of_map)
        axes.set_title(name + (f", step {shown}" if len(shown_steps) > 1 else ""), fontsize=11)
    _save(figure, picture)
    return True


def _map_of(line: Line) -> str:
    """The heat map that a line belongs to: its task's, or the one of all tasks without a depth."""
    return "no depth" if line.depth is None else _words(line)


def _words(line: Line) -> str:
    return str(line.task).replace("_", " ")


def _heat_map(axes: Axes, lines: Sequence[Line]) -> None:
    lengths = sorted({line.length for line in lines})
    has_depths = lines[0].depth is not None
    ordered = sorted(lines, key=lambda line: line.depth or 0.0)
    name_of = {line.key: f"{line.depth:.0%}" if has_depths else _words(line) for line in ordered}
    rows = list(dict.fromkeys(name_of.values()))
    values = [[float("nan")] * len(lengths) for _ in rows]
    for line in lines:
        row, column, value = rows.index(name_of[line.key]), lengths.index(line.length), line.accuracy or 0.0
        values[row][column] = value
        color = "black" if value >= _LIGHT else "white"
        axes.text(column, row, f"{value:.0%}", ha="center", va="center", color=color, fontsize=9)
    axes.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(lengths)), [format_length(length) for length in lengths])
    axes.set_yticks(range(len(rows)), rows, fontsize=9)
    axes.set(xlabel="tokens", ylabel="depth" if has_depths else "")


def _steps(lines: Sequence[Line], step: int) -> list[int]:
    first = step_before(lines, step)
    return [step] if first is None else [first, step]


def _curve(lines: Sequence[Line], step: int) -> list[tuple[int, float]]:
    of_step = newest_of(line for line in lines if line.step == step and line.kind == "loss_by_position").values()
    return sorted((line.length, line.loss) for line in of_step if line.loss is not None)


def _accuracies(lines: Sequence[Line], step: int) -> list[Line]:
    of_step = newest_of(line for line in lines if line.step == step and line.kind == RETRIEVAL)
    return [line for line in of_step.values() if line.accuracy is not None]


def _figure(width: float, height: float) -> Figure | None:
    """An empty figure, or None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    # pyplot would keep figures and a backend for the whole process.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _save(figure: Any, picture: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    drawn, content = io.BytesIO(), io.BytesIO()
    FigureCanvasAgg(figure).print_figure(drawn, format="png", dpi=_DOTS_PER_INCH)
    Image.open(drawn).convert("RGB").quantize(256).save(content, "PNG")  # a third of the bytes
    write_atomically(picture, content.getvalue())
