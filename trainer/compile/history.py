"""Collects what a run compiled: before its first step, and again later.

In record.json, `compile` holds

    cache_dir     of the persistent cache
    init_state, train_step, eval_step
                  of each program compiled before the first step: name, trace_s, lower_s, compile_s, cache_hit, memory
    phases        the same programs of each later phase that was begun, and its `first_step`; compiled beside the steps
    recompiles    one entry for each further compilation of these programs: the same fields, and `step` (the step that
                  waited for it, or that the evaluation followed), `at` (UTC) and `changes`, each with `argument`,
                  `what` ("shape", "dtype", "sharding" or "structure"), `before` and `after`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from trainer.compile.recompilation import ArgumentChange, summarize
from trainer.compile.stages import CompileReport, format_stages


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
        changes = [asdict(change) for change in self.changes]
        return {"step": self.step, "at": self.at, **self.report.to_json(), "changes": changes}


class CompileHistory:
    """Collects a run's compilations.

    Args:
      cache_dir: of the persistent cache.
    """

    def __init__(self, cache_dir: str):
        self._cache_dir = cache_dir
        self._reports: tuple[CompileReport, ...] = ()
        self._recompiles: list[Recompile] = []
        self._phases: list[dict[str, Any]] = []

    def add_first(self, reports: Sequence[CompileReport]) -> None:
        """Adds the programs compiled before the first step."""
        self._reports = tuple(reports)

    def add_phase(self, step: int, reports: Sequence[CompileReport]) -> None:
        """Adds the programs of a later phase, which begins after a step."""
        self._phases.append({"first_step": step + 1} | {report.name: report.to_json() for report in reports})

    def add_recompile(self, step: int, report: CompileReport, changes: Sequence[ArgumentChange]) -> Recompile:
        """Adds a program that was compiled again just now."""
        recompile = Recompile(step, datetime.now(UTC).isoformat(timespec="seconds"), report, tuple(changes))
        self._recompiles.append(recompile)
        return recompile

    def recompile_seconds(self, function: str, step: int) -> float:
        """Seconds that a step waited for a function to be compiled again."""
        return sum(item.seconds for item in self._recompiles if (item.report.name, item.step) == (function, step))

    def to_json(self) -> dict[str, Any]:
        """The record's `compile`."""
        return {
            "cache_dir": self._cache_dir,
            **{report.name: report.to_json() for report in self._reports},
            **({"phases": self._phases} if self._phases else {}),
            "recompiles": [recompile.to_json() for recompile in self._recompiles],
        }


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
