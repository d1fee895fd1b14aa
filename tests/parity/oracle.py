"""A GPT's loss written anew from its definition, in dense NumPy or jax.numpy, sharing no code with what it checks.

Shapes: B batch, T tokens, W width, N query heads, K key/value heads, H head dim, V vocabulary; `heads` is N or 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float

from layers import GPTConfig

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
    xp: ModuleType = np,
) -> Float[Array, ""]:
    """Cross-entropy and z-loss per target.

    Args:
      params: nested dict of float64 arrays, as the training state holds them.
      batch: tokens, targets, target_mask, segment_ids and positions, in the order of the row.
      model: sizes and options; its masks are not read.
      allows: for each mask of the pattern what it allows: one function, or one for each query head.
      documents: whether attention and positions stay within a document.
      z_loss: weight of the squared log-partition.
      xp: NumPy, or jax.numpy where the gradient is wanted.
    """
    length = batch["tokens"].shape[1]
    positions = batch["positions"] if documents else np.broadcast_to(np.arange(length), batch["tokens"].shape)
    table = params["embedding"]["embedding"]
    hidden = table[batch["tokens"]]
    for layer in range(model.num_layers):
        repeat, pattern_index = divmod(layer, len(allows))
        block = _at(params["blocks"][pattern_index], repeat)
        allowed = np.stack([allow(positions[:, :, None], positions[:, None, :]) for allow in allows[pattern_index]], 1)
        if documents:
            ids = batch["segment_ids"]
            allowed = allowed & (ids[:, :, None] == ids[:, None, :])[:, None]
        normed = _norm(hidden, block["attention_norm"]["scale"], xp)
        hidden = hidden + _attention(normed, block["attention"], allowed, positions, model, xp)
        hidden = hidden + _mlp(_norm(hidden, block["mlp_norm"]["scale"], xp), block["mlp"], xp)
    hidden = _norm(hidden, params["final_norm"]["scale"], xp)
    logits = hidden @ (table.T if model.tie_embeddings else params["head"]["kernel"])
    # float64 holds the exponentials of logits of this size, so nothing is subtracted first.
    log_partition = xp.log(xp.exp(logits).sum(-1))
    target_logits = xp.take_along_axis(logits, batch["targets"][:, :, None], axis=-1)[:, :, 0]
    losses = log_partition - target_logits + z_loss * log_partition**2
    return (losses * batch["target_mask"]).sum() / batch["target_mask"].sum()


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
    hidden = x @ layer["up"]["kernel"]
    if "gate" in layer:
        gate = x @ layer["gate"]["kernel"]
        hidden = gate / (1 + xp.exp(-gate)) * hidden
    else:
        hidden = hidden / 2 * (1 + xp.tanh((2 / np.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
    return hidden @ layer["down"]["kernel"]
