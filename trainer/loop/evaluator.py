"""Evaluates a run when an evaluation is due, and keeps the results."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from trainer.compile.out_of_memory import running
from trainer.config import TrainConfig
from trainer.config.resume_changes import evaluation_settings
from trainer.data import Tokenizer, ValidationSet
from trainer.errors import UserMistake
from trainer.launch.signals import StopRequest
from trainer.loop.setup import Setup
from trainer.observers.observer import VALIDATION_DIGEST, Evaluated, Evaluation, LogEntry, Observers, Sampled
from trainer.observers.times import TimeAccount
from trainer.step.loss import CrossEntropy
from trainer.step.train_step import Batch, TrainState


class Evaluator:
    """Measures the validation loss of a run, and has its model continue the prompts.

    Args:
      setup: of the run: its validation batches and prompts.
      account: of the run's time.
      observers: hear of each loss and each text.
      stop: the stop signals. After one, nothing is evaluated any more.
    """

    def __init__(self, setup: Setup, account: TimeAccount, observers: Observers, stop: StopRequest):
        self._setup, self._account, self._observers, self._stop = setup, account, observers, stop
        self.evaluations: dict[int, LogEntry] = {}
        """Log entries by step, those of earlier attempts too that measured the same in the same way."""

    def take_up(self, logged: Sequence[LogEntry]) -> str | None:
        """Takes up the evaluations of earlier attempts that measured as this one does.

        Args:
          logged: their evaluations, by rising step.

        Returns:
          A line for the user if the last of them was measured otherwise.
        """
        digest = self._setup.validation_digest
        first = self._setup.phase.first_step
        of_phase = [entry for entry in logged if entry["step"] > first and entry.get(VALIDATION_DIGEST) == digest]
        self.evaluations |= {entry["step"]: entry for entry in of_phase}
        if not logged or logged[-1]["step"] <= first:  # a phase before this one
            return None
        if logged[-1].get(VALIDATION_DIGEST) in (None, digest):  # None: before 2026-11-29
            return None
        return "validation losses are measured otherwise from now on, and don't compare with those up to here"

    def enter_phase(self, setup: Setup) -> None:
        """Measures on the sequences of the next phase from now on. Losses of the phase before don't compare."""
        self._setup, self.evaluations = setup, {}

    @property
    def newest(self) -> LogEntry | None:
        """The evaluation of the highest step."""
        return self.evaluations[max(self.evaluations)] if self.evaluations else None

    def evaluate_if_due(self, step: int, eval_step: Callable[..., Any], state: TrainState) -> None:
        """Evaluates after the last step and every `evaluation.every_num_steps`, unless an earlier attempt already has.

        Args:
          step: steps behind the state.
          eval_step: `StepFunctions.eval_step`, compiled.
          state: the training state.
        """
        setup, config = self._setup, self._setup.config
        is_due = step >= setup.phase.last_step or (
            step > setup.phase.first_step and step % config.evaluation.every_num_steps == 0
        )
        if not is_due or step in self.evaluations or self._stop.requested:
            return
        with self._account.measure("evaluation"), running("eval_step"):
            result = evaluate(
                lambda params, batch: eval_step(params, batch, state.step),
                state.params,
                setup.validation_batches,
                setup.validation_bytes,
                sources=setup.validation_sources,
            )
        evaluated = Evaluated.now(step, result, setup.validation_digest, setup.phase_number)
        self.evaluations[step] = evaluated.entry
        self._observers.observe(evaluated)
        if setup.samples is not None:
            with self._account.measure("evaluation"), running("sampling"):
                for prompt, text in setup.samples.write(state.params, setup.functions.mesh):
                    self._observers.observe(Sampled(step, prompt, text))


def describe_validation(config: TrainConfig, validation: ValidationSet, tokenizer: Tokenizer) -> tuple[int | None, str]:
    """The sequences and the settings of a validation loss: they decide whether two losses compare.

    Args:
      config: of the run.
      validation: its validation sequences.
      tokenizer: of its corpus.

    Returns:
      The bytes of text that the targets stand for (None: unknown), and a digest of all that the losses of given
      parameters follow from.
    """
    num_bytes = validation.count_bytes(tokenizer)
    known = [validation.digest(), num_bytes, evaluation_settings(config)]
    return num_bytes, hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def evaluate(
    eval_step: Callable[[Any, Batch], CrossEntropy],
    params: Any,
    batches: Iterable[Batch],
    num_bytes: int | None,
    *,
    sources: Sequence[str | None] = (),
) -> Evaluation:
    """Evaluates parameters on batches. Targets count by their weights, as in training.

    Args:
      eval_step: `StepFunctions.eval_step` at a step, compiled or not.
      params: the parameters.
      batches: on the devices, sharded as `eval_step` declares.
      num_bytes: of the text that all their targets stand for; None: unknown, or the weights aren't all 1.
      sources: of a mixture: the source of each batch.

    Raises:
      UserMistake: there is no target in `batches`.
    """
    # Dispatch all batches before waiting for the first result.
    sums = jax.device_get([eval_step(params, batch) for batch in batches])
    num_targets = sum(int(each.num_targets) for each in sums)
    if num_targets == 0:
        raise UserMistake(
            f"evaluation got {len(sums)} batch(es) without a single target; "
            "give it longer validation documents or a larger data.validation_fraction"
        )
    of_source = {
        name: [each for each, own in zip(sums, sources, strict=True) if own == name]
        for name in dict.fromkeys(sources)
        if name is not None
    }
    return Evaluation(
        _mean(sums),
        math.fsum(float(each.nats) for each in sums) / math.log(2) / num_bytes if num_bytes else None,
        num_targets,
        {name: _mean(own) for name, own in of_source.items() if any(each.num_targets for each in own)},
    )


def _mean(sums: Sequence[CrossEntropy]) -> float:
    return math.fsum(float(each.nats) for each in sums) / math.fsum(float(each.weight_sum) for each in sums)
