"""NVIDIA GPUs of compute capability 8.0 and up: Triton kernels that walk the block plan's intervals.

Forward and backward skip what the mask and the documents exclude, and evaluate the mask in PARTIAL tiles only. 16-bit
inputs, head dims up to 256, masks that allow each query one interval of keys.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from kernels.backends.head_groups import attend_by_distinct_mask
from kernels.backends.triton.support import unsupported_reason
from kernels.call import AttentionCall, AttentionInputs
from kernels.tuning import TritonTuning

__all__ = ["attention", "unsupported_reason"]


def attention(
    inputs: AttentionInputs, call: AttentionCall, tuning: TritonTuning | None = None
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention of one call. See `kernels.dot_product_attention`."""
    from kernels.backends.triton.passes import attend
    from kernels.backends.triton.tuning_table import fill_in

    tuning = tuning or TritonTuning()

    def attend_one_mask(inputs: AttentionInputs, call: AttentionCall):
        return attend(fill_in(tuning, call), inputs, call)

    return attend_by_distinct_mask(attend_one_mask, inputs, call)
