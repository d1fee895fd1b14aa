"""Measures the loss on a fixed set of validation batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax

from trainer.errors import UserMistake
from trainer.step.functions import Batch


@dataclass(frozen=True)
class Evaluation:
    """Loss over all validation targets."""

    nats_per_token: float
    """Mean negative log-likelihood of a target."""
    bits_per_byte: float | None
    """Bits per byte of text, which don't depend on the tokenizer; None if the text isn't known."""
    num_targets: int
    """Tokens predicted."""


def evaluate(
    eval_step: Callable[[Any, Batch], tuple[jax.Array, jax.Array]],
    params: Any,
    batches: Iterable[Batch],
    bytes_per_token: float | None,
) -> Evaluation:
    """Evaluates parameters on batches. Every target has the same weight.

    Args:
      eval_step: `StepFunctions.eval_step`, compiled or not.
      params: the parameters.
      batches: on the devices, sharded as `eval_step` declares.
      bytes_per_token: mean bytes of text that one target stands for, or None.

    Raises:
      UserMistake: there is no target in `batches`.
    """
    # Dispatch all batches before waiting for the first result.
    sums = jax.device_get([eval_step(params, batch) for batch in batches])
    nats = math.fsum(float(nats) for nats, _ in sums)
    num_targets = sum(int(count) for _, count in sums)
    if num_targets == 0:
        raise UserMistake(
            f"evaluation got {len(sums)} batch(es) without a single target; "
            "give it longer validation documents or a larger data.validation_fraction"
        )
    nats_per_token = nats / num_targets
    bits_per_byte = None if bytes_per_token is None else nats_per_token / math.log(2) / bytes_per_token
    return Evaluation(nats_per_token, bits_per_byte, num_targets)
