"""The best tiles found for each kind of call, on an H200."""

from __future__ import annotations

import dataclasses
from typing import Literal

from kernels.call import AttentionCall
from kernels.tuning import MosaicBackwardTuning, MosaicForwardTuning


def forward_tiles(call: AttentionCall) -> MosaicForwardTuning:
    """The forward's tiles of a call."""
    widest = max(call.head_dim, call.value_dim)
    if widest <= 64:
        best = MosaicForwardTuning(num_warpgroups=3, block_kv=128)
    elif widest <= 128:
        best = MosaicForwardTuning(num_warpgroups=2, block_kv=128)
    else:
        best = MosaicForwardTuning(num_warpgroups=2, block_kv=64)
    return dataclasses.replace(best, heads_first=call.q_len <= 8192)


def fastest_backward(call: AttentionCall) -> Literal["fused", "split"]:
    """The backward's faster form."""
    widest = max(call.head_dim, call.value_dim)
    # The fused one's passes over a float32 dQ cost more than they save on short sequences.
    return "split" if widest > 128 or (widest > 64 and call.q_len <= 8192) else "fused"


def backward_tiles(call: AttentionCall) -> MosaicBackwardTuning:
    """The backward's tiles of a call."""
    widest = max(call.head_dim, call.value_dim)
    if widest <= 64:
        return MosaicBackwardTuning(block_q=128)
    if widest <= 128:
        return MosaicBackwardTuning(block_q=64)
    return MosaicBackwardTuning(block_q=64, one_gradient_each=True)
