"""Attention kernels that never build a T×T mask: the mask algebra, block plans and their backends."""

from flax_longcontext import warn_of_neighbours
from kernels.arguments.token_integers import segment_ids_of_lengths
from kernels.attention import CantServe, Selection, dot_product_attention, select_backend
from kernels.backends.tuning import (
    BlockwiseTuning,
    MosaicBackwardTuning,
    MosaicForwardTuning,
    MosaicGpuTuning,
    SplashTuning,
    TritonDecodeTuning,
    TritonTiles,
    TritonTuning,
    Tuning,
)
from kernels.decode import CacheFull, SlabCache, SlotTable, TokenTree, UnifiedCache, decode_attention, slab_capacity
from kernels.masks import (
    Bounds,
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    Mask,
    MaskFn,
    MultiHeadMask,
    NumpyMask,
    PrefixMask,
    ScheduledWindow,
    TileKind,
    block_bounds,
    document_bounds,
    parse_mask,
    prefix_bounds,
    tree_bounds_of_ends,
    tree_bounds_of_parents,
    window_bounds,
)
from kernels.plan import BlockPlan, count_allowed_pairs, make_block_plan
from kernels.tracing.target import Target

warn_of_neighbours(__name__)

__all__ = [
    "BlockPlan",
    "BlockwiseTuning",
    "Bounds",
    "CacheFull",
    "CantServe",
    "CausalMask",
    "ChunkedCausalMask",
    "FullMask",
    "LocalMask",
    "Mask",
    "MaskFn",
    "MosaicBackwardTuning",
    "MosaicForwardTuning",
    "MosaicGpuTuning",
    "MultiHeadMask",
    "NumpyMask",
    "PrefixMask",
    "ScheduledWindow",
    "Selection",
    "SlabCache",
    "SlotTable",
    "SplashTuning",
    "Target",
    "TileKind",
    "TokenTree",
    "TritonDecodeTuning",
    "TritonTiles",
    "TritonTuning",
    "Tuning",
    "UnifiedCache",
    "block_bounds",
    "count_allowed_pairs",
    "decode_attention",
    "document_bounds",
    "dot_product_attention",
    "make_block_plan",
    "parse_mask",
    "prefix_bounds",
    "segment_ids_of_lengths",
    "select_backend",
    "slab_capacity",
    "tree_bounds_of_ends",
    "tree_bounds_of_parents",
    "window_bounds",
]
