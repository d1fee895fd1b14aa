"""How much the busiest multiprocessor computes of a call of few blocks, by the forward's tiles.

Few blocks may leave multiprocessors idle at the end, and a length's last block may stick out far. Smaller blocks then
take less time, though they are slower by themselves.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence

import numpy as np

from kernels.call import AttentionCall
from kernels.plan import make_block_plan

# Of each multiprocessor. With more, all are busy nearly to the end, and how fast a block is counts for more than what
# this count knows of it: see docs/hopper_kernels.md.
_MOST_BLOCKS = 4
# In keys: a block's beginning and end take about as long as these.
_BLOCK_KEYS = 200


@functools.lru_cache(maxsize=256)
def makespan_of_few_blocks(block_q: int, block_kv: int, num_l2_heads: int, call: AttentionCall) -> int | None:
    """The pairs of queries and keys in the tiles that the busiest multiprocessor visits.

    Args:
      block_q, block_kv: sides of a tile.
      num_l2_heads: number of key/value heads whose blocks start before any other head's, counted over the batch.
      call: the call.

    Returns:
      The number of pairs, with some for the beginning and the end of each block. None where blocks are many, and where
      it isn't known what a block visits or how many multiprocessors there are.
    """
    num_multiprocessors = call.target.num_multiprocessors
    is_known = not (call.has_segment_ids or call.has_positions or call.bounds) and call.mask.num_heads is None
    if num_multiprocessors is None or not is_known or not call.mask.has_row_intervals:
        return None
    num_heads = call.batch * call.num_heads
    if num_heads * -(-call.q_len // block_q) > _MOST_BLOCKS * num_multiprocessors:
        return None
    rows = make_block_plan(call.mask, call.q_len, call.kv_len, block_q, block_kv).rows
    pairs = (rows.read(0, np.arange(rows.num_rows)).num_tiles * block_kv + _BLOCK_KEYS) * block_q
    at_once = num_l2_heads * call.group_size
    groups = [min(at_once, num_heads - first) for first in range(0, num_heads, at_once)]
    # As `TileScheduler` orders them: the last queries first.
    order = np.concatenate([np.repeat(pairs[::-1], size) for size in groups])
    return _list_schedule(order.tolist(), num_multiprocessors)


def _list_schedule(durations: Sequence[int], num_machines: int) -> int:
    """When the last job ends, where each starts as soon as a machine is free.

    >>> _list_schedule([3, 2, 2], num_machines=2)
    4
    """
    busy_until = [0] * num_machines
    for duration in durations:
        heapq.heapreplace(busy_until, busy_until[0] + duration)
    return max(busy_until)
