"""Where a training step's time goes: the kernels of a profiler trace, summed by part of the step.

The HLO instruction that launched a kernel decides its part: by the `jax.named_scope`s of layers and trainer in its
metadata, and by its opcode.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from jax.profiler import ProfileData

from trainer.compile.hlo import Instruction, Module

Part = Literal[
    "attention forward",
    "attention backward",
    "matmuls",
    "loss",
    "norms and elementwise",
    "optimizer",
    "copies and transposes",
    "collectives",
    "unknown",
]
PARTS: tuple[Part, ...] = get_args(Part)

_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Scopes of `kernels.collectives`.
_SENDING_MATMULS = ("all_gather_matmul", "matmul_reduce_scatter")
_MATMUL_TARGETS = ("__cublas$", "__triton_gemm", "__cudnn$conv")
# A fusion of these alone only moves data. A convert only changes its width.
_DATA_MOVEMENT = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape", "copy", "transpose", "convert"),
        *("slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "broadcast"),
    )
)
_KERNEL_NAMES: tuple[tuple[str, Part], ...] = (
    (r"memcpy|memset", "copies and transposes"),
    (r"nccl", "collectives"),
    (r"nvjet|gemm|cutlass|cublas", "matmuls"),
)


@dataclass(frozen=True)
class TracedKernel:
    """One thing that the device ran."""

    name: str
    instruction: str | None
    """Name of the HLO instruction, where the trace knows it."""
    start_ns: float
    stop_ns: float


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds of one step, a mean over the steps traced."""

    parts: dict[Part, float]
    idle: float
    """The device waited, for the host or between kernels."""
    kernels: tuple[tuple[str, Part, str, float, float], ...]
    """The longest: name, part, op name, milliseconds per step and runs per step."""

    @property
    def total(self) -> float:
        return sum(self.parts.values()) + self.idle

    def to_json(self) -> dict[str, Any]:
        """As a dict of JSON's types."""
        return {
            "parts_ms": self.parts,
            "idle_ms": self.idle,
            "kernels": [
                dict(zip(("name", "part", "op", "ms", "runs"), kernel, strict=True)) for kernel in self.kernels
            ],
        }


def read_kernels(trace: Path, gpu: int = 0) -> list[TracedKernel]:
    """Kernels that a GPU ran, by start; empty where the trace has no such GPU.

    Args:
      trace: the folder that `jax.profiler.trace` wrote.
      gpu: its number.
    """
    (file,) = trace.rglob("*.xplane.pb")
    with warnings.catch_warnings():
        # Python 3.12 finds fault with how jaxlib (0.11.2) makes the type of `event.stats`; as an error it is fatal.
        warnings.simplefilter("ignore", DeprecationWarning)
        return sorted(_gpu_kernels(ProfileData.from_file(str(file)), gpu), key=lambda kernel: kernel.start_ns)


def _gpu_kernels(profile: ProfileData, gpu: int) -> Iterator[TracedKernel]:
    plane = profile.find_plane_with_name(f"/device:GPU:{gpu}")
    for line in plane.lines if plane is not None else ():
        # The other lines repeat the streams' kernels, grouped.
        if line.name is None or not line.name.startswith("Stream"):
            continue
        for event in line.events:
            stats = dict(event.stats)
            instruction = stats.get("hlo_op")
            yield TracedKernel(
                event.name,
                None if instruction is None else str(instruction),
                event.start_ns,
                event.start_ns + event.duration_ns,
            )


def break_down(kernels: Sequence[TracedKernel], module: Module, num_steps: int, *, num_kernels: int = 40) -> Breakdown:
    """Sums kernels by part.

    Args:
      kernels: of the steps traced and nothing else, by start.
      module: the step's program.
      num_steps: how many were traced.
      num_kernels: how many of the longest to list.
    """
    instructions = {
        instruction.name: instruction
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
    }
    # Kernels that XLA generates have their instruction's name, as a C identifier.
    by_kernel_name = {re.sub(r"\W", "_", name): instruction for name, instruction in instructions.items()}
    parts: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
    listed: dict[tuple[str, Part, str], list[float]] = defaultdict(list)
    for kernel in kernels:
        instruction = instructions.get(kernel.instruction or "") or by_kernel_name.get(kernel.name)
        part = part_of_name(kernel.name) if instruction is None else part_of(instruction, module)
        parts[part] += (kernel.stop_ns - kernel.start_ns) / num_steps / 1e6
        op = "" if instruction is None else instruction.op_name
        listed[kernel.name, part, op].append(kernel.stop_ns - kernel.start_ns)
    longest = sorted(listed.items(), key=lambda item: -sum(item[1]))[:num_kernels]
    return Breakdown(
        parts,
        _gaps_ns(kernels) / num_steps / 1e6,
        tuple((*key, sum(times) / num_steps / 1e6, len(times) / num_steps) for key, times in longest),
    )


def _gaps_ns(kernels: Sequence[TracedKernel]) -> float:
    """Nanoseconds between the first kernel's start and the last one's end in which none ran."""
    gaps, busy_until = 0.0, kernels[0].start_ns if kernels else 0.0
    for kernel in kernels:
        gaps += max(kernel.start_ns - busy_until, 0.0)
        busy_until = max(busy_until, kernel.stop_ns)
    return gaps


def part_of(instruction: Instruction, module: Module) -> Part:
    """The part of a step that an instruction belongs to."""
    op = instruction.op_name
    if instruction.opcode.removesuffix("-start").removesuffix("-done") in _COLLECTIVES:
        return "collectives"
    if _in_scope(op, "optimizer"):
        return "optimizer"
    if _in_scope(op, "loss"):
        return "loss"
    opcodes = _opcodes(instruction, module)
    if opcodes <= _DATA_MOVEMENT:
        return "copies and transposes"
    if _in_scope(op, "dot_product_attention"):
        return "attention backward" if "transpose(" in op else "attention forward"
    target = instruction.attributes
    if "dot" in opcodes or any(name in target for name in _MATMUL_TARGETS) or _is_matmul_that_sends(instruction):
        return "matmuls"
    return "norms and elementwise"


def _is_matmul_that_sends(instruction: Instruction) -> bool:
    """True for a kernel of `kernels.collectives`, which computes and sends at the same time."""
    return instruction.opcode == "custom-call" and any(
        _in_scope(instruction.op_name, scope) for scope in _SENDING_MATMULS
    )


def part_of_name(kernel: str) -> Part:
    """The part of a step that a kernel of an unknown instruction belongs to."""
    return next((part for pattern, part in _KERNEL_NAMES if re.search(pattern, kernel, re.IGNORECASE)), "unknown")


def _in_scope(op: str, scope: str) -> bool:
    """True if an op's name, `jit(f)/transpose(jvp(scope))/while/body/add`, has the scope among its parts."""
    return re.search(rf"(?:^|[/(]){scope}(?:[/)]|$)", op) is not None


def _opcodes(instruction: Instruction, module: Module) -> frozenset[str]:
    """The operations within a fusion, or the operation itself."""
    if instruction.opcode != "fusion":
        return frozenset((instruction.opcode,))
    called = (module.computations[name] for name in instruction.called() if name in module.computations)
    return frozenset().union(*(_opcodes(inner, module) for body in called for inner in body.instructions.values()))
