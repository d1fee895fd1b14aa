"""Runs a parsed command: compiles the step, searches or compares, and reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from trainer.compile.command import report
from trainer.compile.command.comparison import Comparison
from trainer.compile.command.compile_command import Task
from trainer.compile.command.worker import CompileRequest, profile_in_fresh_process
from trainer.compile.fit_search import Changes, Search, Try, search_remedy
from trainer.compile.longest_context import search_longest_context
from trainer.compile.slow import describe_slowness
from trainer.compile.step_profile import StepProfile
from trainer.config.file import config_to_json
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
      Whether the step fits in the devices' memory, all variants of it in a comparison; None: unknown.

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
    config, options = task.options.train, task.options
    if config.description:
        console.note(config.description)
    console.note(f"compiling the training step of {config.name} …")
    profile = profile_in_fresh_process(CompileRequest(task.arguments, task.topology))
    facts = report.describe_target(config, task.topology, profile) | report.describe_profile(profile)
    if causes := describe_slowness(config, profile, is_topology=task.topology is not None):
        facts["slow"] = causes
    console.opening(config.name, facts)
    content = {"config": config_to_json(config), "profile": report.profile_to_json(profile)}

    def compile_with(changes: Changes) -> StepProfile:
        console.note(f"trying {changes} …")
        return profile_in_fresh_process(CompileRequest((*task.arguments, *changes.arguments), task.topology))

    fits = None if profile.fit is None else profile.fit.fits
    if fits is None or (fits and not options.longest_context) or options.search_seconds == 0:
        return fits, content
    search = Search(
        config,
        compile_with,
        num_devices=profile.num_devices,
        can_offload=profile.platform != "cpu",
        seconds=options.search_seconds,
        on_try=lambda attempt: console.note(f"tried {report.describe_try(attempt)}"),
    )
    found: Try | None
    if options.longest_context:
        longest = search_longest_context(search, profile)
        found, fits = longest.changed.attempt, longest.changed.tokens is not None
        lines = report.describe_longest_context(search, longest, options.search_seconds)
        content["longest_context"] = report.longest_context_to_json(longest) | report.tries_to_json(search)
    else:
        found = search_remedy(search)
        lines = report.describe_search(search, found, options.search_seconds)
        content["search"] = {"found": report.try_to_json(found)} | report.tries_to_json(search)
    for line in lines:
        console.note(line)
    if found is not None and found.profile is not None:
        facts = report.describe_target(found.changes.apply(config), task.topology, found.profile)
        console.closing(f"{config.name} with {found.changes}", facts | report.describe_profile(found.profile))
    return fits, content


def _compare(task: Task, comparison: Comparison, console: Console) -> tuple[bool | None, dict[str, Any]]:
    profiles = {}
    for name in comparison.values:
        console.note(f"compiling with {comparison.field}={name} …")
        # Without the cache: a variant that was compiled earlier would seem to compile in no time.
        arguments = (*task.arguments, *comparison.arguments(name))
        profiles[name] = profile_in_fresh_process(CompileRequest(arguments, task.topology, use_cache=False))
    last = comparison.values[-1]
    if comparison.compares_pages:
        pages = {name: report.describe_page(profile) for name, profile in profiles.items()}
        console.opening("config pages compared", pages)
    else:
        config = task.options.train
        facts = report.describe_target(config, task.topology, profiles[last])
        console.opening(f"{config.name}: {comparison.field} compared", facts)
    console.note(f"each figure with its ratio to that of {last}:")
    for line in report.comparison_table(comparison.field, profiles):
        console.note(line)
    variants = [
        {"value": name, "arguments": comparison.arguments(name), "profile": report.profile_to_json(profile)}
        for name, profile in profiles.items()
    ]
    verdicts = [None if profile.fit is None else profile.fit.fits for profile in profiles.values()]
    fits = False if False in verdicts else None if None in verdicts else True
    return fits, {"comparison": {"field": comparison.field, "variants": variants}}
