"""Which steps are done, which are under way, and which waited for a program to be compiled again."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.compile.history import CompileHistory
from trainer.compile.recompilation import ArgumentChange
from trainer.compile.stages import CompileReport
from trainer.observers.observer import Advanced, Observers
from trainer.observers.times import StepTimes, TimeAccount
from trainer.terminal.units import format_seconds


class Progress:
    """Where a run is.

    Args:
      observers: hear of each step that is done, and of each recompile.
      times: of the attempt's steps.
      history: collects the recompiles.
      account: of the run's time.
    """

    def __init__(self, observers: Observers, times: StepTimes, history: CompileHistory, account: TimeAccount):
        self._observers, self._times, self._history, self._account = observers, times, history, account
        self.step = 0
        """Steps dispatched to the device, which may not have finished the last of them."""
        self._begun_step = 0
        """The last step that will be done, even if a stop is requested now."""
        self._finished_step = 0
        """The last step that the device is known to have finished."""

    def go_on_from(self, step: int) -> None:
        """All steps up to this one are done, and none is under way."""
        self.step = self._begun_step = step
        self.finish(step)

    def begin(self) -> None:
        """The next step begins."""
        self._begun_step = self.step + 1

    def finish(self, step: int | None) -> None:
        """The device has finished the steps up to this one; None: no news."""
        self._finished_step = self._finished_step if step is None else step
        self._observers.observe(Advanced(self._finished_step))

    def under_way(self) -> str:
        """The steps that a stop has to wait for before it saves. Any thread may ask."""
        num_steps, step_s = self._begun_step - self._finished_step, self._times.typical_step_s()
        if num_steps <= 0:
            return "what is under way"
        about = "" if step_s is None else f" (about {format_seconds(num_steps * step_s)})"
        return f"{num_steps} step{'s' if num_steps > 1 else ''}{about}"

    def recompiled(self, report: CompileReport, changes: Sequence[ArgumentChange]) -> None:
        """A program was compiled again, and runs next."""
        in_training = report.name == "train_step"  # a step under way isn't counted yet
        recompile = self._history.add_recompile(self.step + in_training, report, changes)
        self._account.move(recompile.seconds, "step" if in_training else "evaluation", "compile")
        self._observers.observe(recompile)
