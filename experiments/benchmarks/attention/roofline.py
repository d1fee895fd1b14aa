"""The least time of an attention call on a device: of its matmuls, or of what it must move through memory.

Source: the roofline model, Williams et al. 2009 (doi:10.1145/1498765.1498785).
"""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

from experiments.benchmarks.attention.cases import Problem
from trainer.step.flops import PEAK_BF16_FLOPS

Measured = Literal["forward", "backward", "forward_backward"]

# What a device's memory moves: the data sheets at nvidia.com/en-us/data-center (h100, h200).
_MEMORY_BYTES_PER_S = ((r"NVIDIA (GH|H)200.*", 4.8e12), (r"NVIDIA H100 .*HBM3", 3.35e12))
_FLOAT32_BYTES = 4


class Roofline(NamedTuple):
    """What bounds a call, in seconds; the greater one is the least that the call can take."""

    matmuls_s: float
    """Its FLOPs, of allowed pairs alone, at the tensor cores' peak."""
    memory_s: float
    """Its arguments and results, each moved once, at the memory's bandwidth."""


def roofline(problem: Problem, measured: Measured, device_kind: str) -> Roofline | None:
    """A call's roofline, or None for a device whose peaks aren't known here.

    Args:
      problem: in 16 bits.
      measured: as in `Problem.flops`.
      device_kind: as JAX names it.
    """
    peak, bandwidth = (
        next((each for kind, each in table if re.fullmatch(kind, device_kind)), None)
        for table in (PEAK_BF16_FLOPS, _MEMORY_BYTES_PER_S)
    )
    if peak is None or bandwidth is None:
        return None
    return Roofline(problem.flops(measured) / peak, least_bytes(problem, measured) / bandwidth)


def least_bytes(problem: Problem, measured: Measured) -> int:
    """Bytes of a call's arguments and results, each read or written once.

    The forward reads queries, keys and values and writes the output. The backward reads these, the output's gradient
    and, in float32, the logarithm of each softmax's sum (lse), and writes three gradients. Both together write lse,
    too.
    """
    sizes = {name: array.nbytes for name, array in problem.arrays.items()}
    operands, output = sizes["query"] + sizes["key"] + sizes["value"], sizes["d_output"]
    lse = _FLOAT32_BYTES * math.prod(problem.arrays["query"].shape[:3])
    forward, backward = operands + output, 2 * (operands + output) + lse
    return {"forward": forward, "backward": backward, "forward_backward": forward + lse + backward}[measured]
