"""How an attempt ends that ends well: completed, or stopped after saving."""

from __future__ import annotations

from pathlib import Path

import jax

from trainer.launch.process_exit import COMPLETED, PREEMPTED
from trainer.loop.evaluator import Evaluator
from trainer.loop.setup import Setup
from trainer.observers.observer import Ending, Observers
from trainer.observers.record import measured_memory


def tell_ending(
    observers: Observers, setup: Setup, step: int, evaluator: Evaluator, newest_checkpoint: Path | None
) -> int:
    """Tells the observers how the attempt ended, and returns its exit status.

    Args:
      observers: of the run.
      setup: of the run.
      step: steps that are done.
      evaluator: holds the evaluations. A run is completed once its last step is evaluated.
      newest_checkpoint: None: there was nothing to save.
    """
    is_completed = step >= setup.config.num_steps and step in evaluator.evaluations
    observers.stopped()
    observers.finished(
        Ending(
            status="completed" if is_completed else "preempted",
            step=step,
            checkpoint=newest_checkpoint,
            evaluation=evaluator.newest,
            unigram_nats_per_token=setup.corpus.unigram_nats_per_token,
            memory=measured_memory(jax.local_devices()[0]),
        )
    )
    return COMPLETED if is_completed else PREEMPTED
