"""Tuning objects: how a backend runs, apart from what it computes. Each stands beside its kernels.

Give one as `implementation=` in place of the backend's name to replace the defaults.
"""

from kernels.backends.blockwise import BlockwiseTuning
from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning, MosaicForwardTuning, MosaicGpuTuning
from kernels.backends.splash.tuning import SplashTuning
from kernels.backends.triton.tuning import TritonDecodeTuning, TritonTiles, TritonTuning

__all__ = [
    "BlockwiseTuning",
    "MosaicBackwardTuning",
    "MosaicForwardTuning",
    "MosaicGpuTuning",
    "SplashTuning",
    "TritonDecodeTuning",
    "TritonTiles",
    "TritonTuning",
    "Tuning",
]

Tuning = BlockwiseTuning | SplashTuning | MosaicGpuTuning | TritonTuning | TritonDecodeTuning
