"""NVIDIA GPUs of compute capability 8.0 and up: Triton kernels that visit the tiles of the block plan.

Forward and backward skip what the mask, the documents and the bounds exclude, and evaluate these in PARTIAL tiles only.
16-bit inputs, head dims up to 256, masks that allow each query one interval of keys.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from kernels.backends.triton.support import unsupported_reason
from kernels.backends.triton.tuning import TritonTuning, resolve
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients
from kernels.tracing.slice_fusion import without_slice_fusion

__all__ = ["bwd", "fwd", "resolve", "unsupported_reason"]


def fwd(
    inputs: AttentionInputs, call: AttentionCall, tuning: TritonTuning
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse. See `kernels.attention.core`."""
    from kernels.backends.triton.forward_pass import run_forward
    from kernels.backends.triton.tiles import Matrices

    output, lse = without_slice_fusion(*run_forward(Matrices.of(inputs), inputs, call, tuning))
    return output, lse


def bwd(inputs: AttentionInputs, call: AttentionCall, tuning: TritonTuning, cotangent: Cotangent) -> Gradients:
    """The gradients of query, key and value. See `kernels.attention.core`."""
    from kernels.backends.triton.backward_passes import run_backward
    from kernels.backends.triton.tiles import Matrices

    return run_backward(Matrices.of(inputs), inputs, call, tuning, cotangent)
