"""The toolkit of Hopper kernels in Pallas Mosaic GPU. Attention, experts, collectives and the loss are its users.

machine.py            what differs between a Hopper GPU and Pallas's interpreter
launch.py             a kernel whose warpgroups have roles: a producer and consumers
begin_kernel.py       a kernel's first act, as it is lowered
memory.py             arrays in shared memory, and pipelines: rings of stages with their barriers
registers.py          accumulators, vectors, and the threads that hold them
tile_scheduler.py     the blocks that a program computes, and the turns of its warpgroups
softmax.py            online softmax in registers
persistent_matmul.py  persistent programs that compute one tile of a matmul after another
"""
