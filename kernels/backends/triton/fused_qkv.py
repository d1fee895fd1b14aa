"""Attention of the output of one projection for query, key and value, without cutting it up first.

XLA hands a kernel dense arrays, so a slice would be a copy. The kernels read each operand by its own strides instead.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from kernels.backends.triton.backward_passes import run_backward
from kernels.backends.triton.forward_pass import run_forward
from kernels.backends.triton.support import unsupported_reason
from kernels.backends.triton.tiles import Matrices, Strided
from kernels.backends.triton.tuning import TritonTuning, resolve
from kernels.call import AttentionCall, AttentionInputs, Cotangent, make_call
from kernels.masks import Mask
from kernels.varying import CHECK_VMA_REASON


def attend_fused_qkv(
    qkv: Float[Array, "B T N+2K H"],
    num_kv_heads: int,
    mask: Mask | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    tuning: TritonTuning | None = None,
    device: jax.Device | None = None,
) -> Float[Array, "B T N H"]:
    """Self-attention of `[B, T, N + 2K, H]`: the heads of the query, then those of the key, then those of the value.

    Nothing is copied on the way to the kernels. The gradient's three parts are put together by one copy.

    Args:
      qkv: bfloat16 or float16.
      num_kv_heads: K.
      mask: one for all heads, as for `kernels.dot_product_attention`, like everything that follows.
      segment_ids: only equal ids attend.
      scale: multiplies the logits; default 1/√H.
      logits_soft_cap: bounds the logits to ±cap.
      tuning: how the kernels run.
      device: one of the devices that the call will be compiled for, when that isn't JAX's default.

    Raises:
      ValueError: arguments that don't fit together, or a call that the kernels can't serve, with the reason.
    """
    num_heads = qkv.shape[2] - 2 * num_kv_heads
    if num_kv_heads < 1 or num_heads < 1:
        raise ValueError(f"qkv of shape {qkv.shape} doesn't hold num_kv_heads={num_kv_heads} twice and a query")
    if isinstance(mask, Mask) and mask.num_heads is not None:
        raise ValueError(f"needs one mask for all heads, not {mask!r}; use kernels.dot_product_attention")
    tuning = tuning or TritonTuning()
    # The parts say what the call is; the kernels don't read them, so nothing is left of them once compiled.
    query, key, value = jnp.split(qkv, [num_heads, num_heads + num_kv_heads], axis=2)
    inputs, call = make_call(
        query,
        key,
        value,
        mask,
        query_segment_ids=segment_ids,
        key_value_segment_ids=segment_ids,
        query_positions=None,
        key_value_positions=None,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        sinks=None,
        return_lse=False,
        device=device,
    )
    reason = CHECK_VMA_REASON if call.varying_axes else unsupported_reason(call, tuning)
    if reason is not None:
        raise ValueError(f"the triton backend can't serve this call: {reason}")
    return _attend(resolve(tuning, call), qkv, inputs.query_segment_ids, call)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _attend(tuning: TritonTuning, qkv: Array, segment_ids: Array | None, call: AttentionCall):
    output, _ = _attend_forward(tuning, qkv, segment_ids, call)
    return output


def _attend_forward(tuning: TritonTuning, qkv: Array, segment_ids: Array | None, call: AttentionCall):
    output, lse = run_forward(_matrices(qkv, call), _tokens(qkv, segment_ids), call, tuning)
    # The names let a remat policy keep these two, all that the backward needs besides the projection.
    output, lse = checkpoint_name(output, "attention_output"), checkpoint_name(lse, "attention_lse")
    return output, (qkv, segment_ids, output, lse)


def _attend_backward(tuning: TritonTuning, call: AttentionCall, residuals, d_output):
    qkv, segment_ids, output, lse = residuals
    cotangent = Cotangent.of(output, lse, d_output)
    gradients = run_backward(_matrices(qkv, call), _tokens(qkv, segment_ids), call, tuning, cotangent)
    return jnp.concatenate(gradients, axis=2), None


_attend.defvjp(_attend_forward, _attend_backward)


def _matrices(qkv: Array, call: AttentionCall) -> Matrices:
    return Matrices(
        Strided.of(qkv), Strided.of(qkv, call.num_heads), Strided.of(qkv, call.num_heads + call.num_kv_heads)
    )


def _tokens(qkv: Array, segment_ids: Array | None) -> AttentionInputs:
    """Inputs of which only the tokens are read."""
    return AttentionInputs(qkv, qkv, qkv, query_segment_ids=segment_ids, key_value_segment_ids=segment_ids)
