"""cuDNN's flash attention, through `jax.nn.dot_product_attention`: NVIDIA's own kernel, the baseline to beat."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.call import AttentionCall, AttentionInputs


def unsupported_reason(call: AttentionCall, tuning: None = None) -> str | None:
    """Why cuDNN can't serve the call: it knows full, causal and causal sliding-window masks, in 16 bits."""
    if call.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, not {call.dtype}"
    for given, feature in (
        (call.has_segment_ids, "segment ids"),
        (bool(call.bounds), "bounds"),
        (call.has_positions, "positions"),
        (call.has_sinks, "sinks"),
        (call.logits_soft_cap is not None, "logits soft cap"),
        (call.return_lse, "differentiable lse"),
    ):
        if given:
            return f"has no {feature}"
    if call.scale <= 0:
        return f"takes positive scales, not {call.scale}"
    window = call.mask.window
    if window is None or (window[1] != 0 and not call.mask.allows_all):
        return f"has full, causal and causal sliding-window masks only, not {call.mask!r}"
    if not call.mask.allows_all and call.q_len != call.kv_len:
        return f"masks need equal lengths, got q_len={call.q_len} and kv_len={call.kv_len}"
    if call.q_len % 2 or call.kv_len % 2:
        return f"needs even lengths for its backward, got q_len={call.q_len} and kv_len={call.kv_len}"
    if window[0] is not None and window[0] < 0:
        return f"window of {call.mask!r} leaves rows empty"
    if call.value_dim != call.head_dim:
        return f"needs equal head dims, got {call.head_dim} and {call.value_dim} for value"
    capability = call.target.compute_capability
    if capability is None:
        return f"needs an NVIDIA GPU, not {call.target.device_kind}"
    if capability < 8.0:
        return f"needs an NVIDIA GPU of compute capability 8.0, this one has {capability}"
    largest = 256 if capability >= 9.0 else 128
    if call.head_dim > largest or call.head_dim % 8:
        return f"needs a head dim of at most {largest} and a multiple of 8, got {call.head_dim}"
    return None


def attention(inputs: AttentionInputs, call: AttentionCall):
    """Attention of one call; the lse is None, since cuDNN's has no gradient. See `kernels.dot_product_attention`."""
    assert call.mask.window is not None, "refused by unsupported_reason"
    left, right = call.mask.window
    output = jax.nn.dot_product_attention(
        inputs.query,
        inputs.key,
        inputs.value,
        scale=call.scale,
        is_causal=right == 0,
        # A window as long as the sequence is none.
        local_window_size=None if left is None or left >= call.q_len - 1 else (left, 0),
        implementation="cudnn",
    )
    return output, None
