"""The tunings that a search tries. `python -m experiments.benchmarks.tune_attention` times them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kernels.backends.mosaic_gpu.support import unsupported_reason
from kernels.backends.mosaic_gpu.tuning import (
    FEW_BLOCKS,
    FORWARD,
    FUSED,
    SPLIT,
    MosaicBackwardTuning,
    MosaicForwardTuning,
    MosaicGpuTuning,
    TunedCall,
    tuned_head_dim,
)
from kernels.call import AttentionCall

Settings = Mapping[str, tuple[Any, ...]]
"""Settings that are tried in every combination, and their values."""
Searched = Literal["forward", "few_blocks", "fused", "split"]
"""The forward's tiles, those of its calls of few blocks, or those of one form of the backward."""
FORWARD_SEARCHES: tuple[Searched, ...] = ("forward", "few_blocks")


@dataclass(frozen=True)
class SearchSpace:
    """The tunings that a search times, in stages, each from the best of the stage before."""

    start: MosaicForwardTuning | MosaicBackwardTuning  # where to begin if this form's tuned tiles don't serve the call
    stages: tuple[Settings, ...]  # settings that matter together


# Tiles are powers of two, which divide most lengths: of others the last one would be partly empty.
_FORWARD = SearchSpace(
    MosaicForwardTuning(),
    (
        # A persistent program's shared memory holds fewer tiles.
        {"num_warpgroups": (2, 3), "block_kv": (64, 128), "num_stages": (2, 3, 4), "persistent": (False, True)},
        {"ping_pong": (False, True), "num_l2_heads": (1, 2, 4, 8, 12, 16, 24, 32, 48)},
    ),
)
SEARCH_SPACES: dict[Searched, SearchSpace] = {
    "forward": _FORWARD,
    "few_blocks": _FORWARD,
    "fused": SearchSpace(
        MosaicBackwardTuning(),
        (
            {"num_warpgroups": (2, 3), "block_q": (64, 128), "num_stages": (1, 2, 3)},
            {"num_l2_heads": (1, 2, 4, 8, 12, 24, 48), "persistent": (False, True)},
        ),
    ),
    "split": SearchSpace(
        MosaicBackwardTuning(),
        (
            {
                "num_warpgroups": (2, 3),
                "block_q": (64, 128),
                "num_stages": (1, 2),
                "one_gradient_per_warpgroup": (False, True),
            },
            {"block_kv_dq": (64, 128), "num_stages_dq": (1, 2)},
            {"num_l2_heads": (1, 4, 24), "persistent": (False, True)},
        ),
    ),
}


def backend_tuning(searched: Searched, tiles: Any, forward: MosaicForwardTuning | None) -> MosaicGpuTuning:
    """The backend's tuning with some tiles; beside tiles of a backward, with `forward` as the forward's."""
    if searched in FORWARD_SEARCHES:
        return MosaicGpuTuning(forward_tiles=tiles)
    assert searched == "fused" or searched == "split"
    return MosaicGpuTuning(searched, forward_tiles=forward, backward_tiles=tiles)


def known_tiles(
    searched: Searched, tiles: Any, forward: MosaicForwardTuning | None, call: AttentionCall
) -> dict[Any, MosaicGpuTuning]:
    """Tiles, those of all calls of the head dim, and the backend's tuning with each: what serves the call, no other.

    Several settings differ between them at a time, where the stages of a search change a few each.

    Args:
      tiles: the first of the result if they serve the call.
      forward: see `backend_tuning`.
    """
    known: list[tuple[TunedCall, Any]]
    if searched in FORWARD_SEARCHES:
        known = [*FORWARD.items(), *FEW_BLOCKS.items()]
    else:
        known = [*(FUSED if searched == "fused" else SPLIT).items()]
    head_dim = tuned_head_dim(call.head_dim, call.value_dim)
    of_head_dim = [each for key, each in known if key.head_dim == head_dim]
    tunings = {each: backend_tuning(searched, each, forward) for each in (tiles, *of_head_dim)}
    return {each: tuning for each, tuning in tunings.items() if unsupported_reason(call, tuning) is None}


def variations(
    searched: Searched, tiles: Any, settings: Settings, forward: MosaicForwardTuning | None, call: AttentionCall
) -> dict[Any, MosaicGpuTuning]:
    """Tiles that differ in these settings alone, and the backend's tuning with each: what serves the call, no other.

    Args:
      tiles: tiles to begin with; the first of the result if they serve the call.
      forward: see `backend_tuning`.
    """
    candidates = [{}, *(dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values()))]
    found = {}
    for candidate in candidates:
        try:
            varied = dataclasses.replace(tiles, **candidate)
            tuning = backend_tuning(searched, varied, forward)
        except ValueError:
            # These settings exclude each other.
            continue
        if unsupported_reason(call, tuning) is None:
            found[varied] = tuning
    return found
