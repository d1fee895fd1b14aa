"""When a run evaluates, and what its evaluations have found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer.compile.out_of_memory import running
from trainer.evaluate import evaluate
from trainer.observers.observer import Evaluated, LogEntry, Observers
from trainer.observers.times import TimeAccount
from trainer.process.signals import StopRequest
from trainer.run.setup import Setup
from trainer.step.functions import TrainState


class Evaluator:
    """Measures the validation loss of a run, and has its model continue the prompts.

    Args:
      setup: of the run: its validation batches and prompts.
      account: of the run's time.
      observers: told of each loss and each text.
      stop: the stop signals. After one, nothing is evaluated any more.
    """

    def __init__(self, setup: Setup, account: TimeAccount, observers: Observers, stop: StopRequest):
        self._setup, self._account, self._observers, self._stop = setup, account, observers, stop
        self.evaluations: dict[int, LogEntry] = {}
        """Log entries by step, those of earlier attempts too."""

    @property
    def newest(self) -> LogEntry | None:
        """The evaluation of the highest step."""
        return self.evaluations[max(self.evaluations)] if self.evaluations else None

    def evaluate_if_due(self, step: int, eval_step: Callable[..., Any], state: TrainState) -> None:
        """Evaluates after the last step and every so many steps, unless an earlier attempt already has.

        Args:
          step: steps behind the state.
          eval_step: `StepFunctions.eval_step`, compiled.
          state: the training state.
        """
        setup, config = self._setup, self._setup.config
        is_due = step >= config.num_steps or (step > 0 and step % config.evaluation.every_num_steps == 0)
        if not is_due or step in self.evaluations or self._stop.requested:
            return
        with self._account.measure("evaluation"), running("eval_step"):
            result = evaluate(eval_step, state.params, setup.validation_batches, setup.corpus.bytes_per_token)
        evaluated = Evaluated.now(step, result)
        self.evaluations[step] = evaluated.entry
        self._observers.evaluated(evaluated)
        if setup.samples is not None:
            with self._account.measure("evaluation"), running("sampling"):
                for prompt, text in setup.samples.write(state.params, setup.functions.mesh):
                    self._observers.sampled(step, prompt, text)
