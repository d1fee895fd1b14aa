"""The table, the ratios and the plot of a sweep's rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from experiments.benchmarks.compile_time.sweep import Row

_STAGES = ("trace_s", "lower_s", "compile_s")
_COLORS = {"dense": "#b4442c", "upstream_lazy": "#d09a2c", "ours": "#2c6fb4"}


def describe(row: Row) -> str:
    """A case in one line."""
    head = f"{row['subject']}, {row['mask']}, {row['source']}, {row['length']:,}"
    if not _is_measured(row):
        return f"{head}: {describe_status(row)}"
    seconds = ", ".join(f"{stage[:-2]} {row[stage]:.3f} s" for stage in _STAGES)
    return f"{head}: {seconds}, {row['trace_peak_bytes'] / 1e6:,.0f} MB resident while tracing"


def make_table(rows: Sequence[Row]) -> Table:
    """Seconds and memory of every case."""
    table = Table("subject", "mask", "source", "length", "trace", "lower", "compile", "resident, tracing")
    for row in rows:
        head = (row["subject"], row["mask"], row["source"], f"{row['length']:,}")
        if _is_measured(row):
            seconds = [f"{row[stage]:.3f} s" for stage in _STAGES]
            table.add_row(*head, *seconds, f"{row['trace_peak_bytes'] / 1e6:,.0f} MB")
        else:
            table.add_row(*head, describe_status(row), "", "", "")
    return table


def describe_status(row: Row) -> str:
    """Why a case has no figures."""
    match row["status"]:
        case "stopped":
            return f"stopped {row['message']}"
        case "failed":
            return f"failed: {row['message']}"
        case _:
            return f"not tried: {row['ended_at']:,} was stopped or failed"


def ratios(rows: Sequence[Row]) -> list[str]:
    """Summarises the sweep, one line each: baselines ÷ ours at equal length, and ours at the ends of its range.

    A baseline whose trace is long was traced once, so it is compared with the first of ours, too.
    """
    ours = {(_series_key(row), row["length"]): row for row in rows if _is_measured(row) and row["source"] == "ours"}
    lines = []
    for row in rows:
        counterpart = ours.get((_series_key(row), row["length"]))
        if row["source"] == "ours" or counterpart is None or row["status"] not in ("measured", "stopped"):
            continue
        # A stopped case's seconds are its process's, which starts and compiles as well: as long as ours does.
        more_than = "" if _is_measured(row) else "more than "
        seconds = row["first_trace_s"] if _is_measured(row) else row["process_s"] - _besides_tracing(counterpart)
        lines.append(
            f"{row['subject']}, {row['mask']}, {row['length']:,}: {row['source']} takes "
            f"{more_than}{_format_ratio(seconds / counterpart['first_trace_s'])} as long to trace as ours"
        )
    for key in dict.fromkeys(key for key, _ in ours):
        series = [row for (other, _), row in ours.items() if other == key]
        low, high = (pick(series, key=lambda row: row["length"]) for pick in (min, max))
        if low is not high:
            more = (high["trace_peak_bytes"] - low["trace_peak_bytes"]) / 1e6
            lines.append(
                f"{key[0]}, {key[1]}: ours takes {high['trace_s'] / low['trace_s']:.2f}× as long to trace at "
                f"{high['length']:,} as at {low['length']:,}, and {more:+,.0f} MB"
            )
    return lines


def compare_tiles(rows: Sequence[Row]) -> list[str]:
    """Compares the programs' work, one line for each baseline: tiles visited by each pass, against ours."""
    counted = [row for row in rows if row.get("visited_tiles")]
    ours = {(_series_key(row), row["length"]): row["visited_tiles"] for row in counted if row["source"] == "ours"}
    lines = []
    for key, source in dict.fromkeys((_series_key(row), row["source"]) for row in counted if row["source"] != "ours"):
        equal: list[str] = []
        unequal: list[str] = []
        for row in counted:
            if (_series_key(row), row["source"]) == (key, source) and (key, row["length"]) in ours:
                same = row["visited_tiles"] == ours[key, row["length"]]
                (equal if same else unequal).append(f"{row['length']:,}")
        head = f"{', '.join(key)}: {source} visits"
        if equal:
            lines.append(f"{head} as many tiles as ours in every pass at {', '.join(equal)}")
        if unequal:
            lines.append(f"{head} OTHER NUMBERS OF TILES than ours in some pass at {', '.join(unequal)}")
    return lines


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws seconds to trace, to lower and to compile, and memory, against the length; a panel row for each subject.

    Args:
      rows: of one sweep.
      path: PNG file to write.

    Raises:
      ModuleNotFoundError: without matplotlib, with what to install.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the plot needs matplotlib: pip install -e '.[plots]' in the clone") from error

    panels = list(dict.fromkeys(_series_key(row) for row in rows))
    columns = (*_STAGES, "trace_peak_bytes")
    figure = Figure(figsize=(4 * len(columns), 3 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), len(columns), squeeze=False)
    for (subject, mask), axes_row in zip(panels, grid, strict=True):
        panel_rows = [row for row in rows if _series_key(row) == (subject, mask)]
        for column, axes in zip(columns, axes_row, strict=True):
            for source, lengths, values, note in _curves(panel_rows, column):
                (line,) = axes.plot(lengths, values, "o-", color=_COLORS[source], label=source)
                if note:
                    axes.annotate(
                        note, (lengths[-1], values[-1]), (6, 0), textcoords="offset points", fontsize=7,
                        color=line.get_color(),
                    )  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_title(f"{subject}, {mask}" if column == columns[0] else "", fontsize=8, loc="left")
            axes.set_ylabel("resident while tracing, GB" if column == "trace_peak_bytes" else f"{column[:-2]}, seconds")
            axes.set_xlabel("tokens")
            axes.grid(alpha=0.3)
            # At least a decade, so that noise doesn't look like growth.
            low, high = axes.get_ylim()
            middle, factor = math.sqrt(low * high), max(math.sqrt(high / low), math.sqrt(10))
            axes.set_ylim(middle / factor, middle * factor)
        axes_row[0].legend(fontsize=8)
    about = next(iter(rows))
    figure.suptitle(
        f"{about['target'] or 'local devices'}, compiled on {about['num_cores']} cores of {about['cpu']}, "
        f"JAX {about['jax']}, libtpu {about['libtpu']}, {about['date']}",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _is_measured(row: Row) -> bool:
    return row["status"] == "measured"


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:,.0f}×"


def _besides_tracing(row: Row) -> float:
    """Seconds of a case's process that went into something else."""
    return row["process_s"] - row["trace_s"]


def _series_key(row: Row) -> tuple[str, str]:
    return row["subject"], row["mask"]


def _curves(rows: Sequence[Row], column: str) -> Iterator[tuple[str, list[int], list[float], str]]:
    """Source, lengths, values, and what became of the first case that has none."""
    for source in dict.fromkeys(row["source"] for row in rows):
        source_rows = [row for row in rows if row["source"] == source]
        measured = [row for row in source_rows if _is_measured(row)]
        if measured:
            scale = 1e9 if column.endswith("_bytes") else 1
            ended = next((describe_status(row) for row in source_rows if row["status"] != "measured"), "")
            yield (
                source,
                [row["length"] for row in measured],
                [row[column] / scale for row in measured],
                ended.split(":")[0],
            )
