"""NVIDIA's Hopper GPUs: Pallas Mosaic GPU kernels that walk the block plan.

Forward and backward skip what the mask and the documents exclude, and evaluate the mask in PARTIAL tiles only. 16-bit
inputs, head dims up to 256, everything in the attention contract but `NumpyMask` and functions that
capture arrays.
"""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float

from kernels.backends.head_groups import attend_by_distinct_mask
from kernels.backends.mosaic_gpu.support import unsupported_reason
from kernels.call import AttentionCall, AttentionInputs
from kernels.tuning import MosaicGpuTuning

__all__ = ["attention", "unsupported_reason"]


def attention(
    inputs: AttentionInputs, call: AttentionCall, tuning: MosaicGpuTuning | None = None
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention of one call. See `kernels.dot_product_attention`."""
    from kernels.backends.mosaic_gpu.passes import attend
    from kernels.backends.mosaic_gpu.tuning_table import backward_tiles, forward_tiles

    tuning = tuning or MosaicGpuTuning()

    def attend_one_mask(inputs: AttentionInputs, call: AttentionCall):
        chosen = dataclasses.replace(
            tuning,
            forward_tiles=tuning.forward_tiles or forward_tiles(call),
            backward_tiles=tuning.backward_tiles
            or backward_tiles(call, "split" if tuning.interpret else tuning.backward),
        )
        return attend(chosen, inputs, call)

    return attend_by_distinct_mask(attend_one_mask, inputs, call)
