"""How far apart blocks of keys start that would all start with the same query tile.

A fused backward adds to dQ, and blocks that run at the same time would all add to the same part of it at once.
"""

from __future__ import annotations

from jax.experimental import pallas as pl

from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning
from kernels.call import AttentionCall

# The most with which what blocks that run at the same time read and add to fits into half of the L2 cache, or else the
# least.
_SHIFTS = (4, 2, 1)
_HALF_OF_L2_BYTES = 25_000_000


def block_shift(call: AttentionCall, tuning: MosaicBackwardTuning) -> int:
    """By how many query tiles the start of a block is behind that of the block before it."""
    # Queries and d_output have 16 bits, and dQ, which is added to, has 32.
    bytes_of_tile = tuning.block_q * (6 * call.head_dim + 2 * call.value_dim)
    num_tiles, num_running = pl.cdiv(call.q_len, tuning.block_q), call.target.num_multiprocessors or 1
    num_heads = min(tuning.num_l2_heads, call.batch * call.num_kv_heads)

    def fits(shift: int) -> bool:
        tiles_of_head = min(num_tiles, pl.cdiv(num_running, num_heads) * shift)
        return num_heads * tiles_of_head * bytes_of_tile <= _HALF_OF_L2_BYTES

    return next((shift for shift in _SHIFTS if fits(shift)), _SHIFTS[-1])
