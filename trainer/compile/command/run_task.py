"""Runs a parsed command: compiles the step, searches or compares, and reports."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence

from trainer.compile.command import report
from trainer.compile.command.comparison import Comparison
from trainer.compile.command.compile_command import Task
from trainer.compile.command.worker import CompileRequest, profile_in_fresh_process
from trainer.compile.fit_search import Changes, Remedy, SearchResult, Try, search_remedy
from trainer.compile.longest_context import LongestContext, search_longest_context
from trainer.compile.slow import describe_slowness
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
    if causes := describe_slowness(task.config, profile, is_topology=task.topology is not None):
        facts["slow"] = causes
    console.opening(name, facts)
    found: SearchResult | None = None
    longest: LongestContext | None = None
    fits = None if profile.fit is None else profile.fit.fits
    if task.longest_context and fits is not None:
        longest = _search_longest(task, profile, console)
        fits = longest.changed.tokens is not None
    elif fits is False and task.search_seconds > 0:
        found = _search(task, profile, console)
    content = report.to_json(task.config, task.topology, command, profile=profile, search=found, longest=longest)
    _write(task, content)
    return fits


def _search(task: Task, profile: StepProfile, console: _Progress) -> SearchResult:
    result = search_remedy(
        task.config,
        profile.num_devices,
        lambda change: _compile_with(task, change, console),
        seconds=task.search_seconds,
        can_offload=profile.platform != "cpu",
        on_try=lambda attempt: console.note(f"tried {report.describe_try(attempt)}"),
    )
    for line in report.describe_search(result, task.search_seconds):
        console.note(line)
    _close(task, result.found, console)
    return result


def _search_longest(task: Task, profile: StepProfile, console: _Progress) -> LongestContext:
    result = search_longest_context(
        task.config,
        profile,
        lambda changes: _compile_with(task, changes, console),
        seconds=task.search_seconds,
        on_try=lambda attempt: console.note(f"tried {report.describe_try(attempt)}"),
    )
    for line in report.describe_longest_context(result, task.search_seconds):
        console.note(line)
    _close(task, result.changed.attempt, console)
    return result


def _compile_with(task: Task, change: Remedy | Changes, console: _Progress) -> StepProfile:
    with console.working(f"trying {change}"):
        return profile_in_fresh_process(CompileRequest((*task.arguments, *change.arguments), task.topology))


def _close(task: Task, found: Try | None, console: _Progress) -> None:
    """Reports what was found."""
    if found is not None and found.profile is not None:
        facts = report.describe_target(found.change.apply(task.config), task.topology, found.profile)
        console.closing(f"{task.config.name} with {found.change}", facts | report.describe_profile(found.profile))


def _compare(task: Task, comparison: Comparison, command: Sequence[str], console: _Progress) -> bool | None:
    profiles = {}
    for variant in comparison.variants:
        with console.working(f"compiling with {comparison.field}={variant.name}"):
            # Without the cache: a variant that was compiled earlier would seem to compile in no time.
            request = CompileRequest((*task.arguments, *variant.arguments), task.topology, use_cache=False)
            profiles[variant] = profile_in_fresh_process(request)
    last = comparison.variants[-1]
    if comparison.compares_pages:
        pages = {variant.name: report.describe_page(profile) for variant, profile in profiles.items()}
        console.opening("config pages compared", pages)
    else:
        facts = report.describe_target(task.config, task.topology, profiles[last])
        console.opening(f"{task.config.name}: {comparison.field} compared", facts)
    console.note(f"each figure with its ratio to that of {last.name}:")
    for line in report.comparison_table(comparison.field, profiles):
        console.note(line)
    _write(
        task,
        report.to_json(
            None if comparison.compares_pages else task.config,
            task.topology,
            command,
            field=comparison.field,
            profiles=profiles,
        ),
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
