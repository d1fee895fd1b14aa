"""What is tried: the one place that names the settings of the kernels' tunings."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.benchmarks.attention.cases import Direction
from kernels.tuning import MosaicBackwardTuning, MosaicForwardTuning, MosaicGpuTuning

Stage = Mapping[str, tuple[Any, ...]]
"""Settings that are tried in every combination, and their values."""


@dataclass(frozen=True)
class Search:
    """What is searched, one stage after another, each from the best of the one before.

    Attributes:
      timed: forward, or forward and backward.
      start: where to begin if the table has nothing of the kind.
      stages: of settings that matter together.
    """

    timed: Direction
    start: Any
    stages: tuple[Stage, ...]


# Tiles are powers of two: others leave a rest of most lengths, and keys and values would have to be copied to fill it.
SEARCHES = {
    "forward": Search(
        "forward",
        MosaicForwardTuning(),
        (
            # A persistent program's shared memory holds fewer tiles.
            {
                "num_warpgroups": (2, 3),
                "block_kv": (64, 128),
                "num_stages": (2, 3, 4),
                "persistent": (False, True),
            },
            {"take_turns": (False, True), "heads_at_once": (1, 4, 24)},
        ),
    ),
    "fused": Search(
        "forward_backward",
        MosaicBackwardTuning(),
        (
            {"num_warpgroups": (2, 3), "block_q": (64, 128), "num_stages": (1, 2, 3)},
            {"heads_at_once": (1, 2, 4, 12, 24, 48)},
        ),
    ),
    "split": Search(
        "forward_backward",
        MosaicBackwardTuning(),
        (
            {"num_warpgroups": (2, 3), "block_q": (64, 128), "num_stages": (1, 2), "one_gradient_each": (False, True)},
            {"block_kv_dq": (64, 128), "num_stages_dq": (1, 2)},
            {"heads_at_once": (1, 4, 24)},
        ),
    ),
}
"""By the table that a search makes. What a GPU can't hold, or a kernel refuses, has a row that says so."""


def implementation(search: str, tiles: Any, forward: MosaicForwardTuning | None) -> MosaicGpuTuning:
    """A candidate as the kernels take it.

    Args:
      forward: of a backward's candidate, the forward's tiles.
    """
    if search == "forward":
        return MosaicGpuTuning(forward_tiles=tiles)
    assert search in ("fused", "split")
    return MosaicGpuTuning(search, forward_tiles=forward, backward_tiles=tiles)  # type: ignore[arg-type]  # asserted


def variations(
    search: str, tuning: Any, stage: Stage, forward: MosaicForwardTuning | None
) -> dict[Any, MosaicGpuTuning]:
    """The tuning and all that differ from it in a stage's settings alone, as the kernels take them.

    Those that a tuning object refuses are left out.
    """
    found = {tuning: implementation(search, tuning, forward)}
    for values in itertools.product(*stage.values()):
        try:
            candidate = dataclasses.replace(tuning, **dict(zip(stage, values, strict=True)))
            found[candidate] = implementation(search, candidate, forward)
        except ValueError:
            continue
    return found
