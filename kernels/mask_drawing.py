"""The old name of `kernels.masks.drawing`, under which the documentation of 0.1 had it."""

from kernels.masks.drawing import block_map, save_png

__all__ = ["block_map", "save_png"]
