"""Tuning objects: how a backend runs, apart from what it computes. Each stands beside the kernels that it tunes.

Give one as `implementation=` in place of the backend's name to replace the defaults.
"""

from kernels.backends.blockwise import BlockwiseTuning
from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning, MosaicForwardTuning, MosaicGpuTuning
from kernels.backends.splash.tuning import SplashTuning
from kernels.backends.triton.tuning import TritonTiles, TritonTuning
from kernels.decode.triton.tuning import TritonDecodeTuning

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
