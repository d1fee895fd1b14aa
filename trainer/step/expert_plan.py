"""Finds out what multiplies the experts of a run's mixtures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kernels import Target
from kernels.grouped_matmul import choose_grouped_matmul
from trainer.config import TrainConfig


@dataclass(frozen=True)
class ExpertPlan:
    """The experts of each layer."""

    num_experts: int
    num_experts_per_token: int
    grouped_matmul: str
    """What multiplies them, as `kernels.grouped_matmul` names it."""
    passed_over: dict[str, str]
    """On a GPU that our kernel can't serve: the kernel's name and the reason."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> list[str]:
        """A line for the experts, and one for each reason."""
        experts = f"{self.num_experts} experts of a layer, {self.num_experts_per_token} to a token"
        reasons = [f"  {name} passed over: it {reason}" for name, reason in self.passed_over.items()]
        return [f"{self.grouped_matmul} for {experts}", *reasons]


def plan_experts(config: TrainConfig, target: Target) -> ExpertPlan | None:
    """What the layers choose on a device like `target`; None without a mixture of experts."""
    model = config.model
    if model.moe is None:
        return None
    features = model.width, model.moe.expert_width // config.mesh.tensor
    choice = choose_grouped_matmul(model.compute_dtype, features, target)
    reason = choice.passed_over if target.platform == "gpu" else None
    passed_over = {} if reason is None else {"mosaic_gpu": reason}
    return ExpertPlan(model.moe.num_experts, model.moe.num_experts_per_token, choice.name, passed_over)
