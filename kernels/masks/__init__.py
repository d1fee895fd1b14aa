"""Which pairs may attend: the mask algebra, bounds as data beside it, text and pictures of masks."""

from kernels.masks.algebra import AndMask, Mask, MultiHeadMask, NotMask, OrMask, require_mask
from kernels.masks.bounds import Bounds
from kernels.masks.dense import NumpyMask
from kernels.masks.intervals import TileKind
from kernels.masks.make_bounds import (
    block_bounds,
    document_bounds,
    prefix_bounds,
    tree_bounds_of_ends,
    tree_bounds_of_parents,
    window_bounds,
)
from kernels.masks.shapes import CausalMask, ChunkedCausalMask, FullMask, LocalMask, PrefixMask, ScheduledWindow
from kernels.masks.text import parse_mask
from kernels.masks.user_function import MaskFn

__all__ = [
    "AndMask",
    "Bounds",
    "CausalMask",
    "ChunkedCausalMask",
    "FullMask",
    "LocalMask",
    "Mask",
    "MaskFn",
    "MultiHeadMask",
    "NotMask",
    "NumpyMask",
    "OrMask",
    "PrefixMask",
    "ScheduledWindow",
    "TileKind",
    "block_bounds",
    "document_bounds",
    "parse_mask",
    "prefix_bounds",
    "require_mask",
    "tree_bounds_of_ends",
    "tree_bounds_of_parents",
    "window_bounds",
]
