"""Compiles the training step of a config, and gathers what is known about it without running it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from trainer.compile.collectives import CollectiveTotal, count_collectives
from trainer.compile.fit import Fit, StateMemory, device_memory, parse_refusal, state_memory
from trainer.compile.hlo import parse_module
from trainer.compile.stages import CompileReport, compile_lowering, lower_in_stages
from trainer.config import TrainConfig
from trainer.errors import TrainingFailed
from trainer.step.functions import make_step_functions
from trainer.step.plan import Plan, make_plan
from trainer.step.sharding import make_mesh


@dataclass(frozen=True)
class ProgramSize:
    """Sizes of the program before and after the compiler."""

    stablehlo_bytes: int
    """Of the text that XLA gets."""
    hlo_bytes: int
    """Of the optimized HLO's text."""
    num_hlo_instructions: int


@dataclass(frozen=True)
class StepProfile:
    """A training step that was compiled, or refused for lack of memory: its plan, costs and sizes."""

    platform: str
    device_kind: str
    num_devices: int
    """Devices that there are."""
    mesh: dict[str, int]
    """Sizes of the axes; their product is the number of devices used."""
    num_parameters: int
    tokens_per_step: int
    plan: Plan
    compiled: CompileReport
    """The cost of compiling. If the program was refused: the time until then, and no memory."""
    size: ProgramSize | None
    """None: refused."""
    collectives: tuple[CollectiveTotal, ...]
    state: StateMemory
    fit: Fit | None
    """None: the backend can't tell what the program takes."""

    @property
    def num_devices_used(self) -> int:
        return math.prod(self.mesh.values())


def profile_step(config: TrainConfig, devices: Sequence[Any] | None = None, *, schedule_from: int = 0) -> StepProfile:
    """Traces, lowers and compiles the training step of a config. No data is opened and nothing is run.

    Args:
      config: the experiment, or that of a phase.
      devices: what to compile for; the mesh takes the first of them. None: JAX's own.
      schedule_from: as `RunPhase.schedule_from`, so that the run finds the same program in the cache.

    Raises:
      UserMistake: the mesh doesn't fit the devices, or what the config names for attention, `tensor` or the loss can't
        serve.
      TrainingFailed: the devices can't be started, or the compiler fails for another reason than memory.
    """
    num_needed = config.mesh.data * config.mesh.fsdp * config.mesh.tensor * config.mesh.context
    mesh = make_mesh(config.mesh, devices if devices is None else devices[:num_needed])
    device = mesh.devices.flat[0]
    plan = make_plan(config, mesh)
    functions = make_step_functions(config, mesh, plan, schedule_from=schedule_from)
    lowering = lower_in_stages(functions.train_step, functions.abstract_state, functions.abstract_batch)
    begun = time.perf_counter()
    program: jax.stages.Compiled | None = None
    try:
        program, compiled = compile_lowering(lowering, name="train_step")
        fit = None if compiled.memory is None else Fit(compiled.memory.peak, device_memory(device, mesh.size))
    except jax.errors.JaxRuntimeError as error:
        fit = parse_refusal(str(error))
        if fit is None:
            raise TrainingFailed(f"the compiler failed: {_first_lines(str(error))}") from error
        refused_after_s = time.perf_counter() - begun
        compiled = CompileReport("train_step", lowering.trace_s, lowering.lower_s, refused_after_s, False, None)
    size: ProgramSize | None = None
    collectives: tuple[CollectiveTotal, ...] = ()
    if program is not None:
        text = program.as_text() or ""
        module = parse_module(text)
        size = ProgramSize(len(lowering.lowered.as_text()), len(text), module.num_instructions)
        collectives = count_collectives(module)
    return StepProfile(
        platform=device.platform,
        device_kind=device.device_kind,
        num_devices=len(jax.devices() if devices is None else devices),
        mesh=dict(mesh.shape),
        num_parameters=functions.num_parameters,
        tokens_per_step=config.batch_size * config.sequence_length,
        plan=plan,
        compiled=compiled,
        size=size,
        collectives=collectives,
        state=state_memory(functions),
        fit=fit,
    )


def _first_lines(message: str, num_lines: int = 6, width: int = 300) -> str:
    """The first lines of a compiler's error, cut to a readable size."""
    lines = [line[:width] for line in message.splitlines() if line.strip()]
    return "\n  ".join(lines[:num_lines] + (["…"] if len(lines) > num_lines else []))
