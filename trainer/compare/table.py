"""The comparison as a table: a row for each measure, a column for each run."""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainer.compare.compared_run import AXES, Axis, ComparedRun, Measured, shared_end
from trainer.config import Phase
from trainer.config.file import config_to_json
from trainer.config.resume_changes import field_values
from trainer.errors import shorten
from trainer.evaluate.results import Line, format_length, newest_of
from trainer.terminal.units import format_bytes, format_seconds

NOTHING = "–"
_CELL_CHARACTERS = 40
_PARTS = (0.25, 0.5, 0.75, 1.0)


class TableRow(NamedTuple):
    """A measure, and its text for each run."""

    label: str
    cells: Sequence[str]


def comparison_table(runs: Sequence[ComparedRun], window: float) -> list[str]:
    """The lines of the table. A row that no run has a value for is left out, and so is a section without rows.

    Args:
      runs: the first is the one that the others' differences and ratios are to.
      window: as `CompareCommand.window`.
    """
    sections = {
        "run": _describe_runs(runs),
        "config, where it differs": _differing_fields(runs) or [TableRow("nothing differs", [""] * len(runs))],
        "a later phase begins after": _phases(runs),
        f"training loss, nats per token, mean over {100 * window:g}% of the way": list(_losses(runs, window)),
        "validation loss, nats per token": list(_losses(runs, None)),
        "speed": list(_speed(runs)),
        "memory": list(_memory(runs)),
        "compilation, newest attempt": list(_compilation(runs)),
        "evaluation, newest step": list(_evaluations(runs)),
    }
    table = [TableRow(f"differences and ratios are to {runs[0].name}", [run.name for run in runs])]
    for title, rows in sections.items():
        rows = [row for row in rows if any(cell != NOTHING for cell in row.cells)]
        if rows:
            table += [TableRow("", [""] * len(runs)), TableRow(title, [""] * len(runs))]
            table += [TableRow(f"  {label}", cells) for label, cells in rows]
    return list(_align(table))


def _differing_fields(runs: Sequence[ComparedRun]) -> list[TableRow]:
    """The fields of the configs that aren't the same in all runs, those of each phase by themselves."""
    configs = [_fields(run) for run in runs]
    names = dict.fromkeys(itertools.chain.from_iterable(configs))
    # As JSON: True equals 1 in Python.
    texts = {name: [json.dumps(config.get(name), sort_keys=True) for config in configs] for name in names}
    return [
        TableRow(name, [shorten(repr(config[name])) if name in config else NOTHING for config in configs])
        for name in names
        if len(set(texts[name])) > 1
    ]


def _fields(run: ComparedRun) -> dict[str, Any]:
    """All fields, and of each phase those that it sets."""
    fields, unset = field_values(run.config), config_to_json(Phase())
    for index, phase in enumerate(fields.pop("phases")):
        set_here = {name: value for name, value in phase.items() if value != unset[name]}
        fields |= dict(_leaves(f"phases[{index}]", set_here))
    return fields


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}", item)
    else:
        yield name, value


def _describe_runs(runs: Sequence[ComparedRun]) -> list[TableRow]:
    devices = [found if isinstance(found := run.record.get("devices"), dict) else {} for run in runs]
    return [
        TableRow("status", [str(run.record.get("status", NOTHING)) for run in runs]),
        TableRow("steps", [f"{_last_step(run):,} of {run.config.num_steps:,}" for run in runs]),
        TableRow("devices", [f"{each.get('count')} × {each.get('kind')}" if each else NOTHING for each in devices]),
        TableRow("config changed on the way", [_describe_changes(run.record.get("config_changes")) for run in runs]),
    ]


def _last_step(run: ComparedRun) -> int:
    steps = run.curves.done["steps"]
    return int(steps[-1]) if len(steps) else 0


def _describe_changes(changes: Any) -> str:
    known = [each for each in changes if isinstance(each, dict)] if isinstance(changes, list) else []
    return "; ".join(f"{each.get('field')} after step {each.get('step')}" for each in known) or NOTHING


