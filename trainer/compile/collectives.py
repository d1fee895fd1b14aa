"""The collectives of a compiled program: how many of each operation, and how many bytes, from its optimized HLO."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.compile.hlo import Computation, Instruction, Module, shape_bytes, tuple_elements
from trainer.compile.kernels import CALL_TARGET

# The kernels of `kernels.collectives`, in which GPUs use each other's memory, by the innermost scope of each.
_MATMULS = ("all_gather_matmul", "matmul_reduce_scatter")
_KERNELS = (*_MATMULS, "gather_chunks", "sum_chunks")
OPERATIONS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    *_KERNELS,
)
# libtpu's reduce-scatter is a fusion of this name: an all-reduce, and the slice of it that each device keeps.
_REDUCE_SCATTER_FUSION = "all-reduce-scatter"


@dataclass(frozen=True)
class CollectiveTotal:
    """All collectives of one operation (all-gather, all-reduce, …) in one run of a program."""

    operation: str
    num_instructions: int
    """In the program's text."""
    count: int
    """Executions: an instruction in a loop, such as the one over layers, counts once for each trip."""
    bytes: int
    """Sum over all executions, on each device, of the larger of a collective's input and its output."""
    is_exact: bool
    """False if some are in a loop whose number of trips is known only at run time."""


def count_collectives(module: Module, unknown_trips: int = 1) -> tuple[CollectiveTotal, ...]:
    """A total for every operation that occurs, in the order of `OPERATIONS`.

    XLA splits some collectives to overlap them with other work: into start and done, or into libtpu's chains of
    fusions. Each counts once. A collective among groups of a single device doesn't count: it is a copy at most. Of a
    conditional's branches only the one that moves most counts. Kernels that put rows together from GPUs' chunks count
    whole rows, whatever documents leave of them, and a halo beside the GPU's own chunks.

    Args:
      module: the program.
      unknown_trips: what a loop whose number of trips is known only at run time counts as.
    """

    def weigh(computation: Computation) -> int:
        return sum(_payload(computation, each) for _, each in _collectives(computation))

    runs = module.runs(weigh, unknown_trips)
    totals: dict[str, CollectiveTotal] = {}
    chains: set[str] = set()
    for name, computation in module.computations.items():
        for operation, instruction in _collectives(computation) if name in runs else ():
            chain = instruction.attribute("chain_id")
            if chain in chains:
                continue
            if chain is not None:
                chains.add(chain)
            total = totals.get(operation, CollectiveTotal(operation, 0, 0, 0, True))
            count, is_exact = runs[name]
            totals[operation] = CollectiveTotal(
                operation,
                total.num_instructions + 1,
                total.count + count,
                total.bytes + count * _payload(computation, instruction),
                total.is_exact and is_exact,
            )
    return tuple(totals[operation] for operation in OPERATIONS if operation in totals)


def _collectives(computation: Computation) -> Iterator[tuple[str, Instruction]]:
    """Those of a computation by itself, each with its operation."""
    for instruction in computation.instructions.values():
        operation = _operation(computation, instruction)
        if operation is not None and not _stays_on_device(instruction.attributes):
            yield operation, instruction


def _operation(computation: Computation, instruction: Instruction) -> str | None:
    operation = instruction.opcode.removesuffix("-start")
    if operation == "all-reduce" and computation.name.startswith(_REDUCE_SCATTER_FUSION):
        return "reduce-scatter"
    if operation == "custom-call" and instruction.attribute("custom_call_target") == CALL_TARGET:
        scopes = re.split(r"[/()]", instruction.op_name)
        return next((scope for scope in reversed(scopes) if scope in _KERNELS), None)
    return operation if operation in OPERATIONS else None


def _stays_on_device(attributes: str) -> bool:
    """True if each group of devices that a collective works on is one device."""
    if re.search(r"replica_groups=\{(\{\d+\},?)+\}", attributes) or re.search(
        r"replica_groups=\[\d+,1\]<=", attributes
    ):
        return True
    # A mesh's axes and those that make a group: mesh['data'=1,'fsdp'=8] {'data'}
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\].*? \{('[^}]*')\}", attributes)
    if mesh:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
        return all(sizes.get(axis) == "1" for axis in re.findall(r"'([^']+)'", mesh[2]))
    transfers = re.search(r"source_target_pairs=\{([\d{},]*)\}", attributes)
    return transfers is not None and all(
        source == target for source, target in re.findall(r"\{(\d+),(\d+)\}", transfers[1])
    )


def _payload(computation: Computation, instruction: Instruction) -> int:
    result = instruction.shape
    if instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start":
        result = tuple_elements(result)[1]  # (operands, results, context …)
    operands = [computation.instructions[name].shape for name in instruction.operands]
    if (operation := _operation(computation, instruction)) in _MATMULS:
        # All GPUs' tokens: the second result, or the first and those like it, of which each other GPU fills one.
        first, second, *_ = results = tuple_elements(result)
        return shape_bytes(second) if operation == "all_gather_matmul" else results.count(first) * shape_bytes(first)
    return max(shape_bytes(result), sum(map(shape_bytes, operands)))
