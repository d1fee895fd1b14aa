"""Attention spelled out in float64 NumPy: an oracle of all but the masks, which other tests hold to definitions."""

import numpy as np

from kernels import Bounds, MultiHeadMask


def allowed_keys(b: int, t: int, n: int, q_len: int, kv_len: int, mask, keywords) -> np.ndarray:
    """Which keys query t of head n may attend to, in one element of the batch."""
    q_pos, kv_pos = (
        np.asarray(keywords.get(name, np.arange(length)))
        for name, length in (("query_positions", q_len), ("key_value_positions", kv_len))
    )
    q_pos, kv_pos = (positions[b] if positions.ndim == 2 else positions for positions in (q_pos, kv_pos))
    head_mask = mask.masks[n] if isinstance(mask, MultiHeadMask) else mask
    allowed = np.broadcast_to(head_mask(q_pos[t], kv_pos), kv_len).copy()
    if "query_segment_ids" in keywords:
        allowed &= np.asarray(keywords["query_segment_ids"][b, t] == keywords["key_value_segment_ids"][b])
    for name, bound in () if keywords.get("bounds") is None else keywords["bounds"]._asdict().items():
        if bound is not None:
            bound = np.asarray(bound if bound.ndim == 1 else bound[b], np.int64)
            index, limit = (np.arange(kv_len), bound[t]) if name.startswith("k") else (t, bound)
            allowed &= index >= limit if name.endswith("start") else index < limit
    return allowed


def spelled_out(query, key, value, sinks, mask, keywords) -> tuple[np.ndarray, np.ndarray]:
    """Output and lse, one query at a time. A logit of −inf counts as a pair that may not attend."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    keywords = {
        name: x if x is None or isinstance(x, float | Bounds) else np.asarray(x) for name, x in keywords.items()
    }
    batch, q_len, num_heads, head_dim = query.shape
    kv_len, group = key.shape[1], num_heads // key.shape[2]
    scale = head_dim**-0.5 if keywords["scale"] is None else keywords["scale"]
    output, lse = np.zeros((batch, q_len, num_heads, value.shape[-1])), np.full((batch, q_len, num_heads), -np.inf)
    for b, t, n in np.ndindex(lse.shape):
        allowed = allowed_keys(b, t, n, q_len, kv_len, mask, keywords)
        with np.errstate(invalid="ignore"):
            logits = (key[b, allowed, n // group] @ query[b, t, n]) * scale
            if keywords["logits_soft_cap"]:
                logits = keywords["logits_soft_cap"] * np.tanh(logits / keywords["logits_soft_cap"])
            if (logits == -np.inf).all():
                continue
            sink = -np.inf if sinks is None else np.float64(sinks[n])
            row_max = np.maximum(logits.max(), sink)
            terms = np.exp(logits - row_max)
            total = terms.sum() + np.exp(sink - row_max)
            output[b, t, n] = terms / total @ value[b, allowed, n // group]
            lse[b, t, n] = row_max + np.log(total)
    return output, lse


def attention_of(dense, query, key, value):
    """Output of attention to the allowed pairs `[N, T, S]`, in float64; 0 where there are none."""
    query, key, value = (np.asarray(x, np.float64)[0].swapaxes(0, 1) for x in (query, key, value))
    weights = np.where(dense, np.exp(query @ key.swapaxes(1, 2) / query.shape[-1] ** 0.5), 0)
    total = weights.sum(-1, keepdims=True)
    return (weights / np.where(total == 0, 1, total) @ value).swapaxes(0, 1)[None]
