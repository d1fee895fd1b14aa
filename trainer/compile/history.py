"""Collects what a run compiled: before its first step, again later, and elsewhere while it trained.

In record.json, `compile` holds

    cache_dir     of the persistent cache
    init_state, train_step, eval_step
                  of each program compiled before the first step: name, trace_s, lower_s, compile_s, cache_hit, memory
    recompiles    one entry for each further compilation of these programs: the same fields, and `step` (the step that
                  waited for it, or that the evaluation followed), `at` (UTC) and `changes`, each with `argument`,
                  `what` ("shape", "dtype", "sharding", "static value" or "structure"), `before` and `after`
    elsewhere     everything else that XLA compiled between the first step and the last, by the name of the jitted
                  function: `count`, `seconds` in XLA, and `first_step` and `last_step`, the steps done at the first
                  and the last compilation
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from trainer.compile.recompilation import ArgumentChange, RecompilingFunction, summarize
from trainer.compile.stages import CompileReport, format_origin, format_stages, watch_compilations
from trainer.terminal.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Recompile:
    """A program of the run that was compiled again."""

    step: int
    """The training step that waited for it, or the step that the evaluation followed."""
    at: str
    """When the compilation was done: UTC, ISO 8601."""
    report: CompileReport
    changes: tuple[ArgumentChange, ...]
    """Changes of the arguments since the previous call."""

    @property
    def seconds(self) -> float:
        """Seconds that the run waited."""
        return self.report.trace_s + self.report.lower_s + self.report.compile_s

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.report.name} was compiled again, {format_stages(self.report)}, "
            f"because {summarize(self.changes)}"
        )

    def to_json(self) -> dict[str, Any]:
        """As a dict of JSON's types."""
        changes = [change.to_json() for change in self.changes]
        return {"step": self.step, "at": self.at, **self.report.to_json(), "changes": changes}

    def to_markdown(self) -> str:
        """The report, and a table of the changes."""
        lines = [(change.argument, change.what, change.before, change.after) for change in self.changes]
        table = _markdown_table(("argument", "what", "before", "after"), lines)
        return f"{reports_to_markdown([self.report])}\n\n{table}"


@dataclass
class Elsewhere:
    """The compilations of one function that isn't one of the run's programs."""

    function: str
    count: int
    seconds: float
    """In XLA."""
    first_step: int
    last_step: int


class CompileHistory:
    """Collects a run's compilations.

    Args:
      cache_dir: of the persistent cache.
    """

    def __init__(self, cache_dir: str):
        self._cache_dir = cache_dir
        self._reports: tuple[CompileReport, ...] = ()
        self._recompiles: list[Recompile] = []
        self._elsewhere: dict[str, Elsewhere] = {}
        self._warnings: list[str] = []
        self._lock = threading.Lock()  # compilations elsewhere may happen in other threads

    def add_first(self, reports: Sequence[CompileReport]) -> None:
        """Adds the programs compiled before the first step."""
        self._reports = tuple(reports)

    def add_recompile(self, step: int, report: CompileReport, changes: Sequence[ArgumentChange]) -> Recompile:
        """Adds a program that was compiled again just now."""
        recompile = Recompile(step, datetime.now(UTC).isoformat(timespec="seconds"), report, tuple(changes))
        self._recompiles.append(recompile)
        return recompile

    def recompile_seconds(self, function: str, step: int) -> float:
        """Seconds that a step waited for a function to be compiled again."""
        return sum(item.seconds for item in self._recompiles if (item.report.name, item.step) == (function, step))

    @contextlib.contextmanager
    def watch(self, own: Sequence[RecompilingFunction], step: Callable[[], int]) -> Iterator[None]:
        """Collects what is compiled elsewhere inside the `with` block.

        Args:
          own: the run's programs, which aren't collected here.
          step: returns the steps done so far; called at each compilation.
        """

        def add(function: str, seconds: float) -> None:
            if not any(program.is_compiling_here for program in own):
                self._add_elsewhere(function, seconds, step())

        with watch_compilations(add):
            yield

    def take_warnings(self) -> list[str]:
        """One line for each function that was compiled again elsewhere. Each is returned once."""
        with self._lock:
            warnings, self._warnings = self._warnings, []
        return warnings

    def to_json(self) -> dict[str, Any]:
        """The record's `compile`."""
        with self._lock:
            elsewhere = [asdict(item) for item in self._elsewhere.values()]
        return {
            "cache_dir": self._cache_dir,
            **{report.name: report.to_json() for report in self._reports},
            "recompiles": [recompile.to_json() for recompile in self._recompiles],
            "elsewhere": elsewhere,
        }

    def _add_elsewhere(self, function: str, seconds: float, step: int) -> None:
        with self._lock:
            item = self._elsewhere.setdefault(function, Elsewhere(function, 0, 0.0, step, step))
            # A library may compile a function for many shapes at its first use. Only later compilations are warned of.
            if item.first_step == item.last_step < step:
                self._warnings.append(
                    f"step {step}: {function}, which isn't part of the training step, was compiled again, "
                    f"{format_seconds(seconds)} in XLA; JAX_EXPLAIN_CACHE_MISSES=1 tells what changes in its arguments"
                )
            item.count += 1
            item.seconds += seconds
            item.last_step = step


def report_scalars(report: CompileReport) -> dict[str, float]:
    """A report's numbers by name: seconds of each stage, `cache_hit` as 0 or 1, `memory_…_bytes` by category.

    >>> report_scalars(CompileReport("step", 1.0, 0.25, 60.0, True, None))
    {'trace_s': 1.0, 'lower_s': 0.25, 'compile_s': 60.0, 'cache_hit': 1}
    """
    memory = {} if report.memory is None else asdict(report.memory)
    return {
        "trace_s": report.trace_s,
        "lower_s": report.lower_s,
        "compile_s": report.compile_s,
        "cache_hit": int(report.cache_hit),
        **{f"memory_{category}_bytes": count for category, count in memory.items()},
    }


def reports_to_markdown(reports: Sequence[CompileReport]) -> str:
    """A table with a line for each report."""
    stages = ("trace", "lower", "XLA", "from")
    categories = ("arguments", "outputs", "aliased", "temporaries", "code", "peak")
    lines = []
    for report in reports:
        seconds = map(format_seconds, (report.trace_s, report.lower_s, report.compile_s))
        memory: Mapping[str, int] = {} if report.memory is None else asdict(report.memory)
        sizes = (format_bytes(memory[category]) if memory else "unknown" for category in categories)
        lines.append((report.name, *seconds, format_origin(report), *sizes))
    return _markdown_table(("program", *stages, *categories), lines)


def _markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    table = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |" for line in table)
