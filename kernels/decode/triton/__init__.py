"""Decoding on NVIDIA GPUs: a Triton kernel, called through jax-triton, that splits each sequence's visited blocks.

Every program takes one part of one sequence's blocks for one key/value head and all queries that read it; the parts'
outputs are then put together by their log-sum-exps.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from kernels.decode.call import DecodeCall, DecodeInputs
from kernels.decode.triton.support import unsupported_reason

__all__ = ["attend", "slower_reason", "unsupported_reason"]


def slower_reason(call: DecodeCall) -> str | None:
    """It's faster than every implementation after it."""
    return None


def attend(inputs: DecodeInputs, call: DecodeCall) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention of one call. See `kernels.decode_attention`."""
    from kernels.decode.triton.split import attend_split

    return attend_split(inputs, call)
