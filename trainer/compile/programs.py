"""Compiles the programs of a run: each once, before its first use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer.compile.out_of_memory import running
from trainer.compile.recompilation import OnRecompile, RecompilingFunction
from trainer.compile.stages import CompileReport, Lowering, compile_in_stages, lower_in_stages
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


@dataclass(frozen=True)
class LoweredSteps:
    """The programs of the steps, lowered and not yet compiled."""

    functions: StepFunctions
    train_step: Lowering
    eval_step: Lowering


def lower_steps(functions: StepFunctions) -> LoweredSteps:
    """Lowers the programs of the steps, which holds Python up, unlike XLA's part."""
    state = functions.abstract_state
    return LoweredSteps(
        functions,
        lower_in_stages(functions.train_step, state, functions.abstract_batch),
        lower_in_stages(functions.eval_step, state.params, functions.abstract_eval_batch, state.step),
    )


def compile_steps(
    functions: StepFunctions,
    *,
    with_init: bool,
    with_params: bool = False,
    on_recompile: OnRecompile,
    lowered: LoweredSteps | None = None,
) -> CompiledSteps:
    """Compiles each program of a run once, before its first use.

    Args:
      functions: of the run.
      with_init: whether the state has to be initialised.
      with_params: whether it begins with parameters that there are already, instead of random ones.
      on_recompile: called when a program was compiled again.
      lowered: of the same functions; None: they are lowered here.

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
            functions.train_step,
            state,
            functions.abstract_batch,
            name="train_step",
            on_recompile=on_recompile,
            lowering=None if lowered is None else lowered.train_step,
        )
    with running("eval_step"):
        eval_step = RecompilingFunction(
            functions.eval_step,
            state.params,
            functions.abstract_eval_batch,
            state.step,
            name="eval_step",
            on_recompile=on_recompile,
            lowering=None if lowered is None else lowered.eval_step,
        )
    return CompiledSteps(init_state, train_step, eval_step, (*reports, train_step.report, eval_step.report))


class AheadOfTime:
    """Compiles the programs of later phases beside the steps of earlier ones, in the order of the phases.

    Args:
      functions: of each later phase, by its index. They are lowered here and now.
      on_recompile: called when a program was compiled again.
    """

    def __init__(self, functions: Mapping[int, StepFunctions], on_recompile: OnRecompile):
        self._lowered = {index: lower_steps(functions[index]) for index in sorted(functions)}
        self._on_recompile = on_recompile
        self._compiled: dict[int, CompiledSteps | Exception] = {}
        self._done, self._is_closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._compile_all, name="compile-ahead")
        if self._lowered:
            self._thread.start()

    def take(self, index: int) -> CompiledSteps:
        """The programs of a phase, waited for if need be. Each phase's are taken once.

        Raises:
          OutOfMemory: the compiler finds that one doesn't fit in the devices' memory.
        """
        with self._done:
            self._done.wait_for(lambda: index in self._compiled)
            compiled = self._compiled.pop(index)
        if isinstance(compiled, Exception):
            raise compiled
        return compiled

    def close(self) -> None:
        """Waits for the phase that is being compiled, since Python can't end amid XLA, and compiles no further one."""
        self._is_closed = True
        if self._thread.is_alive():
            self._thread.join()

    def _compile_all(self) -> None:
        for index, lowered in self._lowered.items():
            if self._is_closed:
                return
            compiled: CompiledSteps | Exception
            try:
                compiled = compile_steps(
                    lowered.functions, with_init=False, on_recompile=self._on_recompile, lowered=lowered
                )
            except Exception as error:  # raised where the phase begins
                compiled = error
            with self._done:
                self._compiled[index] = compiled
                self._done.notify_all()
