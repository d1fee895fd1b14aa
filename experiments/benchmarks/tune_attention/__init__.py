"""Finds the best tiles of the `mosaic_gpu` kernels for each kind of call, on the GPU at hand."""
