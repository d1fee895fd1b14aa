"""Plans which attention backend serves each layer of a run, and how ranks of `mesh.context` get at their keys."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kernels import Selection, Target, select_backend
from kernels.call import AttentionCall
from kernels.collectives import peer_memory
from kernels.context import ContextPlan, SequenceSharding, Split, kernel_call, plan_context
from kernels.masks.bounds import BoundName
from layers.attention import means_indices
from layers.layer_config import LayerConfig
from trainer.config import TrainConfig
from trainer.errors import UserMistake
from trainer.terminal.units import format_bytes


@dataclass(frozen=True)
class ExchangePlan:
    """How the ranks of `mesh.context` get at their keys in layers that make the same call."""

    name: str
    """all_gather, peer, halo, ring or all_to_all."""
    sequence_sharding: str
    """contiguous, zigzag or balanced."""
    received_bytes: tuple[int, int]
    """Bytes that a device receives in a layer, forward and backward."""
    held_bytes: int
    """Bytes that a device holds at most, of other ranks' keys and values or their gradients."""
    refusals: dict[str, str]
    """Name and reason of each exchange that doesn't."""
    is_of_few_gpus: bool = False
    """True: the mesh has so few GPUs that they may read each other's memory."""


@dataclass(frozen=True)
class AttentionPlan:
    """The attention of the layers that make the same call: they share a mask, and the sizes of their heads."""

    mask: str
    """As `kernels.parse_mask` reads it."""
    num_layers: int
    backend: str
    passed_over: dict[str, str]
    """Name and reason of each faster backend that can't serve the call."""
    exchange: ExchangePlan | None = None
    """None: each device holds whole sequences."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_context_parallelism(config: TrainConfig, mesh: Mesh | None) -> ContextPlan | None:
    """Plans how each sequence is sharded over `mesh.context`, and how keys are exchanged.

    Args:
      config: the experiment.
      mesh: of the devices that the run is compiled for; None: before they are known, to refuse what none can do.

    Returns:
      None: each device holds whole sequences.

    Raises:
      UserMistake: the sequence can't be sharded as `context` says, or the exchange can't serve a mask, or JAX can't
        run it right on these devices.
    """
    if config.mesh.context == 1:
        return None
    context = config.context
    if mesh is None:
        target = Target("cpu", "cpu")
        peer_refusal = peer_memory.sizes_unsupported_reason(asdict(config.mesh), "context")
    else:
        target = Target.of(mesh.devices.flat[0])
        peer_refusal = peer_memory.unsupported_reason(mesh, "context")
    try:
        plan = plan_context(
            attention_calls(config, target),
            "context",
            config.mesh.context,
            sequence_sharding=context.sequence_sharding,
            exchange=context.exchange,
            implementation=config.model.implementation,
            peer_refusal=peer_refusal,
        )
    except ValueError as error:
        raise UserMistake(f"context: {error}") from error
    if mesh is not None and target.platform == "cpu" and any(chosen.name == "ring" for chosen in plan.exchanges):
        _check_ring_on_cpus(config)
    return plan


def _check_ring_on_cpus(config: TrainConfig) -> None:
    """Refuses rings of which newer runtimes for CPUs run two at a time, and mix up what they send.

    Seen in JAX 0.11.2 and 0.12.0.1, not in 0.10.2: gradients that differ from run to run, or a crash.
    """
    is_affected = jax.__version_info__ >= (0, 11)
    if is_affected and config.model.remat != "none" and config.gradient_accumulation > 1:
        raise UserMistake(
            f"context: exchange='ring' beside model.remat={config.model.remat!r} and "
            f"gradient_accumulation={config.gradient_accumulation} has wrong gradients on CPU devices with JAX "
            f"{jax.__version__}; use --gradient-accumulation 1, --model.remat none or JAX 0.10.2"
        )


def plan_attention(config: TrainConfig, mesh: Mesh, context: ContextPlan | None) -> tuple[AttentionPlan, ...]:
    """Plans the backend and the exchange of each distinct call, in the order of the layers.

    Args:
      config: the experiment.
      mesh: of the devices that the run is compiled for.
      context: from `plan_context_parallelism`.

    Raises:
      UserMistake: `model.implementation` names a backend that can't serve the call.
    """
    target = Target.of(mesh.devices.flat[0])
    sequence_sharding: SequenceSharding = "contiguous" if context is None else context.sequence_sharding
    split = Split.of("context", config.mesh.context, sequence_sharding, config.sequence_length)
    plans = []
    for index, (call, num_layers) in enumerate(attention_calls(config, target).items()):
        mask, exchange = call.mask, None
        if context is not None:
            chosen = context.exchanges[index]
            cost = chosen.costs[chosen.name]
            exchange = ExchangePlan(
                chosen.name,
                sequence_sharding,
                (round(cost.received_bytes[0]), round(cost.received_bytes[1])),
                round(cost.held_bytes),
                dict(chosen.refusals.items()),
                target.platform == "gpu" and mesh.size <= peer_memory.MOST_RANKS,
            )
            call = kernel_call(chosen.name, call, split)
        try:
            selection: Selection = select_backend(call, config.model.implementation)
        except ValueError as error:
            raise UserMistake(str(error)) from error
        plans.append(AttentionPlan(repr(mask), num_layers, selection.name, dict(selection.passed_over), exchange))
    return tuple(plans)


def describe_attention(plans: Sequence[AttentionPlan]) -> list[str]:
    """Lines for each mask's backend and exchange, then one for each reason why faster backends were passed over."""
    lines = []
    masks_of: dict[tuple[str, str], list[str]] = {}
    for plan in plans:
        layers = "1 layer" if plan.num_layers == 1 else f"{plan.num_layers} layers"
        lines.append(f"{plan.backend} for {layers} of {plan.mask}")
        for passed_over in plan.passed_over.items():
            masks_of.setdefault(passed_over, []).append(plan.mask)
        lines += _describe_exchange(plan.exchange)
        # Which GPUs read each other's memory isn't a matter of the mask, and is worth knowing only on a few of them.
        if plan.exchange is not None and plan.exchange.is_of_few_gpus and "peer" in plan.exchange.refusals:
            masks_of.setdefault(("peer", plan.exchange.refusals["peer"]), []).append(plan.mask)
    for (name, reason), masks in masks_of.items():
        where = "" if len(masks) == len(plans) else f" for {', '.join(masks)}"
        lines.append(f"  {name} passed over{where}: {reason}")
    return lines