def _phases(runs: Sequence[ComparedRun]) -> list[TableRow]:
    def begins(run: ComparedRun, index: int) -> str:
        if index >= len(run.phases):
            return NOTHING
        first = run.phases[index].first_step
        if first > _last_step(run):
            return f"step {first:,}, not reached"
        on_axis = {axis: float(run.curves.at_steps(axis, [first])[0]) for axis in AXES}
        return ", ".join(_place(axis, x) for axis, x in on_axis.items())

    most = max(len(run.phases) for run in runs)
    return [TableRow(f"phase {index + 1}", [begins(run, index) for run in runs]) for index in range(1, most)]


def _place(axis: Axis, x: float) -> str:
    return format_seconds(x) if axis == "seconds" else f"{x:,.0f} tokens" if axis == "tokens" else f"step {x:,.0f}"


def _shared_places(runs: Sequence[ComparedRun], axis: Axis) -> list[float]:
    """Each quarter of what all runs have reached on an axis; steps and tokens are whole."""
    end = shared_end(runs, axis)
    places = [part * end if axis == "seconds" else math.ceil(part * end) for part in _PARTS]
    return list(dict.fromkeys(places)) if end else []


def _losses(runs: Sequence[ComparedRun], window: float | None) -> Iterator[TableRow]:
    """Losses at equal places: training losses, or, without a window, those of validation."""
    for axis in AXES:
        for x in _shared_places(runs, axis):
            if window is None:
                found = [run.curves.validation_at(axis, x) for run in runs]
            else:
                found = [run.curves.training_at(axis, x, window * shared_end(runs, axis)) for run in runs]
            yield _row(_place(axis, x), found, "{:.4f}".format, lambda loss, first: f"{loss - first:+.4f}")


def _speed(runs: Sequence[ComparedRun]) -> Iterator[TableRow]:
    most = max(len(run.phases) for run in runs)
    for index in range(most):
        speeds: list[Mapping[str, Any]] = [run.speeds[index] if index < len(run.speeds) else {} for run in runs]
        where = f", phase {index + 1}" if most > 1 else ""
        for label, name, show in (
            ("tokens/s", "tokens_per_s", "{:,.0f}".format),
            ("step, median", "median_s", format_seconds),
            ("MFU, causal", "mfu_causal", "{:.1%}".format),
            ("MFU, noncausal", "mfu_noncausal", "{:.1%}".format),
        ):
            yield _row(label + where, [_number(speed, name) for speed in speeds], show, _ratio)


def _memory(runs: Sequence[ComparedRun]) -> Iterator[TableRow]:
    yield _row("a step needs, per device", [needed_bytes(run) for run in runs], format_bytes, _ratio)
    for label, name in (("peak of a device", "device_peak_bytes"), ("peak of the host", "host_peak_bytes")):
        yield _row(label, [_number(run.record, "memory", name) for run in runs], format_bytes, _ratio)


def _compilation(runs: Sequence[ComparedRun]) -> Iterator[TableRow]:
    programs = [_programs(run) for run in runs]
    first = [[each for each in found if each.get("name") == "train_step"][:1] for found in programs]
    for label, found in (("the first phase's step", first), ("all programs", programs)):
        yield _row(label, list(map(_seconds, found)), format_seconds, _ratio)
    hits = [[each.get("cache_hit") is True for each in found] for found in programs]
    yield TableRow("from the cache", [f"{sum(each)} of {len(each)} programs" if each else NOTHING for each in hits])


def needed_bytes(run: ComparedRun) -> Measured | None:
    """What a step takes on each device, by its program; the most of all phases."""
    steps = [each for each in _programs(run) if each.get("name") == "train_step"]
    peaks = [peak.value for each in steps if (peak := _number(each, "memory", "peak")) is not None]
    return Measured(max(peaks)) if peaks else None


def compile_seconds(run: ComparedRun) -> Measured | None:
    """Seconds to trace, lower and compile all programs of the newest attempt, or to read them from the cache."""
    return _seconds(_programs(run))


def _programs(run: ComparedRun) -> list[dict[str, Any]]:
    """The reports of what the newest attempt compiled: before its first step, for later phases, and again."""
    compiled = run.record.get("compile")
    compiled = compiled if isinstance(compiled, dict) else {}
    lists = [value for name in ("phases", "recompiles") if isinstance(value := compiled.get(name), list)]
    nested = [compiled, *(each for each in itertools.chain(*lists) if isinstance(each, dict))]
    found = itertools.chain.from_iterable([each, *each.values()] for each in nested)
    return [each for each in found if isinstance(each, dict) and "compile_s" in each]


