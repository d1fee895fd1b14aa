"""Which tiles of the attention matrix a kernel visits: planned on the host from the mask, on the device from data too.

`make_block_plan` plans a mask ahead of time. `make_rows` plans a call: on the host where it can, on the device where
segment ids or positions are given. Both give `Rows`.
"""

from kernels.plan.bounds import counted
from kernels.plan.device import make_rows, tile_kinds_at
from kernels.plan.host import BlockPlan, count_allowed_pairs, make_block_plan
from kernels.plan.rows import Row, Rows, list_rows

__all__ = [
    "BlockPlan",
    "Row",
    "Rows",
    "count_allowed_pairs",
    "counted",
    "list_rows",
    "make_block_plan",
    "make_rows",
    "tile_kinds_at",
]
