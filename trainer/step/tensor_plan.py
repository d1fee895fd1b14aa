"""Finds out how a run's tokens get to the other ranks of `mesh.tensor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from kernels.collectives import Collectives
from layers import ActivationSharding
from trainer.config import TrainConfig
from trainer.errors import UserMistake


@dataclass(frozen=True)
class TensorPlan:
    """How tokens get to the layers' first matmuls, which `mesh.tensor` splits, and sums of products back to tokens."""

    collectives: Collectives
    """How, as `kernels.collectives` names it."""
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
    """What the layers choose on a mesh; None where nothing is split over `tensor`.

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
    told = [reason for reason in reasons.values() if reason is not None]
    is_told = told and config.tensor.collectives is None and mesh.devices.flat[0].platform == "gpu"
    return TensorPlan(
        "mosaic_gpu" if by_kernels else "xla",
        tuple(by_xla) if by_kernels else (),
        {"mosaic_gpu": told[0]} if is_told else {},
    )


def _refusals(config: TrainConfig, mesh: Mesh) -> dict[str, str | None]:
    """Why the kernels can't serve each matmul in some layer; None: they can, unless XLA's collectives are named."""
    sharding = ActivationSharding(mesh, collectives=config.tensor.collectives)
    sizes, length, dtype = mesh.shape, config.sequence_length, jnp.dtype(config.model.compute_dtype)
    num_parts = sizes["context"] * sizes["tensor"]
    if not sharding.shares_tokens_out(length):
        reason = (
            f"is for tokens that ranks share out, and sequence_length={length} is not a multiple of "
            f"mesh.context × mesh.tensor = {num_parts}"
        )
        if config.tensor.collectives == "mosaic_gpu":
            raise UserMistake(
                f"tensor.collectives='mosaic_gpu' can't serve: it {reason}; use sequence_length="
                f"{-(-length // num_parts) * num_parts}, or 'xla', or None for the fastest"
            )
        return {"attention": reason}
    batch = config.batch_size // config.gradient_accumulation // (sizes["data"] * sizes["fsdp"])
    part = batch, length // num_parts, config.model.width
    reasons: dict[str, str | None] = {}
    for matmul, features in _matmuls(config):
        try:
            chosen = sharding.choose_collectives(part, [size // sizes["tensor"] for size in features], dtype)
        except ValueError as error:
            raise UserMistake(f"tensor.{error}") from error
        reasons[matmul] = reasons.get(matmul) or chosen.passed_over
    return reasons


def _matmuls(config: TrainConfig) -> list[tuple[str, tuple[int, ...]]]:
    """The layers' matmuls over `tensor`, each with the features of its matrices on all ranks."""
    model = config.model
    matmuls: list[tuple[str, tuple[int, ...]]] = []
    for layer in model.layer_counts:
        heads, kv_heads = model.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        matmuls += [("attention", (heads, kv_heads, kv_heads)), ("attention's output", (heads,))]
    if model.moe is None:
        matmuls += [("MLP", (model.mlp_width,)), ("MLP's output", (model.mlp_width,))]
    return matmuls
