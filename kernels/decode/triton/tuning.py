"""The best tiles known for a call of decoding's Triton kernels."""

from __future__ import annotations

import dataclasses

from kernels.backends.triton.tuning import TritonDecodeTuning, TritonTiles, next_power_of_2
from kernels.decode.call import DecodeCall

# The smallest side of a matrix product, and the most rows of a tile that fit the registers.
SMALLEST_DOT, _MOST_ROWS = 16, 64
# Chosen on an H200 (docs/benchmarks.md, "Decoding"). Where sequences share few slots, a program has a block or two, and
# half the warps are faster.
_TILE_SLOTS, _FEW_SHARED_SLOTS = 32, 5120


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
