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
    """Why the kernels can't serve each matmul, in some layer at least; None: they can, or "xla" is named."""
    sharding = ActivationSharding(mesh, collectives=config.tensor.collectives)
    rows = config.batch_size // config.gradient_accumulation
    shape, dtype = (rows, config.sequence_length, config.model.width), jnp.dtype(config.model.compute_dtype)
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
