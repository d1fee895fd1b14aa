"""How decoding's Triton kernels run: their tuning object, and the best tiles known for a call."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from kernels.backends.triton.tuning import TritonTiles, next_power_of_2
from kernels.decode.call import DecodeCall

# The smallest side of a matrix product, and the most rows of a tile that fit the registers.
SMALLEST_DOT, _MOST_ROWS = 16, 64
# Chosen on an H200 (docs/benchmarks.md, "Decoding"). Where sequences share few slots, a program has a block or two, and
# half the warps are faster.
_TILE_SLOTS, _FEW_SHARED_SLOTS = 32, 5120


@dataclass(frozen=True)
class TritonDecodeTuning:
    """How the `triton` backend decodes.

    Attributes:
      tiles: query rows and slots of a tile (`block_kv` divides the cache's block_size), warps and stages; None for the
        best known for the call.
      num_programs: most programs that a call's blocks are split over; at least one runs for each sequence and head.
      interpret: run in Triton's interpreter, on any device, float16 only: for tests, thousands of times slower.

    Raises:
      ValueError: no program.
    """

    backend: ClassVar[str] = "triton"

    tiles: TritonTiles | None = None
    num_programs: int = 528
    interpret: bool = False

    def __post_init__(self):
        if self.num_programs < 1:
            raise ValueError(f"num_programs={self.num_programs} must be at least 1")


def resolve(tuning: TritonDecodeTuning | None, call: DecodeCall) -> TritonDecodeTuning:
    """Settles the tiles that a tuning leaves open: all rows of a key/value head, as far as registers hold them."""
    tuning = tuning or TritonDecodeTuning()
    if tuning.tiles is not None:
        return tuning
    block_q = min(max(next_power_of_2(call.num_new * call.group_size), SMALLEST_DOT), _MOST_ROWS)
    rows_per_warp = 16 if call.one_slab and call.num_slots <= _FEW_SHARED_SLOTS else 8
    power_of_2_in_block = call.block_size & -call.block_size
    tiles = TritonTiles(block_q, min(_TILE_SLOTS, power_of_2_in_block), block_q // rows_per_warp, num_stages=3)
    return dataclasses.replace(tuning, tiles=tiles)
