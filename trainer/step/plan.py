"""The plan of a run's step: what serves attention, experts, tensor parallelism and loss on the devices of a mesh.

The plan is made once, after the mesh. The opening lines and the record show it, and the step functions follow it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from kernels import Target
from kernels.collectives import Collectives
from kernels.context import SequenceSharding
from kernels.experts import choose_grouped_matmul
from kernels.loss.exp_logits import ExpLogits, unsupported_reason
from layers import ActivationSharding
from trainer.config import LossImplementation, TrainConfig
from trainer.errors import UserMistake
from trainer.step.attention_plan import AttentionPlan, describe_attention, plan_attention, plan_context_parallelism


@dataclass(frozen=True)
class Plan:
    """The choices for a config on the devices of a mesh."""

    target: Target
    """The devices."""
    sequence_sharding: SequenceSharding
    """The tokens of a sequence that each rank of `mesh.context` holds."""
    attention: tuple[AttentionPlan, ...]
    """Backend and exchange of each distinct call, in the order of the layers."""
    experts: ExpertPlan | None
    """None: no mixture of experts."""
    tensor: TensorPlan | None
    """None: nothing is split over `mesh.tensor`."""
    loss: LossPlan

    def to_json(self) -> dict[str, Any]:
        """The description in the run record."""
        return {
            "attention": [plan.to_json() for plan in self.attention],
            "experts": None if self.experts is None else self.experts.to_json(),
            "tensor": None if self.tensor is None else self.tensor.to_json(),
            "loss": self.loss.to_json(),
        }

    def describe(self) -> dict[str, str | list[str]]:
        """The description in the opening lines: lines by name."""
        return {
            "attention": describe_attention(self.attention),
            **({} if self.experts is None else {"experts": self.experts.describe()}),
            **({} if self.tensor is None else {"tensor": self.tensor.describe()}),
            **({"loss": self.loss.describe()} if self.target.platform == "gpu" else {}),
        }


def make_plan(config: TrainConfig, mesh: Mesh) -> Plan:
    """Makes the plan of a config.

    Args:
      config: the experiment.
      mesh: from `make_mesh(config.mesh)`.

    Raises:
      UserMistake: `context`, `model.implementation`, `tensor.collectives` or `loss.implementation` names what can't
        serve, with the reason.
    """
    target = Target.of(mesh.devices.flat[0])
    context = plan_context_parallelism(config, mesh)
    return Plan(
        target,
        "contiguous" if context is None else context.sequence_sharding,
        plan_attention(config, mesh, context),
        plan_experts(config, target),
        plan_tensor(config, mesh),
        plan_loss(config, target),
    )


@dataclass(frozen=True)
class ExpertPlan:
    """The experts of each layer."""

    num_experts: int
    num_experts_per_token: int
    grouped_matmul: str
    """The implementation that multiplies them, as `kernels.experts` names it."""
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
    """The layers' choice on a device like `target`; None without a mixture of experts."""
    model = config.model
    if model.moe is None:
        return None
    features = model.width, model.moe.expert_width // config.mesh.tensor
    choice = choose_grouped_matmul(model.compute_dtype, features, target)
    reason = choice.passed_over if target.platform == "gpu" else None
    passed_over = {} if reason is None else {"mosaic_gpu": reason}
    return ExpertPlan(model.moe.num_experts, model.moe.num_experts_per_token, choice.name, passed_over)


@dataclass(frozen=True)
class TensorPlan:
    """The collectives over `mesh.tensor`: tokens to the layers' first matmuls, and sums of products back to tokens."""

    collectives: Collectives
    """As `kernels.collectives` names them."""
    xla_for: tuple[str, ...]
    """The matmuls that XLA's collectives serve beside the kernels, in some layers at least."""
    passed_over: dict[str, str]
    """On a GPU where the kernels can't serve some matmuls: their name and the reason."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> list[str]:
        """A line for what is chosen, and one for each reason."""
        beside = f", xla for {', '.join(self.xla_for)}" if self.xla_for else ""
        reasons = [f"  {name} passed over: it {reason}" for name, reason in self.passed_over.items()]
        return [f"{self.collectives}{beside}", *reasons]


def plan_tensor(config: TrainConfig, mesh: Mesh) -> TensorPlan | None:
    """The layers' choice on a mesh; None where nothing is split over `tensor`.

    Args:
      config: the experiment.
      mesh: from `make_mesh(config.mesh)`.

    Raises:
      UserMistake: `tensor.collectives` names what can't serve, with the reason.
    """
    if mesh.shape["tensor"] == 1:
        return None
    reasons = _refusals(config, mesh)
    served = [matmul for matmul, reason in reasons.items() if reason is None]
    by_kernels = bool(served) and config.tensor.collectives != "xla"
    by_xla = [matmul for matmul in reasons if matmul not in served]
    by_xla += ["experts"] if config.model.moe is not None else []
    refusals = [reason for reason in reasons.values() if reason is not None]
    is_shown = refusals and config.tensor.collectives is None and mesh.devices.flat[0].platform == "gpu"
    return TensorPlan(
        "mosaic_gpu" if by_kernels else "xla",
        tuple(by_xla) if by_kernels else (),
        {"mosaic_gpu": refusals[0]} if is_shown else {},
    )


def _refusals(config: TrainConfig, mesh: Mesh) -> dict[str, str | None]:
    """Why the kernels can't serve each matmul, in some layer at least; None: they can, or "xla" is named."""
    sharding = ActivationSharding(mesh, collectives=config.tensor.collectives)
    micro_batch_size = config.batch_size // config.gradient_accumulation
    shape, dtype = (micro_batch_size, config.sequence_length, config.model.width), jnp.dtype(config.model.compute_dtype)
    reasons: dict[str, str | None] = {}
    for matmul, features in _matmuls(config):
        try:
            chosen = sharding.choose_collectives(shape, features, dtype)
        except ValueError as error:
            raise UserMistake(f"tensor.{error}") from error
        undivided = f"is for tokens that the mesh divides, not for {config.sequence_length} of a sequence"
        reasons[matmul] = reasons.get(matmul) or (undivided if chosen is None else chosen.passed_over)
    return reasons


def _matmuls(config: TrainConfig) -> list[tuple[str, list[tuple[int, ...]]]]:
    """The layers' matmuls over `tensor`, each with the dims of its matrices' features on all ranks."""
    model = config.model
    matmuls: list[tuple[str, list[tuple[int, ...]]]] = []
    for layer in model.layer_counts:
        heads, kv_heads = (model.num_heads, layer.head_dim), (layer.num_kv_heads, layer.head_dim)
        matmuls += [("attention", [heads, kv_heads, kv_heads]), ("attention's output", [heads])]
    if model.moe is None:
        num_projections = 1 if model.mlp == "gelu" else 2
        matmuls += [("MLP", [(model.mlp_width,)] * num_projections), ("MLP's output", [(model.mlp_width,)])]
    return matmuls


@dataclass(frozen=True)
class LossPlan:
    """The cross-entropy of a step under differentiation: what the head's matmul stores for the gradient."""

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
    """The loss of a model's head on a device like `target`.

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
