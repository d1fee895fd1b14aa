"""Runs a parsed command: compiles the step, searches or compares, and reports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from trainer.compile.changes import NO_CHANGES, Changes, PhaseOfRun
from trainer.compile.command import report
from trainer.compile.command.comparison import Comparison
from trainer.compile.command.compile_command import Task
from trainer.compile.command.worker import CompileRequest, profile_in_fresh_process
from trainer.compile.fit_search import Search, Try, search_remedy
from trainer.compile.longest_context import search_longest_context
from trainer.compile.slow import describe_slowness
from trainer.compile.step_profile import StepProfile
from trainer.config import RunPhase
from trainer.config.file import config_to_json
from trainer.errors import TrainingFailed, UserMistake
from trainer.files.atomic import write_atomically
from trainer.hardware import installed_versions
from trainer.terminal.console import Console

SCHEMA_VERSION = 2
_DISTRIBUTIONS = ("flax-longcontext", "jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "flax")


def run(task: Task, *, command: Sequence[str]) -> bool | None:
    """Compiles what the command asks for, prints it, and writes the JSON report.

    Args:
      task: the command.
      command: the command line, for the report.

    Returns:
      Whether the step fits in the devices' memory, of all phases, and all variants in a comparison; None: unknown.

    Raises:
      UserMistake: the mesh doesn't fit the devices, or the attention backend can't serve a mask.
      TrainingFailed: the devices can't be started, or the compiler failed.
    """
    console = Console()
    if task.comparison is not None:
        fits, content = _compare(task, task.comparison, console)
    else:
        fits, content = _profile(task, console)
    if task.options.output is not None:
        content = {
            "schema_version": SCHEMA_VERSION,
            "command": list(command),
            "versions": installed_versions(_DISTRIBUTIONS),
            "topology": None if task.topology is None else task.topology.name,
            **content,
        }
        write_atomically(task.options.output, json.dumps(content, indent=2) + "\n")
    return fits


def _profile(task: Task, console: Console) -> tuple[bool | None, dict[str, Any]]:
    run, options = task.options.train, task.options
    if run.description:
        console.note(run.description)
    phases = run.in_phases() if options.phase is None else run.in_phases()[options.phase - 1 : options.phase]
    profiles = [_profile_phase(task, phase, console) for phase in phases]
    judged = [*zip(phases, profiles, strict=True)]
    content: dict[str, Any] = {"config": config_to_json(run)}
    if not run.phases:
        content["profile"] = report.profile_to_json(profiles[0])
    else:
        content["phases"] = [report.phase_to_json(*each) for each in judged]
    if len(judged) > 1:
        verdicts = {report.describe_phase(run, phase): report.describe_verdict(profile) for phase, profile in judged}
        console.opening(f"{run.name}: the phases", verdicts)
    fits = _all_fit(profiles)
    if (fits is not False and not options.longest_context) or options.search_seconds == 0:
        return fits, content
    # The longest context is that of the one step that was compiled.
    subject = next((each for each in judged if each[1].fit and each[1].fit.fits is False), judged[0])
    if options.longest_context and fits is None:
        return fits, content
    is_found, searched = _search(task, *subject, console)
    return (is_found if options.longest_context else fits), content | searched


def _all_fit(profiles: Iterable[StepProfile]) -> bool | None:
    """True if all steps fit; None: of some it is unknown."""
    verdicts = [None if profile.fit is None else profile.fit.fits for profile in profiles]
    return False if False in verdicts else None if None in verdicts else True


def _profile_phase(task: Task, phase: RunPhase, console: Console) -> StepProfile:
    """Compiles a phase's step and prints what is known about it."""
    run, config = task.options.train, phase.config
    title = f"{run.name}, {report.describe_phase(run, phase)}" if run.phases else run.name
    console.note(f"compiling the training step of {title} …")
    profile = _compile(task, phase)
    facts = report.describe_target(config, task.topology, profile) | report.describe_profile(profile)
    if causes := describe_slowness(config, profile, is_topology=task.topology is not None):
        facts["slow"] = causes
    console.opening(title, facts)
    return profile


