"""JAX's TPU splash attention, fed by our block plan: the mask costs no compile time, at any length.

The plan says in closed form which tiles each of the three passes visits, and the mask's own predicate is traced into
the kernel, so no tile of any mask is evaluated ahead of time or kept in memory. The exceptions look positions up in
arrays, a `NumpyMask` and a `MaskFn` that captures some: their PARTIAL tiles are. Packed documents skip the tiles
between documents, too, which upstream's kernel doesn't.
"""

from __future__ import annotations

import functools

from jaxtyping import Array, Float

from kernels.backends.head_groups import attend_by_distinct_mask
from kernels.backends.splash.passes import attend, planned_mask
from kernels.backends.splash.support import unsupported_reason
from kernels.backends.splash.tuning import default_tuning
from kernels.call import AttentionCall, AttentionInputs
from kernels.tuning import SplashTuning

__all__ = ["attention", "unsupported_reason"]


def attention(
    inputs: AttentionInputs, call: AttentionCall, tuning: SplashTuning | None = None
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention of one call. See `kernels.dot_product_attention`."""
    tuning = tuning or default_tuning(call)
    return attend_by_distinct_mask(functools.partial(attend, planned_mask, tuning), inputs, call)
