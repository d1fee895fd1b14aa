"""JAX's TPU splash attention, fed by our block plan: the mask costs no compile time, at any length.

The plan says in closed form which tiles each of the three passes visits, and the mask's own predicate is traced into
the kernel, so no tile of any mask is evaluated ahead of time or kept in memory. The exceptions look positions up in
arrays, a `NumpyMask` and a `MaskFn` that captures some: their PARTIAL tiles are. Packed documents skip the tiles
between documents, too, which upstream's kernel doesn't.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from kernels.backends.splash.passes import planned_mask, run_backward, run_forward
from kernels.backends.splash.support import unsupported_reason
from kernels.backends.splash.tuning import resolve
from kernels.call import AttentionCall, AttentionInputs, Cotangent, Gradients
from kernels.tuning import SplashTuning

__all__ = ["backward", "forward", "resolve", "unsupported_reason"]


def forward(
    inputs: AttentionInputs, call: AttentionCall, tuning: SplashTuning
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Output and lse. See `kernels.attention.core`."""
    return run_forward(planned_mask, inputs, call, tuning)


def backward(inputs: AttentionInputs, call: AttentionCall, tuning: SplashTuning, cotangent: Cotangent) -> Gradients:
    """The gradients of query, key and value. See `kernels.attention.core`."""
    return run_backward(planned_mask, inputs, call, tuning, cotangent)
