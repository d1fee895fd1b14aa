"""Attention of the output of one projection for query, key and value, without cutting it up first.

XLA hands a kernel dense arrays, so a slice would be a copy. The `triton` backend's kernels, which alone serve this,
read each operand by its own strides.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.attention.core import Kernel, attend_by
from kernels.backends.triton.backward_passes import run_backward
from kernels.backends.triton.forward_pass import run_forward
from kernels.backends.triton.support import unsupported_reason
from kernels.backends.triton.tiles import Matrices, Strided
from kernels.backends.triton.tuning import TritonTuning, resolve
from kernels.call import AttentionCall, AttentionInputs, Cotangent, make_call
from kernels.masks import Mask
from kernels.tracing.mesh_axes import CHECK_VMA_REASON


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
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        device=device,
    )
    reason = CHECK_VMA_REASON if call.varying_axes else unsupported_reason(call, tuning)
    if reason is not None:
        raise ValueError(f"the triton backend can't serve this call: {reason}")
    # Query, key and value are all of the first input.
    inputs = inputs._replace(query=qkv, key=None, value=None)  # type: ignore[arg-type]
    output, _ = attend_by(_FusedQkvKernel(resolve(tuning, call)), inputs, call)
    return output


@dataclass(frozen=True)
class _FusedQkvKernel(Kernel):
    """The functions of the gradient: the first input is query, key and value, and so is the first gradient."""

    tuning: TritonTuning

    def fwd(self, inputs: AttentionInputs, call: AttentionCall):
        return run_forward(_matrices(inputs.query, call), inputs, call, self.tuning)

    def bwd(self, inputs: AttentionInputs, call: AttentionCall, cotangent: Cotangent):
        gradients = run_backward(_matrices(inputs.query, call), inputs, call, self.tuning, cotangent)
        return jnp.concatenate(gradients, axis=2), None, None


def _matrices(qkv: Float[Array, "B T N+2K H"], call: AttentionCall) -> Matrices:
    first_key = call.num_heads
    return Matrices(Strided.of(qkv), Strided.of(qkv, first_key), Strided.of(qkv, first_key + call.num_kv_heads))
