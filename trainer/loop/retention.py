"""Which checkpoints a run keeps beside its newest ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config import CheckpointConfig
from trainer.observers.observer import VALIDATION_LOSS


def spared_steps(
    steps: Sequence[int], config: CheckpointConfig, evaluations: Mapping[int, Mapping[str, Any]]
) -> set[int]:
    """The steps whose checkpoints are kept however old they are.

    Args:
      steps: of all checkpoints, ascending.
      config: says which are kept.
      evaluations: log entries by step, of losses that compare. Another thread may add to them meanwhile.

    >>> losses = {step: {VALIDATION_LOSS: loss} for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5), (40, None))}
    >>> sorted(spared_steps([10, 20, 30, 40, 50], CheckpointConfig(5, 1, 25, True), losses))
    [20, 50]
    """
    every = config.keep_every_num_steps
    spared = {step for step in steps if every is not None and step % every == 0}
    if config.keep_best:
        losses = {step: evaluations[step][VALIDATION_LOSS] for step in steps if step in evaluations}
        finite = {step: loss for step, loss in losses.items() if loss is not None}
        spared |= {min(finite, key=finite.__getitem__)} if finite else set()
    return spared
