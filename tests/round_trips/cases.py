"""The matrix of round trips: which models go into shards and back, in which dtypes, on which meshes of eight devices.

A case says all of it: an equal one has the same folder and the same shards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.layers.pretrained import golden

AXES = ("data", "fsdp", "tensor", "context")
NUM_DEVICES = 8
MESHES = tuple(sizes for sizes in itertools.product((1, 2, 4, 8), repeat=len(AXES)) if math.prod(sizes) == NUM_DEVICES)

MULTIMODAL, PACKED = "gemma3_multimodal", "gpt_oss_mxfp4"
MODELS = (*golden.CASES, MULTIMODAL, PACKED)
"""The golden models, which differ in what their families have of their own, Gemma 3 within a model of images, and
gpt-oss with packed experts."""

DTYPES = (
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float16", "float16"),
    ("float16", "float32"),
)
"""What a folder stores and what the shards hold, which holds all of it."""
PLACEMENTS = ("trainer", "random")
"""Shards as the trainer lays them out, or along any dims that the mesh divides."""


@dataclass(frozen=True)
class Case:
    """One cell of the matrix. The seed draws heads, weights, random shards, and into how many files tensors go.

    Args:
      trip: "folder": a folder into shards and out again; "run": a trained model into a folder and back into shards;
        "logits": a folder into a model on the mesh, which computes what it computes on one device.
      model: one of `MODELS`.
      stored: dtype of the folder's tensors.
      held: dtype of the shards.
      placement: one of `PLACEMENTS`, or "load_gpt": its own.
      mesh: sizes of `AXES`.
      seed: of the case.
    """

    trip: str
    model: str
    stored: str
    held: str
    placement: str
    mesh: tuple[int, ...]
    seed: int


def sample(seed: int, num_models: int) -> list[Case]:
    """A folder of each of some models in each of `DTYPES`, a run, and a model's logits, each on some mesh."""
    rng = np.random.default_rng(seed)

    def draw(choices: Sequence[Any]) -> Any:
        return choices[rng.integers(len(choices))]

    cases = [
        Case("folder", model, stored, held, draw(PLACEMENTS), draw(MESHES), seed)
        for model in rng.permutation(MODELS)[:num_models].tolist()
        for stored, held in DTYPES
        if model != PACKED or stored == "bfloat16"  # packed experts are bfloat16 and nothing else
    ]
    cases.append(Case("logits", draw(MODELS), "bfloat16", "float64", "load_gpt", draw(MESHES), seed))
    # What a run exports is neither packed nor within another model. It trains float32.
    cases.append(Case("run", draw([*golden.CASES]), "float32", "float32", "trainer", draw(MESHES), seed))
    return cases
