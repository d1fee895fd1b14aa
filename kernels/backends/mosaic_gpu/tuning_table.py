"""The best tiles known for a call: those of the likest call in the table `tuned`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, TypeVar

from kernels.backends.mosaic_gpu import tuned
from kernels.backends.mosaic_gpu.kinds import Key, mask_family
from kernels.call import AttentionCall
from kernels.tuning import MosaicBackwardTuning, MosaicForwardTuning, MosaicGpuTuning

_T = TypeVar("_T")


def resolve(tuning: MosaicGpuTuning | None, call: AttentionCall) -> MosaicGpuTuning:
    """Settles what a tuning leaves open. Pallas's interpreter, which has no atomics, can't run a fused backward."""
    tuning = tuning or MosaicGpuTuning()
    backward = "split" if tuning.interpret else tuning.backward or fastest_backward(call)
    return dataclasses.replace(
        tuning,
        backward=backward,
        forward_tiles=tuning.forward_tiles or forward_tiles(call),
        backward_tiles=tuning.backward_tiles or backward_tiles(call, backward),
    )


def forward_tiles(call: AttentionCall) -> MosaicForwardTuning:
    """The forward's tiles of a call."""
    return _likest(tuned.FORWARD, call)


def fastest_backward(call: AttentionCall) -> Literal["fused", "split"]:
    """The backward's faster form."""
    return _likest(tuned.FASTEST_BACKWARD, call)


def backward_tiles(call: AttentionCall, backward: Literal["fused", "split"] | None = None) -> MosaicBackwardTuning:
    """The backward's tiles of a call, in a form or in the faster one."""
    fused = (backward or fastest_backward(call)) == "fused"
    return _likest(tuned.FUSED if fused else tuned.SPLIT, call)


def _likest(table: Mapping[Key, _T], call: AttentionCall) -> _T:
    """The row of the next head dim, if possible with the same kind of mask, and then of the nearest length."""
    widest = max(call.head_dim, call.value_dim)
    # Positions come beside the keys as segment ids do: in what packed documents leave of shared memory.
    family = mask_family(call.mask, packed=call.has_segment_ids or call.has_positions)

    def unlikeness(key: Key):
        return key.head_dim, key.family != family, key.family != "causal", abs(math.log(key.length / call.q_len))

    return table[min((key for key in table if key.head_dim >= widest), key=unlikeness)]
