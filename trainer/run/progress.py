"""Which steps are done, which are under way, and how long they take."""

from __future__ import annotations

from trainer.observers.observer import Observers
from trainer.observers.times import StepTimes
from trainer.terminal.units import format_seconds


class Progress:
    """Where a run is.

    Args:
      observers: told of each step that is done.
      times: of the attempt's steps.
    """

    def __init__(self, observers: Observers, times: StepTimes):
        self._observers, self._times = observers, times
        self.step = 0
        """Steps behind the state, of which the device may still have some to do."""
        self._begun_step = 0
        """The newest that will be done whatever is asked of the loop."""
        self._finished_step = 0
        """The newest that is known to be done."""

    def go_on_from(self, step: int) -> None:
        """Nothing is under way, and so many steps are done."""
        self.step = self._begun_step = step
        self.finish(step)

    def begin(self) -> None:
        """The next step will be made."""
        self._begun_step = self.step + 1

    def finish(self, step: int | None) -> None:
        """The device has done the steps up to this one; None: no more than is known."""
        self._finished_step = self._finished_step if step is None else step
        self._observers.advanced(self._finished_step)

    def under_way(self) -> str:
        """What a stop has to wait for before it saves; may be asked by any thread."""
        num_steps, step_s = self._begun_step - self._finished_step, self._times.typical_step_s()
        if num_steps <= 0:
            return "what is under way"
        about = "" if step_s is None else f" (about {format_seconds(num_steps * step_s)})"
        return f"{num_steps} step{'s' if num_steps > 1 else ''}{about}"
