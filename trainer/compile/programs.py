"""Compiles the programs of a run: each once, before its first use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.compile.out_of_memory import running
from trainer.compile.recompilation import OnRecompile, RecompilingFunction
from trainer.compile.stages import CompileReport, compile_in_stages
from trainer.step.functions import StepFunctions
from trainer.step.train_step import TrainState


@dataclass(frozen=True)
class CompiledSteps:
    """The compiled programs of a run. They are compiled again only if their arguments change."""

    init_state: Callable[..., TrainState] | None
    """Takes the parameters if there are any already. None if the state comes from a checkpoint."""
    train_step: RecompilingFunction
    eval_step: RecompilingFunction
    reports: tuple[CompileReport, ...]

    @property
    def is_compiling(self) -> bool:
        """True while one of them is being compiled again. Any thread may ask."""
        return self.train_step.is_compiling or self.eval_step.is_compiling


def compile_steps(
    functions: StepFunctions, *, with_init: bool, with_params: bool = False, on_recompile: OnRecompile
) -> CompiledSteps:
    """Compiles each program of a run once, before its first use.

    Args:
      functions: of the run.
      with_init: whether the state has to be initialised.
      with_params: whether it begins with parameters that there are already, instead of random ones.
      on_recompile: called when a program was compiled again.

    Raises:
      OutOfMemory: the compiler finds that one doesn't fit in the devices' memory.
    """
    state = functions.abstract_state
    init_state, reports = None, []
    if with_init:
        with running("init_state"):
            init, arguments = (functions.begin_state, [state.params]) if with_params else (functions.init_state, [])
            init_state, report = compile_in_stages(init, *arguments, name="init_state")
        reports.append(report)
    with running("train_step"):
        train_step = RecompilingFunction(
            functions.train_step, state, functions.abstract_batch, name="train_step", on_recompile=on_recompile
        )
    with running("eval_step"):
        batch = functions.abstract_eval_batch
        eval_step = RecompilingFunction(
            functions.eval_step, state.params, batch, name="eval_step", on_recompile=on_recompile
        )
    return CompiledSteps(init_state, train_step, eval_step, (*reports, train_step.report, eval_step.report))
