"""Messages about updates that were skipped, and the number of them that ends a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.config import OptimizerConfig
from trainer.errors import TrainingFailed
from trainer.step.train_step import StepMetrics


def tell_skipped(metrics: Sequence[StepMetrics], first_step: int, config: OptimizerConfig) -> str | None:
    """One line about the updates of a window that were skipped; None: none was.

    Args:
      metrics: of each step, on the host.
      first_step: the number of the first of them.
      config: tells why an update is skipped.
    """
    skipped = [step for step, each in enumerate(metrics, first_step) if each.num_skipped_in_a_row]
    if not skipped:
        return None
    more = f", and {len(skipped) - 1} more up to step {skipped[-1]}" if len(skipped) > 1 else ""
    return (
        f"{_reason(metrics[skipped[0] - first_step], skipped[0], config)}, so this update is skipped{more}; "
        f"skipped in the whole run: {int(metrics[-1].num_skipped)}"
    )


def find_failure(metrics: Sequence[StepMetrics], first_step: int, config: OptimizerConfig) -> str | None:
    """Names the first step at which as many updates in a row were skipped as end the run; None: there is none."""
    for step, each in enumerate(metrics, first_step):
        if each.num_skipped_in_a_row >= config.max_skipped_in_a_row:
            number = int(each.num_skipped_in_a_row)
            return _reason(each, step, config) + (f", like the {number - 1} updates before" if number > 1 else "")
    return None


def too_many_skipped(failure: str, checkpoint: Path | None) -> TrainingFailed:
    """The error that ends a run in which too many updates in a row were skipped.

    Args:
      failure: from `find_failure`.
      checkpoint: the newest; None: there is none yet.
    """
    return TrainingFailed(
        f"{failure}, so the run stops; the last good checkpoint is {checkpoint or 'not there yet'}. "
        "A lower optimizer.learning_rate, a longer warm-up or a smaller optimizer.clip_norm may help, from there on "
        "or, in a new --workdir, from the start"
    )


def _reason(metrics: StepMetrics, step: int, config: OptimizerConfig) -> str:
    values = f"step {step}: loss {float(metrics.loss)}, gradient norm {float(metrics.grad_norm)}"
    if metrics.finite:
        return f"{values}: more than optimizer.skip_grad_norm_above={config.skip_grad_norm_above} times the recent mean"
    return f"{values}: not finite"