def _seconds(programs: Sequence[Mapping[str, Any]]) -> Measured | None:
    stages = itertools.product(programs, ("trace_s", "lower_s", "compile_s"))
    known = [seconds.value for each, name in stages if (seconds := _number(each, name)) is not None]
    return Measured(sum(known)) if known else None


def evaluation_figures(runs: Sequence[ComparedRun]) -> dict[tuple[str, str, int], list[Measured | None]]:
    """Accuracies and losses at length, for each run, by measure ("accuracy" or "loss"), kind and task, and length.

    A mean over depths and seeds: of accuracies over examples, of losses over tokens. Means over other depths, seeds or
    numbers don't compare.
    """
    keys: dict[tuple[str, str, int], None] = {}
    of_runs = []
    for run in runs:
        groups: dict[tuple[str, str, int], list[Line]] = {}
        for line in newest_of(run.evaluations).values():
            measure = "loss" if line.accuracy is None else "accuracy"
            key = (measure, " ".join(filter(None, (line.kind, line.task))).replace("_", " "), line.length)
            groups.setdefault(key, []).append(line)
        of_runs.append({key: _mean(key[0], lines) for key, lines in groups.items()})
        keys |= dict.fromkeys(groups)
    return {key: [found.get(key) for found in of_runs] for key in sorted(keys)}


def _mean(measure: str, lines: Sequence[Line]) -> Measured:
    values = [value if (value := getattr(line, measure)) is not None else math.nan for line in lines]
    weights = [line.num_examples if measure == "accuracy" else line.num_tokens for line in lines]
    measured_on = frozenset((line.depth, line.seed, line.num_examples, line.num_tokens) for line in lines)
    return Measured(float(np.average(values, weights=weights)) if any(weights) else math.nan, measured_on)


def _evaluations(runs: Sequence[ComparedRun]) -> Iterator[TableRow]:
    yield TableRow("after step", [f"{run.evaluations[0].step:,}" if run.evaluations else NOTHING for run in runs])
    for (measure, name, length), figures in evaluation_figures(runs).items():
        label = f"{measure}, {name}, {format_length(length)}"
        if measure == "accuracy":
            yield _row(label, figures, "{:.1%}".format, lambda value, first: f"{(value - first) * 100:+.1f} points")
        else:
            yield _row(label, figures, "{:.4f}".format, lambda value, first: f"{value - first:+.4f}")


def _row(
    label: str,
    figures: Sequence[Measured | None],
    show: Callable[[float], str],
    relate: Callable[[float, float], str],
) -> TableRow:
    """A row of numbers, each but the first with its relation to the first, if the two compare."""
    first = figures[0]

    def cell(index: int, measured: Measured | None) -> str:
        if measured is None:
            return NOTHING
        text = show(measured.value) if math.isfinite(measured.value) else "not finite"
        if index == 0 or first is None or not math.isfinite(measured.value + first.value):
            return text
        related = relate(measured.value, first.value) if measured.compares_with(first) else "other data: no comparison"
        return f"{text} ({related})"

    return TableRow(label, [cell(index, measured) for index, measured in enumerate(figures)])


def _ratio(value: float, first: float) -> str:
    return f"{value / first:.2f}×" if first else NOTHING


def _number(values: Any, *names: str) -> Measured | None:
    """A number in nested objects; None: it isn't there, or something else is, in a file of somebody else's making."""
    for name in names:
        values = values.get(name) if isinstance(values, dict) else None
    return Measured(values) if type(values) in (int, float) else None


def _align(rows: Sequence[TableRow]) -> Iterator[str]:
    """The lines of a table, whose longer cells go over several lines."""
    wrapped = [
        [[label], *(textwrap.wrap(cell, _CELL_CHARACTERS, break_on_hyphens=False) or [""] for cell in cells)]
        for label, cells in rows
    ]
    titles = [not any(cells) for _, cells in rows]
    shown = [row for row, is_title in zip(wrapped, titles, strict=True) if not is_title]
    widths = [max(len(line) for cell in column for line in cell) for column in zip(*shown, strict=True)]
    for row in wrapped:
        for texts in itertools.zip_longest(*row, fillvalue=""):
            yield "  ".join(text.ljust(width) for text, width in zip(texts, widths, strict=True)).rstrip()
