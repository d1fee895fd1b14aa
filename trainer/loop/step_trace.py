"""`--profile-steps 10:13`: a trace of some steps for xprof, which shows what host and devices did in them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import jax

from trainer.terminal.console import Console


class StepTrace:
    """Traces steps, from idle device to idle device. A trace that can't be written is warned of and ends no run.

    Args:
      steps: which, in a row; empty: none.
      folder: where the trace goes.
      console: shows where it lies.
      is_first: whether this is process 0, the only one to trace. The others split their steps at the same places.
    """

    def __init__(self, steps: range, folder: Path, console: Console, *, is_first: bool = True):
        self._steps, self._folder, self._console, self._is_first = steps, folder, console, is_first
        self._is_running = False

    def check(self, step: int) -> None:
        """Warns if steps that were to be traced are behind the run already.

        Args:
          step: steps that are done.
        """
        if self._steps and self._steps[0] <= step:
            self._console.warning(f"{self._described} can't be traced: the run goes on from step {step}")

    def splits(self, step: int) -> bool:
        """True if the device has to be waited for after a step, since a trace begins or ends there."""
        return bool(self._steps) and step in (self._steps[0] - 1, self._steps[-1])

    def begin_if_due(self, step: int) -> None:
        """Begins the trace if the next step is its first. The device must be idle."""
        if self._steps and step == self._steps[0] and self._is_first:
            self._is_running = self._attempt(lambda: jax.profiler.start_trace(self._folder))

    def around(self, step: int) -> contextlib.AbstractContextManager[object]:
        """Names what is dispatched inside as the step's."""
        if self._is_running:
            return jax.profiler.StepTraceAnnotation("train_step", step_num=step)
        return contextlib.nullcontext()

    def end_if_due(self, step: int) -> None:
        """Ends the trace if a step was its last. The device must be idle."""
        if self._steps and step >= self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Ends a trace that is under way."""
        if self._is_running:
            self._is_running = False
            if self._attempt(jax.profiler.stop_trace):
                self._console.note(f"{self._described} are traced in {self._folder}: xprof --logdir {self._folder}")

    @property
    def _described(self) -> str:
        return f"steps {self._steps[0]} to {self._steps[-1]}"

    def _attempt(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except Exception as error:  # of the profiler: whatever it is, the steps don't need it
            self._console.warning(f"{self._described} can't be traced in {self._folder}: {error}")
            return False
        return True
