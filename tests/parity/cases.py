"""The parity matrix: which meshes, exchanges, masks and ways of splitting a step are held to one device's gradients.

A case's text says all of it: `Case.parse(str(case))` is the case again, with the same parameters and tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kernels import CausalMask, ChunkedCausalMask, FullMask, LocalMask, Mask, MultiHeadMask, PrefixMask
from layers.remat import REMAT_POLICIES
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
    bounds: str | None = None
    """What else is allowed, as data: a kind of `draw_bounds`."""
    has_reach: bool = False
    """Whether a query looks only so far, in every layer and head."""


def _causal(q, k):
    return k <= q


def _window(q, k):
    return (k <= q) & (q - k < WINDOW)


def _prefix(q, k):
    return (k <= q) | (k < PREFIX)


def _chunked(q, k):
    return (k <= q) & (k // CHUNK == q // CHUNK)


def _near(q, k):
    return abs(q - k) < WINDOW


def _all(q, k):
    return (q == q) & (k == k)


_CAUSAL, _WINDOW = CausalMask(), CausalMask() & LocalMask(WINDOW - 1, 0)
ATTENTION = {
    "causal": Attention((_CAUSAL,), ((_causal,),)),
    "window": Attention((_WINDOW,), ((_window,),), has_reach=True),
    "window_and_global": Attention((_WINDOW, _CAUSAL), ((_window,), (_causal,))),
    "documents": Attention((_CAUSAL,), ((_causal,),), documents=True),
    "window_documents": Attention((_WINDOW,), ((_window,),), documents=True, has_reach=True),
    "prefix": Attention((_CAUSAL | PrefixMask(PREFIX),), ((_prefix,),)),
    "chunked": Attention((ChunkedCausalMask(CHUNK),), ((_chunked,),), has_reach=True),
    # In these, what a mask allows depends on positions, which start over in each document.
    "prefix_documents": Attention((_CAUSAL | PrefixMask(PREFIX),), ((_prefix,),), documents=True),
    "chunked_documents": Attention((ChunkedCausalMask(CHUNK),), ((_chunked,),), documents=True, has_reach=True),
    "sinks": Attention((_CAUSAL,), ((_causal,),), sinks=True),
    "soft_cap": Attention((_CAUSAL,), ((_causal,),), soft_cap=2.0),
    "heads_differ": Attention((MultiHeadMask([_CAUSAL, _WINDOW] * 4),), ((_causal, _window) * 4,)),
    # A branch's positions go on from where it leaves the tree: they restart, and tell no distances.
    "tree": Attention((_CAUSAL,), ((_causal,),), documents=True, bounds="tree"),
    "tree_windows": Attention((_WINDOW, _CAUSAL), ((_window,), (_causal,)), documents=True, sinks=True, bounds="tree"),
    "prefix_bounds": Attention((FullMask(),), ((_all,),), documents=True, bounds="prefix"),
    "image_blocks": Attention(
        (LocalMask(WINDOW - 1, WINDOW - 1),), ((_near,),), soft_cap=2.0, bounds="blocks", has_reach=True
    ),
    "everything": Attention((_WINDOW, _CAUSAL), ((_window,), (_causal,)), documents=True, sinks=True, soft_cap=2.0),
}

MIXED = ("causal", "window_documents", "everything")
"""What a mixture of experts is combined with. Its routers don't see masks, so a few do: one that a halo serves, and one
with two kinds of layers."""

NUM_DEVICES = 8
MESHES = tuple(sizes for sizes in itertools.product((1, 2, 4, 8), repeat=len(AXES)) if np.prod(sizes) == NUM_DEVICES)
HEADS = ((8, 8), (16, 8), (8, 2), (8, 1))
"""Query heads and key/value heads."""
EXCHANGES = ("all_gather", "halo", "ring", "all_to_all")
SEQUENCE_SHARDINGS = ("contiguous", "zigzag", "balanced")
REMATS = tuple(REMAT_POLICIES)
MLPS = ("dense", "mixture")
"""One MLP in each block, or a mixture of experts, whose routers add to the loss."""
KERNELS = ("reference", "blockwise")
ACCUMULATIONS = (1, 2)
LOSS_CHUNKS = (24, 4096)
"""Tokens whose logits exist at one time; the second is more than a device has."""


@dataclass(frozen=True)
class Problem:
    """What a model computes, whatever devices it runs on. The seed draws the parameters, tokens and other options."""

    attention: str
    heads: tuple[int, int]
    mlp: str
    seed: int


@dataclass(frozen=True)
class Placement:
    """How the step that computes it is carried out."""

    mesh: tuple[int, ...] = (1,) * len(AXES)
    exchange: str | None = None
    sequence_sharding: str | None = None
    accumulation: int = 1
    loss_chunk: int = LOSS_CHUNKS[-1]
    kernel: str = "reference"
    remat: str = "none"
    dtype: str = "float64"


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    problem: Problem
    placement: Placement

    def __str__(self) -> str:
        values = vars(self.problem) | vars(self.placement)
        return " ".join(f"{name}={_written(value)}" for name, value in values.items())

    @staticmethod
    def parse(text: str) -> Case:
        """The case whose text this is."""
        values = {name: _read(value) for name, value in (part.split("=") for part in text.split())}
        names = [field.name for field in dataclasses.fields(Problem)]
        return Case(Problem(**{name: values.pop(name) for name in names}), Placement(**values))

    @property
    def expected_refusal(self) -> str | None:
        """What the project's refusal of this case says, as a regular expression; None: it serves the case."""
        exchange = self.placement.exchange
        if self.problem.attention == "heads_differ":
            if self.placement.mesh[2] > 1:
                return "MultiHeadMask, whose heads mesh.tensor=. would split"
            if exchange in ("halo", "all_to_all"):
                return f"exchange='{exchange}' can't serve this call"
        if exchange == "halo" and self.placement.sequence_sharding == "balanced":
            return "sequence_sharding='balanced' decides for each sequence"
        if exchange == "halo" and not ATTENTION[self.problem.attention].has_reach:
            return "needs a mask that reaches only so far|needs positions that count up within a document"
        return None


