"""Reports a profile: in words for people, as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainer.compile.fit_search import Search, Try
from trainer.compile.longest_context import LengthBounds, LongestContext
from trainer.compile.stages import format_stages
from trainer.compile.step_profile import StepProfile
from trainer.compile.topology import Topology
from trainer.config import RunPhase, TrainConfig
from trainer.terminal.columns import align
from trainer.terminal.units import format_bytes, format_count, format_seconds

Facts = dict[str, str | Sequence[str]]


def describe_target(config: TrainConfig, topology: Topology | None, profile: StepProfile) -> Facts:
    """The config that was compiled, and the devices that it was compiled for."""
    used, there_are = profile.num_devices_used, profile.num_devices
    where = f" of {topology.name}" if topology else ""
    micro_batches = f" in {config.gradient_accumulation} micro-batches" if config.gradient_accumulation > 1 else ""
    return {
        "devices": f"{used} × {profile.device_kind} ({profile.platform}){where}"
        + (f", which has {there_are}: the product of the mesh's sizes is {used}" if used < there_are else ""),
        "mesh": _describe_mesh(profile),
        "model": f"{format_count(profile.num_parameters)} parameters, {config.model.num_layers} layers of width "
        f"{config.model.width}, {config.model.compute_dtype} compute, remat {config.model.remat}",
        **profile.plan.describe(),
        "step": f"{profile.tokens_per_step:,} tokens: {config.batch_size} × {config.sequence_length:,}{micro_batches}",
    }


def describe_page(profile: StepProfile) -> str:
    """A page among others that are compared: what it trains, and on what."""
    return (
        f"{format_count(profile.num_parameters)} parameters, {profile.tokens_per_step:,} tokens a step, "
        f"{profile.num_devices_used} × {profile.device_kind}, mesh {_describe_mesh(profile)}"
    )


def _describe_mesh(profile: StepProfile) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in profile.mesh.items())


def describe_profile(profile: StepProfile) -> Facts:
    """The results of compiling."""
    is_refused = profile.fit is not None and profile.fit.is_refused
    facts: Facts = {"time": format_stages(profile.compiled, origin="refused" if is_refused else None)}
    if profile.size is not None:
        facts["program"] = (
            f"{format_bytes(profile.size.stablehlo_bytes)} of StableHLO; optimized, "
            f"{profile.size.num_hlo_instructions:,} HLO instructions, {format_bytes(profile.size.hlo_bytes)}"
        )
        facts["collectives"] = _describe_collectives(profile)
    return facts | {"memory": _describe_memory(profile), "verdict": describe_verdict(profile)}


def describe_verdict(profile: StepProfile) -> str:
    """The verdict: whether the program fits, and by how much."""
    fit = profile.fit
    if fit is None:
        return "unknown: the backend doesn't tell what the program takes"
    if fit.available is None or fit.spare is None:
        return f"unknown: it needs {format_bytes(fit.needed)}, and {profile.device_kind} doesn't tell what it has"
    there_is = f"{format_bytes(fit.available.size)} on each device ({fit.available.source})"
    if fit.fits:
        return f"fits: {format_bytes(fit.needed)} of {there_is}, {format_bytes(fit.spare)} to spare"
    needs = f"libtpu refused it: about {format_bytes(fit.needed)}" if fit.is_refused else format_bytes(fit.needed)
    return f"does not fit: {needs} for {there_is}, {format_bytes(max(-fit.spare, 0))} too much"


def describe_phase(run: TrainConfig, phase: RunPhase) -> str:
    """A phase among the others: its number, steps and batch."""
    return (
        f"phase {phase.index + 1} of {len(run.phases)}, steps {phase.first_step + 1} to {phase.last_step}, "
        f"{phase.config.batch_size} × {phase.config.sequence_length:,} tokens"
    )


def phase_to_json(phase: RunPhase, profile: StepProfile) -> dict[str, Any]:
    """A phase and its step."""
    return {
        "phase": phase.index + 1,
        "first_step": phase.first_step + 1,
        "last_step": phase.last_step,
        "sequence_length": phase.config.sequence_length,
        "profile": profile_to_json(profile),
    }


def describe_try(attempt: Try) -> str:
    """One line of a search."""
    if attempt.profile is None:
        return f"{attempt.changes}: can't be compiled: {attempt.problem}"
    fit = attempt.profile.fit
    if fit is None or fit.available is None:
        return f"{attempt.changes}: {describe_verdict(attempt.profile)}"
    about = "about " if fit.is_refused else ""
    verdict = "fits" if fit.fits else "does not fit"
    return f"{attempt.changes}: {verdict}, {about}{format_bytes(fit.needed)} of {format_bytes(fit.available.size)}"


def describe_search(search: Search, found: Try | None, seconds: float) -> list[str]:
    """The result of a search for a change that makes the step fit, in lines."""
    out_of_time = "" if search.is_complete else f" {_out_of_time(seconds)}"
    if found is not None:
        return [f"smallest single change that makes it fit{out_of_time}:", f"  {found.changes}"]
    if not search.tries:
        return [f"no single change to try{out_of_time}: change the batch, the model or the topology"]
    closest = [] if search.closest is None else ["closest:", f"  {describe_try(search.closest)}"]
    phase = "" if search.base.phase is None else f" --phase {search.base.phase.index + 1}"
    remedy = f"--longest-context{phase} finds the longest sequence that fits"
    return [f"no single change makes it fit{out_of_time}", *closest, remedy]


def describe_longest_context(search: Search, longest: LongestContext, seconds: float) -> list[str]:
    """The result of a search for the longest context, in lines."""
    as_is, changed = longest.as_is, longest.changed
    lines = [f"longest context as the config is: {_describe_bounds(as_is)}"]
    if changed.tokens is None:
        lines = ["no context that fits was found"]
        if search.is_complete:
            lines = ["no context fits, whatever changes are made: change the batch, the model or the topology"]
    elif changed.tokens != as_is.tokens and changed.attempt is not None:
        lines += [f"longest context with changes: {_describe_bounds(changed)}:", f"  {changed.attempt.changes}"]
    elif search.is_complete:
        lines.append("no change of one field makes a longer one fit")
    return lines if search.is_complete else [*lines, _out_of_time(seconds)]


def _describe_bounds(bounds: LengthBounds) -> str:
    too_long = f" ({bounds.too_long:,} don't fit)" if bounds.too_long is not None else ""
    return ("none" if bounds.tokens is None else f"{bounds.tokens:,} tokens") + too_long


def _out_of_time(seconds: float) -> str:
    return f"(not everything was tried in the {seconds:g} s of --search-seconds)"


def comparison_table(field: str, profiles: Mapping[str, StepProfile]) -> list[str]:
    """A table in aligned columns with a line for each value. Each figure has its ratio to the last value's."""
    *_, last = profiles.values()
    lines = [[field, *_measures(last)]]
    for name, profile in profiles.items():
        measures = zip(_measures(profile).values(), _measures(last).values(), strict=True)
        lines.append([name, *(f"{text} {_ratio(value, of_last)}" for (text, value), (_, of_last) in measures)])
    return align(lines)