def _compile(task: Task, phase: RunPhase, changes: Changes = NO_CHANGES) -> StepProfile:
    """Compiles a phase's step in a fresh process. Of a run with phases an error says which phase it is about."""
    if not task.options.train.phases:
        return profile_in_fresh_process(CompileRequest((*task.arguments, *changes.arguments), task.topology))
    request = CompileRequest(task.arguments, task.topology, phase=phase.index, changes=changes.values)
    try:
        return profile_in_fresh_process(request)
    except (UserMistake, TrainingFailed) as error:
        raise type(error)(f"phases[{phase.index}]: {error}") from error


def _search(task: Task, phase: RunPhase, profile: StepProfile, console: Console) -> tuple[bool, dict[str, Any]]:
    """Looks for a change with which a phase's step fits, or for its longest context.

    Returns:
      Whether something that fits was found, and all that was tried, for the JSON report.
    """
    run, config, options = task.options.train, phase.config, task.options

    def compile_with(changes: Changes) -> StepProfile:
        console.note(f"trying {changes} …")
        if not options.longest_context:  # another length may change the number of steps
            try:
                changes.check_run()
            except ValueError as refused:
                raise UserMistake(str(refused)) from None
        return _compile(task, phase, changes)

    search = Search(
        config,
        compile_with,
        num_devices=profile.num_devices,
        can_offload=profile.platform != "cpu",
        seconds=options.search_seconds,
        on_try=lambda attempt: console.note(f"tried {report.describe_try(attempt)}"),
        base=Changes(phase=PhaseOfRun(run, phase.index) if run.phases else None),
    )
    found: Try | None
    searched: dict[str, Any] = {"phase": phase.index + 1} if run.phases else {}
    if options.longest_context:
        longest = search_longest_context(search, profile)
        found, is_found = longest.changed.attempt, longest.changed.tokens is not None
        lines = report.describe_longest_context(search, longest, options.search_seconds)
        searched |= report.longest_context_to_json(longest) | report.tries_to_json(search)
    else:
        found = search_remedy(search)
        is_found = found is not None
        lines = report.describe_search(search, found, options.search_seconds)
        searched |= {"found": report.try_to_json(found)} | report.tries_to_json(search)
    if run.phases:
        console.note(f"{report.describe_phase(run, phase)}:")
    for line in lines:
        console.note(line)
    if found is not None and found.profile is not None:
        facts = report.describe_target(found.changes.apply(config), task.topology, found.profile)
        console.closing(f"{run.name} with {found.changes}", facts | report.describe_profile(found.profile))
    return is_found, {"longest_context" if options.longest_context else "search": searched}


def _compare(task: Task, comparison: Comparison, console: Console) -> tuple[bool | None, dict[str, Any]]:
    profiles = {}
    for name in comparison.values:
        console.note(f"compiling with {comparison.field}={name} …")
        # Without the cache: a variant that was compiled earlier would seem to compile in no time.
        arguments = (*task.arguments, *comparison.arguments(name))
        phase = None if task.options.phase is None else task.options.phase - 1
        request = CompileRequest(arguments, task.topology, use_cache=False, phase=phase)
        profiles[name] = profile_in_fresh_process(request)
    last = comparison.values[-1]
    if comparison.compares_pages:
        pages = {name: report.describe_page(profile) for name, profile in profiles.items()}
        console.opening("config pages compared", pages)
    else:
        config = task.options.train
        title = f"{config.name}: {comparison.field} compared"
        if task.options.phase is not None:
            phase_compared = config.in_phases()[task.options.phase - 1]
            title += f", {report.describe_phase(config, phase_compared)}"
            config = phase_compared.config
        console.opening(title, report.describe_target(config, task.topology, profiles[last]))
    console.note(f"each figure with its ratio to that of {last}:")
    for line in report.comparison_table(comparison.field, profiles):
        console.note(line)
    variants = [
        {"value": name, "arguments": comparison.arguments(name), "profile": report.profile_to_json(profile)}
        for name, profile in profiles.items()
    ]
    return _all_fit(profiles.values()), {"comparison": {"field": comparison.field, "variants": variants}}
