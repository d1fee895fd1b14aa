"""A GPT's loss written anew from its definition, in dense NumPy or jax.numpy, sharing no code with what it checks.

Shapes: B batch, T tokens, W width, N query heads, K key/value heads, H head dim, V vocabulary, E experts; `heads` is N
or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float

from layers import GPTConfig, MoEConfig

Allows = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Whether a query at one position may attend to a key at another."""


def mean_loss(
    params: dict[str, Any],
    batch: dict[str, np.ndarray],
    model: GPTConfig,
    allows: Sequence[Sequence[Allows]],
    *,
    documents: bool,
    z_loss: float,
    accumulation: int,
    xp: ModuleType = np,
) -> Float[Array, ""]:
    """Cross-entropy and z-loss of targets by their weights, and the losses of routers per token.

    Args:
      params: nested dict of float64 arrays, as the training state holds them.
      batch: tokens, targets, weights, segment_ids and positions, in the order of the row; and bounds, if the attention
        has some.
      model: sizes and options; its masks are not read.
      allows: for each mask of the pattern what it allows: one function, or one for each query head.
      documents: whether attention and positions stay within a document.
      z_loss: weight of the squared log-partition.
      accumulation: number n of micro-batches, in each of which experts' load is balanced. The first has the rows 0, n,
        2n and so on.
      xp: NumPy, or jax.numpy where the gradient is wanted.
    """
    length = batch["tokens"].shape[1]
    positions = batch["positions"] if documents else np.broadcast_to(np.arange(length), batch["tokens"].shape)
    counted, weights = batch["segment_ids"] != 0, batch["weights"].astype(np.float64)
    table = params["embedding"]["embedding"]
    hidden = table[batch["tokens"]]
    of_routers, micro_batches = 0.0, [slice(first, None, accumulation) for first in range(accumulation)]
    for layer in range(model.num_layers):
        repeat, pattern_index = divmod(layer, len(allows))
        block = _at(params["blocks"][pattern_index], repeat)
        allowed = np.stack([allow(positions[:, :, None], positions[:, None, :]) for allow in allows[pattern_index]], 1)
        if documents:
            ids = batch["segment_ids"]
            allowed = allowed & (ids[:, :, None] == ids[:, None, :])[:, None]
        allowed = allowed & _within_bounds(batch)[:, None]
        normed = _norm(hidden, block["attention_norm"]["scale"], xp)
        hidden = hidden + _attention(normed, block["attention"], allowed, positions, model, xp)
        normed = _norm(hidden, block["mlp_norm"]["scale"], xp)
        if model.moe is None:
            hidden = hidden + _mlp(normed, block["mlp"], xp)
        else:
            mixed, logits, chosen = _mixture(normed, block["mlp"], model.moe, xp)
            hidden = hidden + mixed
            of_router = (_router_losses(logits[x], chosen[x], counted[x], model.moe, xp) for x in micro_batches)
            of_routers = of_routers + sum(of_router) / model.num_layers
    hidden = _norm(hidden, params["final_norm"]["scale"], xp)
    logits = hidden @ (table.T if model.tie_embeddings else params["head"]["kernel"])
    # float64 holds the exponentials of logits of this size, so nothing is subtracted first.
    log_partition = xp.log(xp.exp(logits).sum(-1))
    target_logits = xp.take_along_axis(logits, batch["targets"][:, :, None], axis=-1)[:, :, 0]
    of_targets = (weights * (log_partition - target_logits) + abs(weights) * z_loss * log_partition**2).sum()
    return of_targets / abs(weights).sum() + of_routers / counted.sum()


def _within_bounds(batch: dict[str, np.ndarray]) -> Bool[np.ndarray, "B T T"]:
    """Whether each token's bound lets a query attend to a key; a tree's keys lie before their queries."""
    index = np.arange(batch["tokens"].shape[1])
    query, key = index[:, None], index[None]
    allowed = np.ones((len(batch["tokens"]), len(index), len(index)), bool)
    if "k_end" in batch:
        allowed &= key < batch["k_end"][:, :, None]
    if "q_end" in batch:
        allowed &= (key <= query) & (query < batch["q_end"][:, None, :])
    return allowed