def _measures(profile: StepProfile) -> dict[str, tuple[str, float]]:
    """The columns of a comparison: each value in words, and as the number that ratios are made of (0: unknown)."""
    compiled, fit = profile.compiled, profile.fit
    needed, verdict = (0, "unknown") if fit is None else (fit.needed, format_bytes(fit.needed))
    return {
        "trace": (format_seconds(compiled.trace_s), compiled.trace_s),
        "lower": (format_seconds(compiled.lower_s), compiled.lower_s),
        "XLA": (format_seconds(compiled.compile_s), compiled.compile_s),
        "needed on each device": (f"{verdict}{' (does not fit)' if fit and fit.fits is False else ''}", needed),
    }


def _ratio(value: float, of_last: float) -> str:
    if not value or not of_last:
        return ""
    ratio = value / of_last
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:,.0f}×"


def profile_to_json(profile: StepProfile) -> dict[str, Any]:
    """Every number of a profile; sizes in bytes, those of memory on each device."""
    fit = profile.fit
    return {
        "devices": {
            "platform": profile.platform,
            "kind": profile.device_kind,
            "count": profile.num_devices,
            "used": profile.num_devices_used,
        },
        "mesh": profile.mesh,
        "num_parameters": profile.num_parameters,
        "tokens_per_step": profile.tokens_per_step,
        **profile.plan.to_json(),
        "compile": profile.compiled.to_json(),
        "program": None if profile.size is None else asdict(profile.size),
        "collectives": [asdict(total) for total in profile.collectives],
        "state": asdict(profile.state),
        "verdict": None if fit is None else {"fits": fit.fits, "spare": fit.spare, **asdict(fit)},
    }


def tries_to_json(search: Search) -> dict[str, Any]:
    """All that a search has tried."""
    return {"is_complete": search.is_complete, "tries": [try_to_json(attempt) for attempt in search.tries.values()]}


def longest_context_to_json(longest: LongestContext) -> dict[str, Any]:
    """The bounds of the longest context, without other changes and with them."""
    return {
        name: {"tokens": bounds.tokens, "too_long": bounds.too_long, "found": try_to_json(bounds.attempt)}
        for name, bounds in (("as_is", longest.as_is), ("changed", longest.changed))
    }


def try_to_json(attempt: Try | None) -> dict[str, Any] | None:
    """One try of a search."""
    if attempt is None:
        return None
    return {
        "arguments": list(attempt.changes.arguments),
        "phase_settings": {setting.name: setting.value for setting in attempt.changes.phase_settings},
        "fits": attempt.fits,
        "problem": attempt.problem,
        "profile": None if attempt.profile is None else profile_to_json(attempt.profile),
    }


def _describe_collectives(profile: StepProfile) -> list[str]:
    if not profile.collectives:
        return ["none"]
    lines = [
        f"{total.operation}: {'' if total.is_exact else 'at least '}{total.count:,} a step, {format_bytes(total.bytes)}"
        + ("" if total.count == total.num_instructions else f" ({total.num_instructions} in the program's text)")
        for total in profile.collectives
    ]
    if not all(total.is_exact for total in profile.collectives):
        lines.append("at least: some are in a loop whose trips only the running program knows; one trip is counted")
    return lines


def _describe_memory(profile: StepProfile) -> list[str]:
    state, memory = profile.state, profile.compiled.memory
    parts = [
        ("parameters", state.parameters, ""),
        ("optimizer state", state.optimizer_state, ""),
        ("batch", state.batch, ""),
    ]
    if memory is not None:
        parts += [
            ("arguments", memory.arguments, "  the three above, as laid out on the device"),
            ("outputs", memory.outputs, f"  of which {format_bytes(memory.aliased)} written over arguments"),
            ("activations and temporaries", memory.temporaries, ""),
            ("code", memory.code, ""),
            ("needed", memory.peak, "  the last four, less what is written over"),
        ]
        if memory.host:
            of_state = f"{format_bytes(state.optimizer_state_on_host)} of it optimizer state"
            parts.append(("on the host", memory.host, f"  for each device, beside these; {of_state}"))
    width = max(len(label) for label, *_ in parts)
    return [f"{label.ljust(width)}  {format_bytes(size).rjust(8)}{remark}" for label, size, remark in parts]
