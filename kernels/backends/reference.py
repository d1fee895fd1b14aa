"""Dense attention in float32 (float64 for float64 inputs): the specification that other backends are held to.

Builds the `[B, N, T, S]` logits, so it is for small T. Nothing selects it but its name.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.call import AttentionCall, AttentionInputs


def unsupported_reason(call: AttentionCall, tuning: None = None) -> str | None:
    """Serves every call."""
    return None


def attention(inputs: AttentionInputs, call: AttentionCall) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention by its definition. See `kernels.dot_product_attention`."""
    dtype = call.softmax_dtype
    query = inputs.query.astype(dtype) * call.scale
    key, value = (jnp.repeat(x.astype(dtype), call.group_size, axis=2) for x in (inputs.key, inputs.value))
    highest = jax.lax.Precision.HIGHEST

    logits = jnp.einsum("BTNH,BSNH->BNTS", query, key, precision=highest)
    if call.logits_soft_cap is not None:
        logits = call.logits_soft_cap * jnp.tanh(logits / call.logits_soft_cap)
    allowed = jnp.broadcast_to(_allowed(inputs, call), logits.shape)
    logits = jnp.where(allowed, logits, -jnp.inf)
    # Not asked of the maximum, which may pass a NaN over (XLA on CPUs).
    attends = (logits != -jnp.inf).any(-1)

    row_max = logits.max(-1)
    if inputs.sinks is not None:
        row_max = jnp.maximum(row_max, inputs.sinks.astype(dtype)[:, None])
    row_max = jax.lax.stop_gradient(jnp.where(row_max > -jnp.inf, row_max, 0))
    p = jnp.where(allowed, jnp.exp(jnp.where(allowed, logits, 0) - row_max[..., None]), 0)
    row_sum = p.sum(-1)
    if inputs.sinks is not None:
        row_sum = row_sum + jnp.where(attends, jnp.exp(inputs.sinks.astype(dtype)[:, None] - row_max), 0)
    row_sum = jnp.where(attends, row_sum, 1)
    # Of a row with a NaN, too, only the allowed pairs have a p that is NaN.
    p = jnp.where(allowed, p / row_sum[..., None], 0)
    # A weight of 0 doesn't stop a NaN, so values that aren't finite are kept out, and rows that may see one are marked.
    not_finite = (~jnp.isfinite(value)).astype(dtype)
    sees_one = jnp.einsum("BNTS,BSNV->BTNV", allowed.astype(dtype), not_finite) > 0
    output = jnp.einsum("BNTS,BSNV->BTNV", p, _finite_part(value), precision=highest)
    output = output * jnp.where(sees_one, jnp.nan, 1)
    lse = jnp.where(attends, row_max + jnp.log(row_sum), -jnp.inf)
    return output.astype(call.dtype), lse.transpose(0, 2, 1)


@jax.custom_jvp
def _finite_part(value: Array) -> Array:
    """0 in place of NaN and infinities, whose gradient is that of the value all the same."""
    return jnp.where(jnp.isfinite(value), value, 0)


_finite_part.defjvps(lambda tangent, result, value: tangent)


def _allowed(inputs: AttentionInputs, call: AttentionCall):
    """True for each pair that may attend, broadcastable to `[B, N, T, S]`."""
    if inputs.query_positions is not None and inputs.key_value_positions is not None:
        q_pos, kv_pos = inputs.query_positions[:, :, None], inputs.key_value_positions[:, None, :]
    else:
        q_pos, kv_pos = (jnp.arange(length, dtype=jnp.int32) for length in (call.q_len, call.kv_len))
        q_pos, kv_pos = q_pos[None, :, None], kv_pos[None, None, :]
    allowed = call.mask(q_pos, kv_pos)
    # A per-head mask answers [N, B, T, S], any other [B, T, S].
    allowed = jnp.moveaxis(allowed, 0, 1) if allowed.ndim == 4 else allowed[:, None]
    if inputs.query_segment_ids is not None and inputs.key_value_segment_ids is not None:
        same = inputs.query_segment_ids[:, :, None] == inputs.key_value_segment_ids[:, None, :]
        allowed = allowed & same[:, None]
    if inputs.bounds is not None:
        allowed = allowed & inputs.bounds.allowed(call.q_len, call.kv_len)[:, None]
    return allowed
