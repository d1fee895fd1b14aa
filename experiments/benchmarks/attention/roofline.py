"""The least time of an attention call on a device: of its matmuls, or of what it must move through memory.

Source: the roofline model, Williams et al. 2009 (doi:10.1145/1498765.1498785).
"""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

from experiments.benchmarks.attention.cases import Problem
from trainer.compile.topology.gpu import GPU_MODELS
from trainer.step.flops import PEAK_BF16_FLOPS

Measured = Literal["forward", "backward", "forward_backward"]

_FLOAT32_BYTES = 4


class Roofline(NamedTuple):
    """Lower bounds on a call's time, in seconds; the greater one holds."""

    matmuls_s: float
    """Its FLOPs, of allowed pairs alone, at the tensor cores' peak."""
    memory_s: float
    """Its arguments and results, each moved once, at the memory's bandwidth."""


def roofline(problem: Problem, measured: Measured, device_kind: str) -> Roofline | None:
    """A call's roofline, or None for devices other than `GPU_MODELS`.

    Args:
      problem: in 16 bits.
      measured: as in `Problem.flops`.
      device_kind: as JAX names it.
    """
    model = next((model for model in GPU_MODELS if model.device_kind == device_kind), None)
    if model is None:
        return None
    peak = next(peak for kind, peak in PEAK_BF16_FLOPS if re.fullmatch(kind, device_kind))
    return Roofline(problem.flops(measured) / peak, least_bytes(problem, measured) / (1e12 * model.bandwidth_tb_s))


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
