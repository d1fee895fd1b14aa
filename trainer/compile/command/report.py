"""Reports a profile: in words for people, as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainer.compile.collectives import CollectiveTotal
from trainer.compile.command.comparison import Variant
from trainer.compile.fit_search import SearchResult, Try
from trainer.compile.longest_context import Bounds, LongestContext
from trainer.compile.stages import format_stages
from trainer.compile.step_profile import StepProfile
from trainer.compile.topology import Topology
from trainer.config import TrainConfig
from trainer.config.file import config_to_json
from trainer.hardware import installed_versions
from trainer.terminal.units import format_bytes, format_count, format_seconds

SCHEMA_VERSION = 1
_DISTRIBUTIONS = ("flax-longcontext", "jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "flax")

Facts = dict[str, str | Sequence[str]]


def describe_target(config: TrainConfig, topology: Topology | None, profile: StepProfile) -> Facts:
    """The config that was compiled, and the devices that it was compiled for."""
    used, there_are = profile.num_devices_used, profile.num_devices
    where = f" of {topology.name}" if topology else ""
    micro_batches = f" in {config.gradient_accumulation} micro-batches" if config.gradient_accumulation > 1 else ""
    return {
        "devices": f"{used} × {profile.device_kind} ({profile.platform}){where}"
        + (f", which has {there_are}: the product of the mesh's sizes is {used}" if used < there_are else ""),
        "mesh": " × ".join(f"{axis} {size}" for axis, size in profile.mesh.items()),
        "model": f"{format_count(profile.num_parameters)} parameters, {config.model.num_layers} layers of width "
        f"{config.model.width}, {config.model.compute_dtype} compute, remat {config.model.remat}",
        **profile.plan.describe(),
        "step": f"{profile.tokens_per_step:,} tokens: {config.batch_size} × {config.sequence_length:,}{micro_batches}",
    }


def describe_page(profile: StepProfile) -> str:
    """A page among others that are compared: what it trains, and on what."""
    mesh = " × ".join(f"{axis} {size}" for axis, size in profile.mesh.items())
    return (
        f"{format_count(profile.num_parameters)} parameters, {profile.tokens_per_step:,} tokens a step, "
        f"{profile.num_devices_used} × {profile.device_kind}, mesh {mesh}"
    )


def describe_profile(profile: StepProfile) -> Facts:
    """The results of compiling."""
    facts: Facts = {"time": describe_times(profile)}
    if profile.size is not None:
        facts["program"] = (
            f"{format_bytes(profile.size.stablehlo_bytes)} of StableHLO; optimized, "
            f"{profile.size.num_hlo_instructions:,} HLO instructions, {format_bytes(profile.size.hlo_bytes)}"
        )
        facts["collectives"] = _describe_collectives(profile)
    facts["memory"] = _describe_memory(profile)
    facts["host"] = (
        f"{format_bytes(profile.host.compile)} resident at the peak; "
        f"{format_bytes(profile.host.lower)} until lowered, {format_bytes(profile.host.start)} before"
    )
    facts["verdict"] = describe_verdict(profile)
    return facts


def describe_times(profile: StepProfile) -> str:
    """Seconds of each stage."""
    is_refused = profile.fit is not None and profile.fit.is_refused
    return format_stages(profile.compiled, origin="refused" if is_refused else None)


def describe_verdict(profile: StepProfile) -> str:
    """The verdict: whether the program fits, and by how much."""
    fit = profile.fit
    if fit is None:
        return "unknown: the backend doesn't tell what the program takes"
    if fit.available is None:
        return f"unknown: it needs {format_bytes(fit.needed)}, and {profile.device_kind} doesn't tell what it has"
    there_is = f"{format_bytes(fit.available.size)} on each device ({fit.available.source})"
    if fit.fits:
        return (
            f"fits: {format_bytes(fit.needed)} of {there_is}, {format_bytes(fit.available.size - fit.needed)} to spare"
        )
    needs = f"libtpu refused it: about {format_bytes(fit.needed)}" if fit.is_refused else format_bytes(fit.needed)
    excess = format_bytes(max(fit.needed - fit.available.size, 0))
    return f"does not fit: {needs} for {there_is}, {excess} too much"


def describe_try(attempt: Try) -> str:
    """One line of a search."""
    if attempt.profile is None:
        return f"{attempt.change}: can't be compiled: {attempt.problem}"
    fit = attempt.profile.fit
    if fit is None or fit.available is None:
        return f"{attempt.change}: {describe_verdict(attempt.profile)}"
    about = "about " if fit.is_refused else ""
    verdict = "fits" if fit.fits else "does not fit"
    return f"{attempt.change}: {verdict}, {about}{format_bytes(fit.needed)} of {format_bytes(fit.available.size)}"


def describe_search(search: SearchResult, seconds: float) -> list[str]:
    """The result of a search, in lines."""
    out_of_time = "" if search.is_complete else _out_of_time(seconds)
    if search.found is not None:
        return [f"smallest single change that makes it fit{out_of_time}:", f"  {search.found.change}"]
    if not search.tries:
        return [f"no single change to try{out_of_time}: change the batch, the model or the topology"]
    lines = [f"no single change makes it fit{out_of_time}"]
    if search.closest is not None:
        lines += ["closest:", f"  {describe_try(search.closest)}"]
    return [*lines, "--longest-context finds the longest sequence that fits"]


def describe_longest_context(search: LongestContext, seconds: float) -> list[str]:
    """The result of a search for the longest context, in lines."""
    as_is, changed = search.as_is, search.changed
    lines = [f"longest context as the config is: {_describe_bounds(as_is)}"]
    if changed.tokens is None:
        lines = ["no context that fits was found"]
        if search.is_complete:
            lines = ["no context fits, whatever changes are made: change the batch, the model or the topology"]
    elif changed.tokens != as_is.tokens and changed.attempt is not None:
        lines += [f"longest context with changes: {_describe_bounds(changed)}:", f"  {changed.attempt.change}"]
    elif search.is_complete:
        lines.append("no change of one field makes a longer one fit")
    return lines if search.is_complete else [*lines, _out_of_time(seconds).strip()]


def _describe_bounds(bounds: Bounds) -> str:
    too_long = f" ({bounds.too_long:,} don't fit)" if bounds.too_long is not None else ""
    return ("none" if bounds.tokens is None else f"{bounds.tokens:,} tokens") + too_long


def _out_of_time(seconds: float) -> str:
    return f" (not everything was tried in the {seconds:g} s of --search-seconds)"


def comparison_table(field: str, profiles: Mapping[Variant, StepProfile]) -> list[str]:
    """A table in aligned columns with a line for each variant. Each figure has its ratio to the last variant's."""
    *_, last = profiles.values()
    lines = [[field, *_measures(last)]]
    for variant, profile in profiles.items():
        measures = zip(_measures(profile).values(), _measures(last).values(), strict=True)
        lines.append([variant.name, *(f"{name} {_ratio(value, of_last)}" for (name, value), (_, of_last) in measures)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines]


def _measures(profile: StepProfile) -> dict[str, tuple[str, float]]:
    """The columns of a comparison: each value in words, and as the number that ratios are made of (0: unknown)."""
    fit, tracing = profile.fit, profile.host.lower - profile.host.start
    return {
        "trace": (format_seconds(profile.compiled.trace_s), profile.compiled.trace_s),
        "lower": (format_seconds(profile.compiled.lower_s), profile.compiled.lower_s),
        "XLA": (format_seconds(profile.compiled.compile_s), profile.compiled.compile_s),
        "host memory added by tracing": (f"+{format_bytes(tracing)}", tracing),
        "needed on each device": ("unknown", 0)
        if fit is None
        else (f"{format_bytes(fit.needed)}{' (does not fit)' if fit.fits is False else ''}", fit.needed),
    }


def _ratio(value: float, of_last: float) -> str:
    if not value or not of_last:
        return ""
    ratio = value / of_last
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:,.0f}×"


