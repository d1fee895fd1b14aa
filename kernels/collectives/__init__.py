"""Matmuls between tokens and features that are split over the same mesh axis, with what the ranks send each other.

collective_matmul.py      the two matmuls, with their gradients, and the choice of how tokens get to other ranks
peer_memory.py            which GPUs can write to each other's memory
token_halves.py           how kernels cut two GPUs' tokens into tiles, and say what has arrived
all_gather_kernel.py      a matmul of two GPUs' tokens, which are sent under it
reduce_scatter_kernel.py  a matmul whose products two GPUs sum up, and send under it
"""

from kernels.collectives.collective_matmul import (
    ChosenCollectives,
    Collectives,
    all_gather_matmul,
    choose_collectives,
    matmul_reduce_scatter,
)

__all__ = ["ChosenCollectives", "Collectives", "all_gather_matmul", "choose_collectives", "matmul_reduce_scatter"]
