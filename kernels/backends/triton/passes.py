"""The kernels as one differentiable function: what each pass is handed, and the custom gradient."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from kernels.backends.triton.backward import Operands, key_value_pass, query_pass
from kernels.backends.triton.forward import forward
from kernels.backends.triton.tiles import Matrices, Strided
from kernels.call import AttentionCall, AttentionInputs
from kernels.tuning import TritonTuning


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def attend(
    tuning: TritonTuning, inputs: AttentionInputs, call: AttentionCall
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention of one call whose mask all heads share.

    Args:
      tuning: how the passes run, with nothing left open.
      inputs, call: the call.

    Returns:
      Output and lse.
    """
    (output, lse), _ = _attend_forward(tuning, inputs, call)
    return output, lse


def _attend_forward(tuning: TritonTuning, inputs: AttentionInputs, call: AttentionCall):
    output, lse = run_forward(tuning, _matrices(inputs), inputs, call)
    return (output, lse.swapaxes(1, 2)), (inputs, output, lse)


def _attend_backward(tuning: TritonTuning, call: AttentionCall, residuals, cotangents):
    inputs, output, lse = residuals
    return (run_backward(tuning, _matrices(inputs), inputs, call, output, lse, *map(jnp.asarray, cotangents)),)


attend.defvjp(_attend_forward, _attend_backward)


def _matrices(inputs: AttentionInputs) -> Matrices:
    return Matrices(Strided.of(inputs.query), Strided.of(inputs.key), Strided.of(inputs.value))


def run_forward(
    tuning: TritonTuning, matrices: Matrices, inputs: AttentionInputs, call: AttentionCall
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N T"]]:
    """Output and lse; of the inputs only the sinks and what is known of each token is read."""
    assert tuning.forward is not None
    output, lse = forward(matrices, inputs, call, tuning.forward, interpret=tuning.interpret)
    # The names let a remat policy keep these two, all that the backward needs besides the inputs.
    return checkpoint_name(output, "attention_output"), checkpoint_name(lse, "attention_lse")


def run_backward(
    tuning: TritonTuning,
    matrices: Matrices,
    inputs: AttentionInputs,
    call: AttentionCall,
    output: Float[Array, "B T N V"],
    lse: Float[Array, "B N T"],
    d_output: Float[Array, "B T N V"],
    d_lse: Float[Array, "B T N"],
) -> AttentionInputs:
    """The gradients of query, key, value and sinks."""
    assert tuning.key_value is not None
    assert tuning.query is not None
    attends = lse != -jnp.inf
    pull = (output.astype(jnp.float32) * d_output.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    pull -= jnp.where(attends, d_lse.swapaxes(1, 2), 0)
    operands = Operands(matrices, Strided.of(d_output), lse, pull)
    d_key, d_value, d_query = key_value_pass(
        operands, inputs, call, tuning.key_value, fused=tuning.backward == "fused", interpret=tuning.interpret
    )
    if d_query is None:
        d_query = query_pass(operands, inputs, call, tuning.query, interpret=tuning.interpret)
    else:
        d_query = (d_query * call.scale).astype(call.dtype)
    d_sinks = None
    if inputs.sinks is not None:
        sinks = inputs.sinks.astype(jnp.float32)[None, :, None]
        weight = jnp.where(attends, jnp.exp(sinks - jnp.where(attends, lse, 0)), 0)
        d_sinks = -(weight * pull).sum((0, 2)).astype(inputs.sinks.dtype)
    return AttentionInputs(d_query, d_key, d_value, d_sinks)
