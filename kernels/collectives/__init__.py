"""Matmuls between tokens and features that are split over the same mesh axis, with what the ranks send each other.

collective_matmul.py      the two matmuls, with their gradients, and the choice of how tokens get to other ranks
peer_memory.py            which GPUs can read and write each other's memory
all_gather.py             a kernel in which two GPUs write their tokens to both GPUs' memory
matmul_reduce_scatter.py  a kernel in which two GPUs send each other products while they multiply
"""

from kernels.collectives.collective_matmul import (
    ChosenCollectives,
    Collectives,
    all_gather_matmul,
    choose_collectives,
    matmul_reduce_scatter,
)

__all__ = ["ChosenCollectives", "Collectives", "all_gather_matmul", "choose_collectives", "matmul_reduce_scatter"]
