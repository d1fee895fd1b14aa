"""Mistakes of the kind that shards invite, to be found by the comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from layers.pretrained import save, shards
from layers.pretrained.steps import TensorRow
from tests.round_trips.cases import Case

FAULTY = Case("folder", "phi3", "float32", "float32", "trainer", (1, 2, 2, 2), seed=0)
"""A case that has what the faults mistake: shards, layers, and parameters that share a tensor."""


def _swap_shards(devices_of: Callable) -> Callable:
    def swapped(*arguments: Any) -> dict:
        shards = devices_of(*arguments)
        return dict(zip(shards, reversed(shards.values()), strict=True))

    return swapped


def _drop_a_bit(read_piece: Callable) -> Callable:
    def dropped(*arguments: Any) -> list[np.ndarray]:
        return [(part.view(np.uint32) & 0xFFFFFFFE).view(part.dtype) for part in read_piece(*arguments)]

    return dropped


def _swap_layers(take: Callable) -> Callable:
    return lambda array, position: take(array, (len(array) - 1 - position[0], *position[1:]) if position else ())


def _swap_parts(into_file: Callable) -> Callable:
    return lambda row, arrays: into_file(row, arrays if len(arrays) == 3 else arrays[::-1])


_CHANGES = {
    "shards on each other's devices": (shards, "_devices_of", _swap_shards),
    "a bit less": (shards.ShardReader, "_read_chunk", _drop_a_bit),
    "layers in the wrong order": (save, "take", _swap_layers),
    "gate and up the wrong way round": (TensorRow, "into_file", _swap_parts),
}
FAULTS = tuple(_CHANGES)


@contextmanager
def injected(fault: str) -> Iterator[None]:
    """Reading and writing with a mistake in it."""
    place, name, change = _CHANGES[fault]
    with mock.patch.object(place, name, change(getattr(place, name))):
        yield
