"""Finds out what computes a run's loss under differentiation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import jax.numpy as jnp

from kernels import Target
from kernels.exp_logits import ExpLogits, unsupported_reason
from trainer.config import LossImplementation, TrainConfig
from trainer.errors import UserMistake


@dataclass(frozen=True)
class LossPlan:
    """What the head's matmul leaves for the gradient."""

    implementation: LossImplementation
    passed_over: dict[str, str]
    """On a GPU that the kernel can't serve: its name and the reason."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> list[str]:
        """A line for what is computed, and one for each reason."""
        what = "exponentials of logits" if self.implementation == "mosaic_gpu" else "logits"
        reasons = [f"  {name} passed over: it {reason}" for name, reason in self.passed_over.items()]
        return [f"{self.implementation}, {what} in chunks", *reasons]

    def exp_logits(self, target: Target) -> ExpLogits | None:
        """The kernel, for a device like `target`; None: XLA computes logits."""
        return ExpLogits(target) if self.implementation == "mosaic_gpu" else None


def plan_loss(config: TrainConfig, target: Target) -> LossPlan:
    """What serves a model's head on a device like `target`.

    Raises:
      UserMistake: `loss.implementation` names the kernel, which can't serve, with the reason.
    """
    model, named = config.model, config.loss.implementation
    if named == "xla":
        return LossPlan("xla", {})
    reason = unsupported_reason(jnp.dtype(model.compute_dtype), model.width, model.vocab_size, target)
    if reason is None:
        return LossPlan("mosaic_gpu", {})
    if named is not None:
        raise UserMistake(f"loss.implementation={named!r} can't serve: it {reason}; use 'xla', or name none")
    return LossPlan("xla", {"mosaic_gpu": reason} if target.platform == "gpu" else {})
