"""Finds out what computes a run's loss under differentiation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax.numpy as jnp

from kernels import Target
from kernels.exp_logits import ExpLogits, unsupported_reason
from layers import GPTConfig


@dataclass(frozen=True)
class LossPlan:
    """What the head's matmul leaves for the gradient."""

    implementation: Literal["mosaic_gpu", "xla"]
    """mosaic_gpu: exponentials, by our kernel. xla: logits."""
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


def plan_loss(model: GPTConfig, target: Target) -> LossPlan:
    """What serves a model's head on a device like `target`."""
    reason = unsupported_reason(jnp.dtype(model.compute_dtype), model.width, model.vocab_size, target)
    if reason is None:
        return LossPlan("mosaic_gpu", {})
    return LossPlan("xla", {"mosaic_gpu": reason} if target.platform == "gpu" else {})
