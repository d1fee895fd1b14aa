"""Runs a parsed command: compiles the step, searches or compares, and reports."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence

from trainer.compile.command import report
from trainer.compile.command.comparison import Comparison
from trainer.compile.command.compile_command import Task
from trainer.compile.command.worker import CompileRequest, profile_in_fresh_process
from trainer.compile.fit_search import Remedy, SearchResult, search_remedy
from trainer.compile.step_profile import StepProfile
from trainer.files.atomic import write_atomically
from trainer.terminal.console import Console


def run(task: Task, *, command: Sequence[str]) -> bool | None:
    """Compiles what the command asks for, prints it, and writes the JSON report.

    Args:
      task: the command.
      command: the command line, for the report.

    Returns:
      Whether the step fits in the devices' memory, all variants of it in a comparison; None: unknown.

    Raises:
      UserMistake: the mesh doesn't fit the devices, or the attention backend can't serve a mask.
      TrainingFailed: the devices can't be started, or the compiler failed.
    """
    console = _Progress()
    console.description(task.config.description)
    if task.comparison is not None:
        return _compare(task, task.comparison, command, console)
    name = task.config.name
    with console.working(f"compiling the training step of {name}"):
        profile = profile_in_fresh_process(CompileRequest(task.arguments, task.topology))
    facts = report.describe_target(task.config, task.topology, profile) | report.describe_profile(profile)
    console.opening(name, facts)
    found: SearchResult | None = None
    fits = None if profile.fit is None else profile.fit.fits
    if fits is False and task.search_seconds > 0:
        found = _search(task, profile, console)
    _write(task, report.to_json(task.config, task.topology, command, profile=profile, search=found))
    return fits


def _search(task: Task, profile: StepProfile, console: _Progress) -> SearchResult:
    def compile_with(change: Remedy) -> StepProfile:
        with console.working(f"trying {change}"):
            return profile_in_fresh_process(CompileRequest((*task.arguments, *change.arguments), task.topology))

    result = search_remedy(
        task.config,
        profile.num_devices,
        compile_with,
        seconds=task.search_seconds,
        can_offload=profile.platform != "cpu",
        on_try=lambda attempt: console.note(f"tried {report.describe_try(attempt)}"),
    )
    for line in report.describe_search(result, task.search_seconds):
        console.note(line)
    if result.found is not None and result.found.profile is not None:
        changed = result.found.change.apply(task.config)
        facts = report.describe_target(changed, task.topology, result.found.profile)
        console.closing(
            f"{task.config.name} with {result.found.change}", facts | report.describe_profile(result.found.profile)
        )
    return result


def _compare(task: Task, comparison: Comparison, command: Sequence[str], console: _Progress) -> bool | None:
    profiles = {}
    for variant in comparison.variants:
        with console.working(f"compiling with {comparison.field}={variant.name}"):
            # Without the cache: a variant that was compiled earlier would seem to compile in no time.
            request = CompileRequest((*task.arguments, *variant.arguments), task.topology, use_cache=False)
            profiles[variant] = profile_in_fresh_process(request)
    last = profiles[comparison.variants[-1]]
    facts = report.describe_target(task.config, task.topology, last)
    console.opening(f"{task.config.name}: {comparison.field} compared", facts)
    console.note(f"each figure with its ratio to that of {comparison.variants[-1].name}:")
    for line in report.comparison_table(comparison.field, profiles):
        console.note(line)
    _write(
        task,
        report.to_json(task.config, task.topology, command, field=comparison.field, profiles=profiles),
    )
    verdicts = [None if profile.fit is None else profile.fit.fits for profile in profiles.values()]
    return False if False in verdicts else None if None in verdicts else True


def _write(task: Task, content: dict[str, object]) -> None:
    if task.output is not None:
        write_atomically(task.output, json.dumps(content, indent=2) + "\n")


class _Progress(Console):
    """The trainer's console, which tells what is being compiled, on a terminal or not."""

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """As the trainer's; without a terminal it prints a line."""
        if not self._is_terminal:
            self.note(f"{what} …")
        with super().working(what):
            yield
