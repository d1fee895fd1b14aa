"""Tiles that the producer finds as it walks a row, where the bounds of the columns' tokens make holes in the row.

The producer tells the consumers a tile's number: in the ring's memory for tokens, behind these.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.backends.mosaic_gpu.tile_mask import Side, side_of
from kernels.call import AttentionCall


def has_numbers(call: AttentionCall, streamed: Side) -> bool:
    """True if the tokens that go through a ring have bounds: consumers then learn a tile's number from the producer."""
    return any(side_of(name) == streamed for name in call.bounds)


def write_number(memory: Any, slot, number, full) -> None:
    """Producer: writes a tile's number to its stage. It arrives at the barrier `full`."""
    memory[memory.shape[0] - 1, slot, 0] = number
    plgpu.barrier_arrive(full)


def read_number(memory: Any, slot) -> Any:
    """Consumer: the number of a stage's tile."""
    return memory[memory.shape[0] - 1, slot, 0]