def _written(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _read(value: str) -> object:
    if value[0].isdigit():
        numbers = tuple(map(int, value.split("x")))
        return numbers if len(numbers) > 1 else numbers[0]
    return None if value == "None" else value


def whole_matrix(seed: int) -> Iterator[Case]:
    """Every mesh of eight devices × exchange × attention × accumulation × loss chunk in float64, and every mesh ×
    exchange × attention in float32. The rest of each case is drawn.

    Refusals are cells like any other. An exchange of None, the choice for each mask, is a column where
    masks differ. A mixture of experts has every mesh × exchange × accumulation × loss chunk, with some attention that
    the exchange serves. It has no float32: of thousands of tokens one may be so near to another expert that rounding
    sends it there.
    """
    rng = np.random.default_rng(seed)
    in_float64 = [*itertools.product(ACCUMULATIONS, LOSS_CHUNKS, ("float64",))]
    for mesh, (name, attention) in itertools.product(MESHES, ATTENTION.items()):
        for split in (*in_float64, (None, None, "float32")):
            exchanges = (*EXCHANGES, None) if len(attention.masks) > 1 else EXCHANGES
            for exchange in exchanges if mesh[3] > 1 else (None,):
                yield _drawn(rng, seed, name, "dense", mesh, exchange, *split)
    for mesh, split in itertools.product(MESHES, in_float64):
        for exchange in EXCHANGES if mesh[3] > 1 else (None,):
            served = [name for name in MIXED if exchange != "halo" or ATTENTION[name].has_reach]
            yield _drawn(rng, seed, str(rng.choice(served)), "mixture", mesh, exchange, *split)


def sample(seed: int, num_problems: int) -> list[Case]:
    """Cells of the whole matrix: for each of some problems one cell of each exchange, and a refusal if it has any.

    One of several problems is of a mixture of experts.
    """
    rng = np.random.default_rng(seed)
    cells: dict[Problem, dict[str, list[Case]]] = {}
    for case in whole_matrix(seed):
        column = "refused" if case.expected_refusal else f"{case.placement.exchange}, {case.placement.mesh[3] > 1}"
        cells.setdefault(case.problem, {}).setdefault(column, []).append(case)
    dense, mixtures = ([p for p in cells if p.mlp == mlp] for mlp in MLPS)
    num_mixtures = 1 if num_problems > 1 else int(rng.integers(2))
    chosen = [
        problems[index]
        for problems, num in ((dense, num_problems - num_mixtures), (mixtures, num_mixtures))
        for index in rng.permutation(len(problems))[:num]
    ]
    return [column[rng.integers(len(column))] for problem in chosen for column in cells[problem].values()]


def _drawn(
    rng: np.random.Generator,
    seed: int,
    attention: str,
    mlp: str,
    mesh: tuple[int, ...],
    exchange: str | None,
    accumulation: int | None,
    loss_chunk: int | None,
    dtype: str,
) -> Case:
    heads = [heads for heads in HEADS if attention != "heads_differ" or heads[0] == 8]
    heads = heads if mlp == "dense" else [(8, 8)]  # few problems, as each is run on one device first
    heads = [(num, num_kv) for num, num_kv in heads if num_kv % mesh[2] == 0]
    # XLA takes several times as long for blockwise's loops as for dense attention, and a ring has some for each hop.
    is_blockwise = rng.random() < (0.1 if exchange == "ring" else 0.3)
    # A halo is refused balanced. It is to be served where the masks let it.
    shardings = SEQUENCE_SHARDINGS[:2] if exchange == "halo" and ATTENTION[attention].has_reach else SEQUENCE_SHARDINGS
    problem = Problem(attention, heads[rng.integers(len(heads))], mlp, seed + int(rng.integers(2)))
    placement = Placement(
        mesh,
        exchange,
        str(rng.choice(shardings)) if mesh[3] > 1 else None,
        accumulation or int(rng.choice(ACCUMULATIONS)),
        loss_chunk or int(rng.choice(LOSS_CHUNKS)),
        KERNELS[is_blockwise],
        str(rng.choice(REMATS)),
        dtype,
    )
    return Case(problem, placement)