def _at(tree: Any, index: int) -> Any:
    return {key: _at(value, index) for key, value in tree.items()} if isinstance(tree, dict) else tree[index]


def _norm(x: Array, scale: Array, xp: ModuleType) -> Array:
    return x / xp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def _attention(
    x: Float[Array, "B T W"],
    layer: dict[str, Any],
    allowed: Bool[np.ndarray, "B heads T T"],
    positions: np.ndarray,
    model: GPTConfig,
    xp: ModuleType,
) -> Float[Array, "B T W"]:
    query, key, value = (xp.einsum("btw,wnh->bnth", x, layer[name]["kernel"]) for name in ("query", "key", "value"))
    if model.qk_norm != "none":
        query = _norm(query, layer["query_norm"]["scale"], xp)
        key = _norm(key, layer["key_norm"]["scale"], xp)
    if model.rope_base is not None:
        query, key = (_turned(x, positions, model.rope_base, xp) for x in (query, key))
    key, value = (xp.repeat(x, model.num_heads // model.num_kv_heads, axis=1) for x in (key, value))
    logits = query @ xp.swapaxes(key, 2, 3) / model.head_dim**0.5
    if model.logits_soft_cap is not None:
        logits = model.logits_soft_cap * xp.tanh(logits / model.logits_soft_cap)
    weights = xp.exp(logits) * allowed
    total = weights.sum(-1, keepdims=True)
    if model.sinks:
        total = total + xp.exp(layer["sinks"])[:, None, None]
    return xp.einsum("bnth,nhw->btw", weights / total @ value, layer["output"]["kernel"])


def _turned(x: Float[Array, "B N T H"], positions: np.ndarray, base: float, xp: ModuleType) -> Array:
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * base ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return xp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _mlp(x: Array, layer: dict[str, Any], xp: ModuleType) -> Array:
    hidden = _linear(x, layer["up"])
    if "gate" in layer:
        gate = _linear(x, layer["gate"])
        hidden = gate / (1 + xp.exp(-gate)) * hidden
    else:
        hidden = hidden / 2 * (1 + xp.tanh((2 / np.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
    return _linear(hidden, layer["down"])


def _linear(x: Array, layer: dict[str, Array]) -> Array:
    return x @ layer["kernel"] + layer.get("bias", 0)


def _mixture(
    x: Float[Array, "B T W"], layer: dict[str, Any], moe: MoEConfig, xp: ModuleType
) -> tuple[Float[Array, "B T W"], Float[Array, "B T E"], Bool[Array, "B T E"]]:
    """Every expert for every token, with a weight of 0 where the token doesn't choose it; and what the router says."""
    logits = _linear(x, layer["router"])
    # Random logits don't tie.
    chosen = logits >= xp.sort(logits, axis=-1)[..., -moe.num_experts_per_token, None]
    exponentials = xp.exp(logits)
    shared_by = exponentials * chosen if moe.normalize_top_k else exponentials
    weights = exponentials * chosen / shared_by.sum(-1, keepdims=True)
    experts = (_mlp(x, _at(layer["experts"], expert), xp) for expert in range(moe.num_experts))
    return sum(weights[..., i, None] * output for i, output in enumerate(experts)), logits, chosen


def _router_losses(
    logits: Float[Array, "B T E"],
    chosen: Bool[Array, "B T E"],
    counted: Bool[np.ndarray, "B T"],
    moe: MoEConfig,
    xp: ModuleType,
) -> Float[Array, ""]:
    """The losses of one layer's router in one micro-batch, times its tokens that count."""
    partition = xp.exp(logits).sum(-1)
    parts = (chosen * counted[..., None]).sum((0, 1)) / counted.sum()
    probabilities = (xp.exp(logits) / partition[..., None] * counted[..., None]).sum((0, 1))
    load_balance = moe.num_experts * (parts * probabilities).sum()
    z_loss = (xp.log(partition) ** 2 * counted).sum()
    return moe.load_balance_loss_weight * load_balance + moe.router_z_loss_weight * z_loss