def _describe_exchange(plan: ExchangePlan | None) -> list[str]:
    if plan is None:
        return []
    forward, backward = map(format_bytes, plan.received_bytes)
    sequence_sharding = plan.sequence_sharding.replace("_", " ")
    return [
        f"  {plan.name}, {sequence_sharding} tokens: a device receives {forward} forward, {backward} backward a layer",
    ]


def attention_calls(config: TrainConfig, target: Target) -> dict[AttentionCall, int]:
    """The distinct calls of a config's layers, in their order, and how many layers make each."""
    calls: Counter[AttentionCall] = Counter()
    for layer, num_layers in config.model.layer_counts.items():
        calls[attention_call(config, layer, target)] += num_layers
    return dict(calls)


def attention_call(config: TrainConfig, layer: LayerConfig, target: Target) -> AttentionCall:
    """The call of a layer's `layers.Attention` on each device of the config's mesh, before keys are exchanged."""
    model, mesh, mask = config.model, config.mesh, layer.mask
    scale = 1 / math.sqrt(layer.head_dim) if model.query_scale is None else model.query_scale
    of_window: tuple[BoundName, ...] = () if mask.scheduled_window is None else ("k_start",)
    of_trees: tuple[BoundName, ...] = ("q_end",) if config.data.source == "trees" else ()
    bounds = (*of_window, *of_trees)
    has_positions = config.data.keep_documents_apart and not means_indices(mask, bounds)
    # On positions the layer has bounds keep a mask that doesn't look ahead from later tokens.
    of_layer: tuple[BoundName, ...] = ("q_start",) if bounds and has_positions and not mask.looks_ahead else ()
    return AttentionCall(
        batch=config.batch_size // config.gradient_accumulation // (mesh.data * mesh.fsdp),
        q_len=config.sequence_length // mesh.context,
        kv_len=config.sequence_length // mesh.context,
        num_heads=model.num_heads // mesh.tensor,
        num_kv_heads=layer.num_kv_heads // mesh.tensor,
        head_dim=layer.head_dim,
        value_dim=layer.head_dim,
        dtype=jnp.dtype(model.compute_dtype),
        mask=mask,
        scale=scale,
        logits_soft_cap=model.logits_soft_cap,
        has_sinks=model.sinks,
        has_segment_ids=config.data.keep_documents_apart,
        has_query_positions=has_positions,
        has_key_value_positions=has_positions,
        return_lse=False,
        target=target,
        bounds=(*of_window, *of_layer, *of_trees),
    )