def to_json(
    config: TrainConfig | None,
    topology: Topology | None,
    command: Sequence[str],
    *,
    profile: StepProfile | None = None,
    search: SearchResult | None = None,
    longest: LongestContext | None = None,
    field: str | None = None,
    profiles: Mapping[Variant, StepProfile] | None = None,
) -> dict[str, Any]:
    """The report as JSON's types: of one profile, and of a search; or of a comparison."""
    comparison = None
    if profiles is not None:
        variants = [
            {"value": variant.name, "arguments": list(variant.arguments), "profile": profile_to_json(of_variant)}
            for variant, of_variant in profiles.items()
        ]
        comparison = {"field": field, "variants": variants}
    return {
        "schema_version": SCHEMA_VERSION,
        "command": list(command),
        "versions": installed_versions(_DISTRIBUTIONS),
        "config": None if config is None else config_to_json(config),
        "topology": None if topology is None else topology.name,
        "profile": None if profile is None else profile_to_json(profile),
        "search": None if search is None else _search_to_json(search),
        "longest_context": None if longest is None else _longest_context_to_json(longest),
        "comparison": comparison,
    }


def profile_to_json(profile: StepProfile) -> dict[str, Any]:
    """Every number of a profile; sizes in bytes, those of memory on each device."""
    memory, fit = profile.compiled.memory, profile.fit
    compiled = None if memory is None else asdict(memory)
    if compiled is not None:
        compiled["activations_and_temporaries"] = compiled.pop("temporaries")
        compiled["needed"] = compiled.pop("peak")
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
        "compile": {
            "trace_s": profile.compiled.trace_s,
            "lower_s": profile.compiled.lower_s,
            "compile_s": profile.compiled.compile_s,
            "cache_hit": profile.compiled.cache_hit,
        },
        "program": None if profile.size is None else asdict(profile.size),
        "collectives": [_collective_to_json(total) for total in profile.collectives],
        "memory": asdict(profile.state) | (compiled or {}),
        "host_memory": asdict(profile.host),
        "verdict": None
        if fit is None
        else {
            "fits": fit.fits,
            "needed": fit.needed,
            "available": None if fit.available is None else fit.available.size,
            "available_source": None if fit.available is None else fit.available.source,
            "spare": fit.spare,
            "is_refused": fit.is_refused,
        },
    }


