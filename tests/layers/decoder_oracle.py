"""A decoder's logits written anew from the definitions of all of `GPTConfig`'s fields, in dense float64 NumPy.

It shares no code with `layers`: sizes and options are read from a config, masks are called on positions.

Shapes: T tokens, W width, N query heads, K key/value heads, H head dim, R features that turn, V vocabulary, E experts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from kernels import MultiHeadMask
from layers import GPTConfig, RopeScaling

Params = dict[str, Any]


def decoder_logits(
    config: GPTConfig, params: Params, tokens: Int[np.ndarray, " T"], context_length: int | None = None
) -> Float[np.ndarray, "T V"]:
    """Logits of one document, in float64.

    Args:
      config: sizes and options.
      params: nested dict by the names of the model's attributes, layers in stacks.
      tokens: of the document, from its first.
      context_length: what longrope chooses its factors by; None: the document's length.
    """
    table = float64(params["embedding"]["embedding"])
    x = table[tokens]
    if config.embedding_scale is not None:
        x = x * config.embedding_scale
    num_patterns = max(len(config.masks), len(config.layer_overrides))
    for index in range(config.num_layers):
        block = nth(params["blocks"][index % num_patterns], index // num_patterns)
        x = x + around(
            config,
            block,
            "attention",
            x,
            lambda y, block=block, index=index: attention(
                config, index, block["attention"], y, context_length or len(tokens)
            ),
        )
        x = x + around(config, block, "mlp", x, lambda y, block=block: feed_forward(config, block["mlp"], y))
    x = rms_norm(config, x, params["final_norm"])
    logits = x @ (table.T if config.tie_embeddings else float64(params["head"]["kernel"]))
    return soft_cap(logits, config.final_logits_soft_cap)


def float64(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)


def nth(tree: Any, index: int) -> Any:
    return {key: nth(value, index) for key, value in tree.items()} if isinstance(tree, dict) else float64(tree[index])


def around(config: GPTConfig, block: Params, name: str, x: np.ndarray, function: Any) -> np.ndarray:
    """A sublayer between the norms that stand before and behind it."""
    if config.norm_placement != "post":
        x = rms_norm(config, x, block[f"{name}_norm"])
    x = function(x)
    return x if config.norm_placement == "pre" else rms_norm(config, x, block[f"{name}_post_norm"])


def rms_norm(config: GPTConfig, x: np.ndarray, norm: Params) -> np.ndarray:
    root = np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon)
    return x / root * (float64(norm["scale"]) + config.norm_scale_offset)


def soft_cap(logits: np.ndarray, cap: float | None) -> np.ndarray:
    return logits if cap is None else cap * np.tanh(logits / cap)


def linear(x: np.ndarray, layer: Params) -> np.ndarray:
    return np.tensordot(x, layer["kernel"], 1) + layer.get("bias", 0.0)


def attention(
    config: GPTConfig, index: int, layer: Params, x: Float[np.ndarray, "T W"], context_length: int
) -> Float[np.ndarray, "T W"]:
    own = config.layer_overrides[index % len(config.layer_overrides)] if config.layer_overrides else None

    def setting(name: str) -> Any:
        value = "model" if own is None else getattr(own, name)
        return getattr(config, name) if value == "model" else value

    query, key, value = (linear(x, layer[name]) for name in ("query", "key", "value"))

    def normalize(heads: np.ndarray, norm: str) -> np.ndarray:
        if config.qk_norm == "per_head":
            return rms_norm(config, heads, layer[norm])
        return rms_norm(config, heads.reshape(len(heads), -1), layer[norm]).reshape(heads.shape)

    def turn(heads: np.ndarray) -> np.ndarray:
        if setting("rope_base") is None:
            return heads
        num_turned = int(setting("rope_fraction") * heads.shape[-1])
        turned = turned_pairs(heads[..., :num_turned], setting("rope_base"), setting("rope_scaling"), context_length)
        return np.concatenate([turned, heads[..., num_turned:]], -1)

    if config.qk_norm == "none":
        query, key = turn(query), turn(key)
    elif config.qk_norm_after_rope:
        query, key = normalize(turn(query), "query_norm"), normalize(turn(key), "key_norm")
    else:
        query, key = turn(normalize(query, "query_norm")), turn(normalize(key, "key_norm"))

    head_dim, group = query.shape[-1], query.shape[1] // key.shape[1]
    scale = head_dim**-0.5 if config.query_scale is None else config.query_scale
    mask, indices = config.masks[index % len(config.masks)], np.arange(len(x))
    outputs = np.zeros_like(query)
    for head in range(query.shape[1]):
        of_head = mask.masks[head] if isinstance(mask, MultiHeadMask) else mask
        logits = soft_cap(query[:, head] @ key[:, head // group].T * scale, config.logits_soft_cap)
        weights = np.exp(logits) * of_head(indices[:, None], indices[None, :])
        total = weights.sum(-1) + (np.exp(layer["sinks"][head]) if config.sinks else 0.0)
        outputs[:, head] = weights @ value[:, head // group] / total[:, None]
    return np.tensordot(outputs, layer["output"]["kernel"], 2) + layer["output"].get("bias", 0.0)


def turned_pairs(
    heads: Float[np.ndarray, "T N R"], base: float, scaling: RopeScaling, context_length: int
) -> Float[np.ndarray, "T N R"]:
    """Features i and i + R/2 as a complex number, turned and stretched."""
    half = heads.shape[-1] // 2
    frequencies = np.array([frequency(pair, 2 * half, base, scaling, context_length) for pair in range(half)])
    pairs = heads[..., :half] + 1j * heads[..., half:]
    pairs = pairs * stretch(scaling) * np.exp(1j * np.arange(len(heads))[:, None, None] * frequencies)
    return np.concatenate([pairs.real, pairs.imag], -1)


def frequency(pair: int, num_features: int, base: float, scaling: RopeScaling, context_length: int) -> float:
    plain, factor, original = base ** (-2 * pair / num_features), scaling.factor, scaling.original_context_length
    if scaling.kind == "linear":
        return plain / factor
    if scaling.kind == "ntk":
        return (base * factor ** (num_features / (num_features - 2))) ** (-2 * pair / num_features)
    if scaling.kind == "llama3":
        num_turns = original * plain / (2 * math.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept = min(max((num_turns - low) / (high - low), 0.0), 1.0)
        return kept * plain + (1 - kept) * plain / factor
    if scaling.kind == "yarn":
        # The pair that makes n turns in the original context: original · base^(−2 pair / R) = 2π n.
        fast, slow = (
            num_features / 2 * math.log(original / (2 * math.pi * turns), base)
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            fast, slow = np.floor(fast), np.ceil(slow)
        fast, slow = max(fast, 0), min(slow, num_features - 1)
        slow = slow + 0.001 if slow == fast else slow
        scaled = min(max((pair - fast) / (slow - fast), 0.0), 1.0)
        return scaled * plain / factor + (1 - scaled) * plain
    if scaling.kind == "longrope":
        return plain / (scaling.long_factors if context_length > original else scaling.short_factors)[pair]
    return plain


def stretch(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "yarn":
        return 1 + math.log(scaling.factor) / 10
    if scaling.kind == "longrope":
        return math.sqrt(1 + math.log(scaling.factor, scaling.original_context_length))
    return 1.0


def feed_forward(config: GPTConfig, layer: Params, x: Float[np.ndarray, "T W"]) -> Float[np.ndarray, "T W"]:
    if config.moe is None:
        return mlp(config, layer, x)
    logits, outputs = linear(x, layer["router"]), np.zeros_like(x)
    for token, scores in enumerate(np.exp(logits)):
        chosen = np.argsort(-scores)[: config.moe.num_experts_per_token]
        total = scores[chosen].sum() if config.moe.normalize_top_k else scores.sum()
        for expert in chosen:
            outputs[token] += scores[expert] / total * mlp(config, nth(layer["experts"], expert), x[token])
    return outputs


def mlp(config: GPTConfig, layer: Params, x: np.ndarray) -> np.ndarray:
    up = linear(x, layer["up"])
    if config.mlp == "gelu":
        return linear(gelu(up), layer["down"])
    gate = linear(x, layer["gate"])
    if config.mlp == "geglu":
        hidden = gelu(gate) * up
    elif config.mlp == "swiglu":
        hidden = gate / (1 + np.exp(-gate)) * up
    else:
        gate = np.minimum(gate, 7.0)
        hidden = gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7.0, 7.0) + 1)
    return linear(hidden, layer["down"])


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
