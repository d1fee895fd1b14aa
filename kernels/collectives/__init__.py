"""Collectives of a mesh axis's ranks with matmuls and attention, by kernels where GPUs share their memory.

collective_matmul.py      matmuls between tokens and features split over one axis, their gradients, and the choice of
                          how tokens get to other ranks
chunks.py                 rows put together from chunks that several GPUs hold, and their gradients
peer_memory.py            which GPUs can reach each other's memory
gpu_peers.py              GPUs, as a kernel sees them that runs on all
token_tiles.py            how kernels cut a GPU's tokens into tiles of a matmul
all_gather_kernel.py      a matmul of several GPUs' tokens, which are sent under it
reduce_scatter_kernel.py  a matmul whose products several GPUs sum up, and send under it
chunk_kernels.py          copies of chunks of all GPUs' memory, and sums of them
"""

from kernels.collectives.collective_matmul import (
    ChosenCollectives,
    Collectives,
    all_gather_matmul,
    choose_collectives,
    matmul_reduce_scatter,
)

__all__ = ["ChosenCollectives", "Collectives", "all_gather_matmul", "choose_collectives", "matmul_reduce_scatter"]