def _collective_to_json(total: CollectiveTotal) -> dict[str, Any]:
    values = asdict(total)
    return {"kind": values.pop("operation"), **values}


def _search_to_json(search: SearchResult) -> dict[str, Any]:
    return {
        "found": _try_to_json(search.found),
        "closest": _try_to_json(search.closest) if search.found is None else None,
        "is_complete": search.is_complete,
        "tries": [_try_to_json(attempt) for attempt in search.tries],
    }


def _longest_context_to_json(search: LongestContext) -> dict[str, Any]:
    def bounds_to_json(bounds: Bounds) -> dict[str, Any]:
        return {"tokens": bounds.tokens, "too_long": bounds.too_long, "found": _try_to_json(bounds.attempt)}

    return {
        "as_is": bounds_to_json(search.as_is),
        "changed": bounds_to_json(search.changed),
        "is_complete": search.is_complete,
        "tries": [_try_to_json(attempt) for attempt in search.tries],
    }


def _try_to_json(attempt: Try | None) -> dict[str, Any] | None:
    if attempt is None:
        return None
    return {
        "arguments": list(attempt.change.arguments),
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
            ("arguments", memory.arguments, "the three above, as laid out on the device"),
            ("outputs", memory.outputs, f"of which {format_bytes(memory.aliased)} written over arguments"),
            ("activations and temporaries", memory.temporaries, ""),
            ("code", memory.code, ""),
            ("needed", memory.peak, "the last four, less what is written over"),
        ]
        if memory.host:
            of_state = f"{format_bytes(state.optimizer_state_on_host)} of it optimizer state"
            parts.append(("on the host", memory.host, f"for each device, beside these; {of_state}"))
    width = max(len(label) for label, *_ in parts)
    sizes = [format_bytes(size) for _, size, _ in parts]
    return [
        f"{label.ljust(width)}  {size.rjust(max(map(len, sizes)))}{f'  {remark}' if remark else ''}"
        for (label, _, remark), size in zip(parts, sizes, strict=True)
    ]
