"""Attention kernels that never build a T×T mask: the mask algebra, block plans and their backends."""

from kernels.attention import Selection, dot_product_attention, select_backend
from kernels.block_plan import BlockPlan, count_allowed_pairs, make_block_plan
from kernels.intervals import TileKind
from kernels.masks import (
    CausalMask,
    ChunkedCausalMask,
    FullMask,
    LocalMask,
    Mask,
    MaskFn,
    MultiHeadMask,
    NumpyMask,
    PrefixMask,
    parse_mask,
)
from kernels.target import Target
from kernels.tuning import (
    BlockwiseTuning,
    MosaicBackwardTuning,
    MosaicForwardTuning,
    MosaicGpuTuning,
    SplashTuning,
    TritonTiles,
    TritonTuning,
    Tuning,
)

__all__ = [
    "BlockPlan",
    "BlockwiseTuning",
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
    "Selection",
    "SplashTuning",
    "Target",
    "TileKind",
    "TritonTiles",
    "TritonTuning",
    "Tuning",
    "count_allowed_pairs",
    "dot_product_attention",
    "make_block_plan",
    "parse_mask",
    "select_backend",
]
