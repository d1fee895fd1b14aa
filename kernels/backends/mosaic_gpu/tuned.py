"""The best tunings found, written by `python -m experiments.benchmarks.tune_attention`: edit nothing here.

NVIDIA H200, JAX 0.11.2, 2026-11-21; NVIDIA H200, JAX 0.11.2, 2026-11-21, chosen by hand
"""

from typing import Literal

from kernels.backends.mosaic_gpu.kinds import Key
from kernels.tuning import MosaicBackwardTuning, MosaicForwardTuning

FORWARD: dict[Key, MosaicForwardTuning] = {
    Key(32, "causal", 4096): MosaicForwardTuning(
        num_warpgroups=3,
        block_kv=128,
        persistent=True,
    ),
    Key(32, "causal", 32768): MosaicForwardTuning(
        num_warpgroups=3,
        block_kv=128,
        persistent=False,
    ),
    Key(64, "causal", 4096): MosaicForwardTuning(
        num_warpgroups=3,
        block_kv=128,
        persistent=True,
    ),
    Key(64, "causal", 32768): MosaicForwardTuning(
        num_warpgroups=3,
        block_kv=128,
        num_stages=2,
        take_turns=True,
        persistent=False,
    ),
    Key(64, "packed", 32768): MosaicForwardTuning(
        num_warpgroups=2,
        block_kv=128,
        num_stages=2,
        take_turns=True,
        persistent=False,
    ),
    Key(128, "causal", 4096): MosaicForwardTuning(
        num_warpgroups=2,
        block_kv=128,
        persistent=True,
    ),
    Key(128, "causal", 32768): MosaicForwardTuning(
        num_warpgroups=2,
        block_kv=128,
        num_stages=2,
        take_turns=True,
        persistent=False,
    ),
    Key(128, "full", 32768): MosaicForwardTuning(
        num_warpgroups=2,
        block_kv=128,
        persistent=False,
    ),
    Key(128, "packed", 32768): MosaicForwardTuning(
        num_warpgroups=2,
        block_kv=128,
        num_stages=2,
        take_turns=False,
        persistent=False,
    ),
    Key(128, "window", 32768): MosaicForwardTuning(
        num_warpgroups=2,
        block_kv=128,
        num_stages=2,
        take_turns=False,
        persistent=True,
    ),
    Key(256, "causal", 4096): MosaicForwardTuning(
        num_warpgroups=2,
        block_kv=64,
        persistent=False,
    ),
    Key(256, "causal", 32768): MosaicForwardTuning(
        num_warpgroups=2,
        block_kv=64,
        num_stages=2,
        take_turns=False,
        persistent=False,
    ),
}

FUSED: dict[Key, MosaicBackwardTuning] = {
    Key(32, "causal", 4096): MosaicBackwardTuning(
        block_q=128,
    ),
    Key(32, "causal", 32768): MosaicBackwardTuning(
        num_warpgroups=2,
        block_q=128,
        num_stages=2,
        one_gradient_each=False,
        block_kv_dq=64,
        num_stages_dq=2,
    ),
    Key(64, "causal", 4096): MosaicBackwardTuning(
        num_warpgroups=2,
        block_q=128,
        num_stages=2,
        one_gradient_each=False,
        block_kv_dq=64,
        num_stages_dq=2,
    ),
    Key(64, "causal", 32768): MosaicBackwardTuning(
        num_warpgroups=2,
        block_q=128,
        num_stages=2,
        one_gradient_each=False,
        block_kv_dq=64,
        num_stages_dq=2,
    ),
    Key(64, "packed", 32768): MosaicBackwardTuning(
        num_warpgroups=2,
        block_q=128,
        num_stages=2,
        one_gradient_each=False,
        block_kv_dq=64,
        num_stages_dq=2,
    ),
    Key(128, "causal", 4096): MosaicBackwardTuning(
        num_warpgroups=2,
        block_q=64,
        num_stages=2,
        one_gradient_each=False,
        block_kv_dq=64,
        num_stages_dq=2,
    ),
    Key(128, "causal", 32768): MosaicBackwardTuning(
        num_warpgroups=2,
        block_q=64,
        num_stages=2,
        one_gradient_each=False,
        block_kv_dq=64,
        num_stages_dq=2,
    ),
    Key(128, "full", 32768): MosaicBackwardTuning(
        block_q=64,
    ),
    Key(128, "packed", 32768): MosaicBackwardTuning(
        num_warpgroups=2,
        block_q=64,
        num_stages=2,
        one_gradient_each=False,
        block_kv_dq=64,
        num_stages_dq=2,
    ),
    Key(128, "window", 32768): MosaicBackwardTuning(
        num_warpgroups=2,
        block_q=64,
        num_stages=2,
        one_gradient_each=False,
        block_kv_dq=64,
        num_stages_dq=2,
    ),
}

