"""What a training loop without data and without a device steps over, and what its steps tell."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.data import BatchShare
from trainer.loop.training_loop import TrainingLoop
from trainer.step.train_step import StepMetrics


class EndlessBatches:
    """Batches without documents."""

    def __next__(self):
        return BatchShare({}, (), ())

    def get_state(self):
        return {}

    def mixture(self):
        return None

    def close(self):
        pass


def make_metrics(*, loss=1.0, num_skipped=0, num_in_a_row=0) -> StepMetrics:
    """Of a step: a good one, or one that was skipped as its loss isn't finite."""
    return StepMetrics(*map(jnp.asarray, (loss, 0.0, 1.0, 1.0, 512, 512, np.isfinite(loss), num_skipped, num_in_a_row)))


def skip_updates(loop: TrainingLoop, steps: Sequence[int]) -> None:
    """Has the loop's steps tell that the updates of some were skipped."""
    counts = {"num_skipped": 0, "num_in_a_row": 0}

    def train_step(state, _):
        is_bad = loop.progress.step + 1 in steps
        counts["num_skipped"] += is_bad
        counts["num_in_a_row"] = (counts["num_in_a_row"] + 1) * is_bad
        return state, make_metrics(loss=float("nan") if is_bad else 1.0, **counts)

    loop.programs.train_step = train_step


def end_well(loop: TrainingLoop) -> None:
    """What the loop needs to train to its end."""
    loop.evaluator.evaluations |= {30: {}, 60: {"step": 60, "validation_nats_per_token": 1.0}}
    loop.setup.corpus = SimpleNamespace(unigram_nats_per_token=2.0)
    loop.setup.devices = jax.devices()


def saved(loop: TrainingLoop) -> list[str]:
    """The names in the loop's folder of checkpoints."""
    return sorted(path.name for path in loop.workdir.checkpoints.iterdir())


def record_of(loop: TrainingLoop) -> dict[str, Any]:
    return json.loads(loop.workdir.record.read_text())


def warnings_of(loop: TrainingLoop) -> list[str]:
    """The warnings on the loop's console."""
    return [lines[0] for kind, *lines in loop.console.told if kind == "warning"]
