"""Finds out which attention backend serves each mask of a run, before anything is compiled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kernels import Mask, Selection, Target, select_backend
from kernels.call import AttentionCall
from trainer.config import TrainConfig
from trainer.errors import UserMistake


@dataclass(frozen=True)
class AttentionPlan:
    """The attention of the layers that share a mask."""

    mask: str
    """As `kernels.parse_mask` reads it."""
    num_layers: int
    backend: str
    passed_over: dict[str, str]
    """Name and reason of each faster backend that can't serve the call."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_attention(config: TrainConfig, device: jax.Device) -> tuple[AttentionPlan, ...]:
    """The backend that each mask will get, in the order of the layers.

    Args:
      config: the experiment.
      device: one of the devices that the run is compiled for.

    Raises:
      UserMistake: `model.implementation` names a backend that can't serve the call.
    """
    model = config.model
    masks = [model.masks[layer % len(model.masks)] for layer in range(model.num_layers)]
    plans = []
    for mask, num_layers in Counter(masks).items():
        call = attention_call(config, mask, Target.of(device))
        try:
            selection: Selection = select_backend(call, model.implementation)
        except ValueError as error:
            raise UserMistake(str(error)) from error
        plans.append(AttentionPlan(repr(mask), num_layers, selection.name, dict(selection.passed_over)))
    return tuple(plans)


def describe_attention(plans: Sequence[AttentionPlan]) -> list[str]:
    """One line for each mask's backend, then one for each reason why faster backends were passed over."""
    lines = []
    masks_of: dict[tuple[str, str], list[str]] = {}
    for plan in plans:
        layers = "1 layer" if plan.num_layers == 1 else f"{plan.num_layers} layers"
        lines.append(f"{plan.backend} for {layers} of {plan.mask}")
        for passed_over in plan.passed_over.items():
            masks_of.setdefault(passed_over, []).append(plan.mask)
    for (name, reason), masks in masks_of.items():
        where = "" if len(masks) == len(plans) else f" for {', '.join(masks)}"
        lines.append(f"  {name} passed over{where}: {reason}")
    return lines


def attention_call(config: TrainConfig, mask: Mask, target: Target) -> AttentionCall:
    """The call that `layers.Attention` makes on each device of the config's mesh, as the backends see it."""
    model, mesh = config.model, config.mesh
    has_positions = config.data.keep_documents_apart and not mask.translation_invariant
    return AttentionCall(
        batch=config.batch_size // config.gradient_accumulation // (mesh.data * mesh.fsdp),
        q_len=config.sequence_length // mesh.context,
        kv_len=config.sequence_length,
        num_heads=model.num_heads // mesh.tensor,
        num_kv_heads=model.num_kv_heads // mesh.tensor,
        head_dim=model.head_dim,
        value_dim=model.head_dim,
        dtype=jnp.dtype(model.compute_dtype),
        mask=mask,
        scale=1 / math.sqrt(model.head_dim),
        logits_soft_cap=model.logits_soft_cap,
        has_sinks=model.sinks,
        has_segment_ids=config.data.keep_documents_apart,
        has_query_positions=mesh.context > 1 or has_positions,
        has_key_value_positions=has_positions,
        return_lse=False,
        target=target,
    )
