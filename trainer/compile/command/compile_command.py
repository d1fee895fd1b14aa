"""Parses the command line: a config and flags for its fields, as for training, and what to compile for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from trainer.cli.flags import OptionParser, apply_overrides, check_phase, read_bool, read_path, require_writable
from trainer.compile.command.comparison import Comparison
from trainer.compile.topology import Topology, parse_topology
from trainer.config import TrainConfig
from trainer.errors import UserMistake
from trainer.hardware import compiling_for

PROGRAM = "python -m trainer.compile"


@dataclass(frozen=True, kw_only=True)
class CompileCommand:
    """Compiles an experiment's training step without running it or opening its data, and says whether it fits.

    Reported are the seconds to trace, lower and compile, the program's size, its collectives, and its memory by
    category against the device's. If it doesn't fit, changes are tried until one makes it fit. Of a run with phases
    each phase's step is compiled, and changes are tried for the first that doesn't fit.
    """

    config: str
    """As for training: a page's name or file, with arguments after a colon, or a run's config.json."""
    topology: str | None = None
    """Devices to compile for, which needn't be there: a TPU generation and the shape of the slice in chips, such as
    v5p:2x2x1, or NVIDIA GPUs, h100:8 on one host or h200:4x8 on four. None: this machine's devices."""
    output: Path | None = None
    """JSON file for the report."""
    compare: str | None = None
    """FIELD=A,B,C compiles the step with each of these values of a config field, afresh, and tabulates what each cost;
    config=A.py,B.py does so with pages, all with the other flags."""
    phase: int | None = None
    """Compile this phase's step alone; from 1. --compare and --longest-context need it where a run has phases."""
    longest_context: bool = False
    """Look for the longest sequence that fits: as the config is, and with other remat, loss chunks, micro-batches or
    mesh."""
    search_seconds: float = 900.0
    """Time in which to look for a change that makes it fit, or for the longest context; 0: don't look."""
    train: Annotated[TrainConfig, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Task:
    """A parsed command line."""

    options: CompileCommand
    """With the config of the first page, where pages are compared."""
    arguments: tuple[str, ...]
    """`--config FILE` and the overrides, from which the config was made; without the page where pages are compared."""
    topology: Topology | None
    comparison: Comparison | None


def parse_command_line(arguments: Sequence[str]) -> Task:
    """Reads the config file and applies the flags to it.

    Args:
      arguments: what follows `python -m trainer.compile`.

    Raises:
      UserMistake: unknown flag, ill-typed value, unknown topology, its compiler missing, an output that can't be
        written, a config file that doesn't work, or settings that can't work together.
      SystemExit: with status 0, after `--help` was printed.
    """
    options, overrides = _read_options(arguments)
    if not options.search_seconds >= 0:
        raise UserMistake(f"--search-seconds {options.search_seconds} must not be negative; 0 doesn't search")
    if options.longest_context and (options.compare is not None or options.search_seconds == 0):
        other = "--compare" if options.compare is not None else "--search-seconds 0, which doesn't search"
        raise UserMistake(f"--longest-context doesn't go with {other}; leave one of them out")
    topology = None if options.topology is None else parse_topology(options.topology)
    comparison = None if options.compare is None else Comparison.parse(options.compare)
    if comparison is not None and comparison.compares_pages:
        if options.config is not None:
            raise UserMistake(f"--compare names the pages already; leave --config {options.config} out")
        options, _ = _read_options([*arguments, *comparison.arguments(comparison.values[0])])
    if options.output is not None:
        require_writable("--output", options.output)
    with compiling_for(None if topology is None else topology.platform):
        command = apply_overrides(CompileCommand, vars(options), overrides, program=PROGRAM)
        variants = [command]
        if comparison is not None:
            lines = [_read_options([*arguments, *comparison.arguments(value)]) for value in comparison.values]
            variants = [apply_overrides(CompileCommand, vars(each), flags, program=PROGRAM) for each, flags in lines]
    for variant in variants:
        _check_phase(variant)
    if comparison is not None and not comparison.compares_pages:
        _check_comparison(comparison, variants)
    if topology is not None:
        topology.require_compiler()
    page = () if comparison is not None and comparison.compares_pages else ("--config", command.config)
    return Task(command, (*page, *overrides), topology, comparison)


def _check_phase(command: CompileCommand) -> None:
    """Checks that the phase is one of the run's, and named where there must be one."""
    number, num_phases = command.phase, len(command.train.phases)
    if number is None:
        for flag, is_given in (("--longest-context", command.longest_context), ("--compare", command.compare)):
            if is_given and num_phases:
                raise UserMistake(
                    f"{flag} expects one step, and {command.train.name} has those of {num_phases} phases; --phase 1 to "
                    f"--phase {num_phases} chooses one"
                )
    else:
        check_phase(number, command.train)


def _check_comparison(comparison: Comparison, variants: Sequence[CompileCommand]) -> None:
    """Refuses a field whose values never reach the phase."""
    number = variants[0].phase
    if number is None or all(variant.train == variants[0].train for variant in variants):
        return
    first, *others = (variant.train.in_phases()[number - 1].config for variant in variants)
    if all(other == first for other in others):
        raise UserMistake(
            f"--compare {comparison.field} expects a field that phase {number} takes from the run, and the phases set "
            "it; set it there in one page for each value, and compare the pages"
        )


def _read_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and what remains: flags of the config's fields."""
    parser = OptionParser(takes_config=True)
    parser.add_argument("--topology")
    parser.add_argument("--output", type=read_path)
    parser.add_argument("--compare")
    parser.add_argument("--phase", type=int)
    parser.add_argument("--longest-context", nargs="?", const=True, default=False, type=read_bool)
    parser.add_argument("--search-seconds", type=float, default=CompileCommand.search_seconds)
    return parser.parse_known_args(arguments)
