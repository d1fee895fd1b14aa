"""Finds out what multiplies the experts of a run's mixtures."""

from __future__ import annotations

from kernels import Target
from kernels.grouped_matmul import GroupedMatmulChoice, choose_grouped_matmul
from trainer.config import TrainConfig


def plan_experts(config: TrainConfig, target: Target) -> GroupedMatmulChoice | None:
    """What the layers choose on a device like `target`; None without a mixture of experts."""
    model = config.model
    if model.moe is None:
        return None
    features = model.width, model.moe.expert_width // config.mesh.tensor
    return choose_grouped_matmul(model.compute_dtype, features, target)


def describe_experts(config: TrainConfig, choice: GroupedMatmulChoice) -> list[str]:
    """A line for the experts, and on a GPU that the kernel can't serve another one for the reason."""
    moe = config.model.moe
    assert moe is not None, "there is a choice"
    lines = [f"{choice.name} for {moe.num_experts} experts of a layer, {moe.num_experts_per_token} to a token"]
    if choice.target.platform == "gpu" and choice.passed_over is not None:
        lines.append(f"  mosaic_gpu passed over: it {choice.passed_over}")
    return lines
