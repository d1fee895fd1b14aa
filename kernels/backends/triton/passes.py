"""The two halves: what each pass is handed."""

from __future__ import annotations

from jaxtyping import Array, Float

from kernels.backends.triton.backward_passes import GradientOperands, key_value_pass, query_pass
from kernels.backends.triton.forward_pass import forward as forward_pass
from kernels.backends.triton.tiles import Matrices, Strided
from kernels.backends.triton.tuning import TritonTuning
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients


def run_forward(
    matrices: Matrices, inputs: AttentionInputs, call: AttentionCall, tuning: TritonTuning
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse; of the inputs only the sinks and what is known of each token is read.

    Args:
      matrices: where query, key and value lie.
      inputs, call: the call, whose mask all heads share.
      tuning: how the passes run, with nothing left open.
    """
    assert tuning.forward is not None
    output, lse = forward_pass(matrices, inputs, call, tuning.forward, interpret=tuning.interpret)
    return output, lse.swapaxes(1, 2)


def run_backward(
    matrices: Matrices, inputs: AttentionInputs, call: AttentionCall, tuning: TritonTuning, cotangent: Cotangent
) -> Gradients:
    """The gradients of query, key and value. The arguments are `run_forward`'s."""
    assert tuning.key_value is not None
    assert tuning.query is not None
    operands = GradientOperands(matrices, Strided.of(cotangent.d_output), *cotangent.by_head())
    d_key, d_value, d_query = key_value_pass(
        operands, inputs, call, tuning.key_value, fused=tuning.backward == "fused", interpret=tuning.interpret
    )
    if d_query is None:
        d_query = query_pass(operands, inputs, call, tuning.query, interpret=tuning.interpret)
    else:
        d_query = (d_query * call.scale).astype(call.dtype)
    return d_query, d_key, d_value