SPLIT: dict[Key, MosaicBackwardTuning] = {
    Key(32, "causal", 4096): MosaicBackwardTuning(
        block_q=128,
    ),
    Key(32, "causal", 32768): MosaicBackwardTuning(
        num_warpgroups=3,
        block_q=64,
        num_stages=2,
        one_gradient_each=False,
        block_kv_dq=64,
        num_stages_dq=2,
    ),
    Key(64, "causal", 4096): MosaicBackwardTuning(
        num_warpgroups=2,
        block_q=128,
        num_stages=2,
        one_gradient_each=False,
        block_kv_dq=128,
        num_stages_dq=2,
    ),
    Key(64, "causal", 32768): MosaicBackwardTuning(
        num_warpgroups=3,
        block_q=64,
        num_stages=2,
        one_gradient_each=False,
        block_kv_dq=64,
        num_stages_dq=2,
    ),
    Key(64, "packed", 32768): MosaicBackwardTuning(
        num_warpgroups=3,
        block_q=64,
        num_stages=2,
        one_gradient_each=False,
        block_kv_dq=64,
        num_stages_dq=2,
    ),
    Key(128, "causal", 4096): MosaicBackwardTuning(
        num_warpgroups=2,
        block_q=64,
        num_stages=2,
        one_gradient_each=False,
        block_kv_dq=128,
        num_stages_dq=2,
    ),
    Key(128, "causal", 32768): MosaicBackwardTuning(
        num_warpgroups=2,
        block_q=64,
        num_stages=2,
        one_gradient_each=False,
        block_kv_dq=128,
        num_stages_dq=2,
    ),
    Key(128, "full", 32768): MosaicBackwardTuning(
        block_q=64,
    ),
    Key(128, "packed", 32768): MosaicBackwardTuning(
        num_warpgroups=2,
        block_q=64,
        num_stages=2,
        one_gradient_each=False,
        block_kv_dq=64,
        num_stages_dq=2,
    ),
    Key(128, "window", 32768): MosaicBackwardTuning(
        num_warpgroups=2,
        block_q=64,
        num_stages=2,
        one_gradient_each=False,
        block_kv_dq=128,
        num_stages_dq=2,
    ),
    Key(256, "causal", 4096): MosaicBackwardTuning(
        block_q=64,
        one_gradient_each=True,
    ),
    Key(256, "causal", 32768): MosaicBackwardTuning(
        num_warpgroups=2,
        block_q=64,
        num_stages=2,
        one_gradient_each=True,
        block_kv_dq=64,
        num_stages_dq=2,
    ),
}

FASTEST_BACKWARD: dict[Key, Literal["fused", "split"]] = {
    Key(32, "causal", 4096): "fused",
    Key(32, "causal", 32768): "fused",
    Key(64, "causal", 4096): "fused",
    Key(64, "causal", 32768): "fused",
    Key(64, "packed", 32768): "fused",
    Key(128, "causal", 4096): "split",
    Key(128, "causal", 32768): "fused",
    Key(128, "full", 32768): "fused",
    Key(128, "packed", 32768): "fused",
    Key(128, "window", 32768): "fused",
    Key(256, "causal", 4096): "split",
    Key(256, "causal", 32768): "split",
}
