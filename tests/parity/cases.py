"""The parity matrix: which meshes, exchanges, masks and ways of splitting a step are held to one device's gradients.

A case's text says all of it: `Case.parse(str(case))` is the case again, with the same parameters and tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kernels import CausalMask, ChunkedCausalMask, LocalMask, Mask, MultiHeadMask, PrefixMask
from tests.parity.oracle import Allows

AXES = ("data", "fsdp", "tensor", "context")
WINDOW, PREFIX, CHUNK = 13, 9, 24


@dataclass(frozen=True)
class Attention:
    """What the layers attend to, once as the project says it and once as a page of a textbook would."""

    masks: tuple[Mask, ...]
    allows: tuple[tuple[Allows, ...], ...]
    """For each of the masks one function, or one for each query head."""
    documents: bool = False
    sinks: bool = False
    soft_cap: float | None = None


def _causal(q, k):
    return k <= q


def _window(q, k):
    return (k <= q) & (q - k < WINDOW)


_CAUSAL, _WINDOW = CausalMask(), CausalMask() & LocalMask(WINDOW - 1, 0)
ATTENTION = {
    "causal": Attention((_CAUSAL,), ((_causal,),)),
    "window": Attention((_WINDOW,), ((_window,),)),
    "window_and_global": Attention((_WINDOW, _CAUSAL), ((_window,), (_causal,))),
    "documents": Attention((_CAUSAL,), ((_causal,),), documents=True),
    "window_documents": Attention((_WINDOW,), ((_window,),), documents=True),
    "prefix": Attention((_CAUSAL | PrefixMask(PREFIX),), ((lambda q, k: (k <= q) | (k < PREFIX),),)),
    # Positions decide, and they start over in each document.
    "prefix_documents": Attention(
        (_CAUSAL | PrefixMask(PREFIX),), ((lambda q, k: (k <= q) | (k < PREFIX),),), documents=True
    ),
    "chunked": Attention((ChunkedCausalMask(CHUNK),), ((lambda q, k: (k <= q) & (k // CHUNK == q // CHUNK),),)),
    "sinks": Attention((_CAUSAL,), ((_causal,),), sinks=True),
    "soft_cap": Attention((_CAUSAL,), ((_causal,),), soft_cap=2.0),
    "heads_differ": Attention((MultiHeadMask([_CAUSAL, _WINDOW] * 4),), ((_causal, _window) * 4,)),
    "everything": Attention(
        (_WINDOW, _CAUSAL), ((_window,), (_causal,)), documents=True, sinks=True, soft_cap=2.0
    ),
}

HEADS = ((8, 8), (16, 8), (8, 2), (8, 1))
"""Query heads and key/value heads."""
EXCHANGES = ("gather", "halo", "ring", "heads")
DEALS = ("in_order", "zigzag", "by_cost")
REMATS = ("none", "full", "save_attention", "save_matmuls")
TILES = (16, 24)
"""Tokens of a query tile and of a key/value tile, which don't divide the lengths below; 0: dense attention."""
LENGTHS = (80, 112)
LOSS_CHUNKS = (24, 4096)
"""Tokens; the second is more than a device has."""


@dataclass(frozen=True)
class Case:
    """One cell of the matrix: a model on a mesh."""

    mesh: tuple[int, int, int, int]
    exchange: str | None
    deal: str | None
    attention: str
    heads: tuple[int, int]
    accumulation: int
    loss_chunk: int
    kernel: str
    remat: str
    dtype: str
    seed: int
    """Draws parameters, tokens, and the rest of the model."""

    def __str__(self):
        return ",".join(
            f"{field.name}={'x'.join(map(str, value)) if isinstance(value, tuple) else value}"
            for field in dataclasses.fields(self)
            for value in [getattr(self, field.name)]
        )

    @staticmethod
    def parse(text: str) -> Case:
        """The case that a text stands for."""
        values = dict(part.split("=") for part in text.split(","))

        def read(name: str, value: str):
            if name in ("mesh", "heads"):
                return tuple(map(int, value.split("x")))
            if name in ("accumulation", "loss_chunk", "seed"):
                return int(value)
            return None if value == "None" else value

        return Case(**{name: read(name, value) for name, value in values.items()})

    @property
    def problem(self) -> tuple[str, tuple[int, int], int]:
        """What one device computes, whatever the mesh: cases of one problem are compared with one result."""
        return self.attention, self.heads, self.seed
