"""Decoding on NVIDIA GPUs: a Triton kernel, called through jax-triton, that splits each sequence's visited blocks.

Every program takes one part of one sequence's blocks, for one key/value head and all queries that read it. The parts'
outputs are then merged by their log-sum-exps, as in Flash-Decoding.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from kernels.backends.triton.support import reason_in_call
from kernels.decode.call import DecodeCall, DecodeInputs
from kernels.decode.triton.tuning import TritonDecodeTuning, resolve

_SMALLEST_TILE = 16


def unsupported_reason(call: DecodeCall, tuning: TritonDecodeTuning | None = None) -> str | None:
    """Why the kernels can't serve the call, or None if they can."""
    if call.block_size % _SMALLEST_TILE:
        return f"takes a block_size that is a multiple of {_SMALLEST_TILE}, not {call.block_size}"
    if tuning is not None and tuning.tiles is not None and call.block_size % tuning.tiles.block_kv:
        return f"takes tiles.block_kv that divides block_size={call.block_size}, not {tuning.tiles.block_kv}"
    return reason_in_call(call, interpreted=tuning is not None and tuning.interpret)


def attend(
    inputs: DecodeInputs, call: DecodeCall, tuning: TritonDecodeTuning | None = None
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Attention of one call. See `kernels.decode_attention`."""
    from kernels.decode.triton.split import attend_split

    return attend_split(inputs, call, resolve(tuning, call))
