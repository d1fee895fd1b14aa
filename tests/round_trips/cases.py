"""The matrix of round trips: which models go into shards and back, in which dtypes, on which meshes of eight devices.

A case says all of it: an equal one has the same folder and the same shards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

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


def whole_matrix(seed: int) -> Iterator[Case]:
    """Every model × mesh: its folder in all dtypes and both placements, its logits, and a run of it."""
    for model, mesh in itertools.product(MODELS, MESHES):
        # Packed experts are bfloat16 and nothing else.
        dtypes = [pair for pair in DTYPES if model != PACKED or pair[0] == "bfloat16"]
        for (stored, held), placement in itertools.product(dtypes, PLACEMENTS):
            yield Case("folder", model, stored, held, placement, mesh, seed)
        yield Case("logits", model, "bfloat16", "float64", "load_gpt", mesh, seed)
        # What a run exports is neither packed nor within another model. It trains float32.
        if model in golden.CASES:
            yield Case("run", model, "float32", "float32", "trainer", mesh, seed)


def sample(seed: int, num_models: int) -> list[Case]:
    """Cells of the whole matrix: a folder of each of some models in each of `DTYPES`, a run, and a model's logits."""
    rng = np.random.default_rng(seed)
    columns: dict[tuple[str, ...], list[Case]] = {}
    chosen = rng.permutation(MODELS)[:num_models]
    for case in whole_matrix(seed):
        if case.trip != "folder":
            columns.setdefault((case.trip,), []).append(case)
        elif case.model in chosen:
            columns.setdefault((case.model, case.stored, case.held), []).append(case)
    return [column[rng.integers(len(column))] for column in columns.values()]
