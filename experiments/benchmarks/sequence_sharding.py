"""Shards random packed sequences by `balanced`: the imbalance of the ranks, the number of spans, and the time.

    python -m experiments.benchmarks.sequence_sharding --num-sequences 1000 --ranks 2 4 8 16 --length 131072

A row is filled with documents of one distribution; the last is cut, and up to 1 % of the row is padding. Costs are
counted in the tiles of the sharding, and again in tiles of half their side: a kernel's own lie between the two.
"""

from __future__ import annotations

import collections
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.command_line import read_arguments
from kernels import CausalMask, LocalMask, Mask
from kernels.context import chunk_costs, default_chunk_size, imbalance, shard_sequence
from trainer.hardware import installed_versions
from trainer.terminal.streams import reader_may_leave

PackedSequence = tuple[Int[np.ndarray, " T"], Int[np.ndarray, " T"]]
"""Segment ids, 0 on padding, and positions."""

DISTRIBUTIONS: dict[str, Callable[[np.random.Generator], float]] = {
    "log-normal, median 300": lambda rng: rng.lognormal(np.log(300), 1),
    "log-normal, median 4,000": lambda rng: rng.lognormal(np.log(4000), 1),
    "log-normal, median 30,000": lambda rng: rng.lognormal(np.log(30_000), 1),
    "Pareto, exponent 0.8": lambda rng: 300 * (rng.pareto(0.8) + 1),
    "all of 1,000": lambda rng: 1000,
}
"""Lengths of documents."""

MASKS: dict[str, dict[Mask, float]] = {
    "global": {CausalMask(): 12},
    "window and global": {CausalMask() & LocalMask(4095, 0): 18, CausalMask(): 6},
}
"""Masks and the number of their layers."""

# `shard_sequence` counts costs in tiles of 128 × 128, `chunk_costs` of chunks of 64 tokens in tiles of 64 × 64.
_SMALL_TILE = 64
_LARGEST_PADDING = 0.01


@dataclass(frozen=True)
class ShardingArguments:
    """Shards random packed sequences by their cost."""

    num_sequences: int = 1000
    """Sequences of each distribution."""
    ranks: tuple[int, ...] = (2, 4, 8, 16)
    """Devices that a sequence is sharded over."""
    length: int = 131_072
    """Tokens of a sequence."""
    distributions: tuple[str, ...] = tuple(DISTRIBUTIONS)
    """Distributions of the documents' lengths."""
    masks: str = "window and global"
    """The model's masks: a key of MASKS."""
    seed: int = 0
    output: Path | None = None
    """File that the JSON lines are appended to."""

    def __post_init__(self):
        if unknown := set(self.distributions) - set(DISTRIBUTIONS):
            raise ValueError(f"unknown distributions {sorted(unknown)}; expected some of {', '.join(DISTRIBUTIONS)}")
        if self.masks not in MASKS:
            raise ValueError(f"masks={self.masks!r} is not one of {', '.join(MASKS)}")
        if self.num_sequences < 1:
            raise ValueError(f"num_sequences={self.num_sequences} must be at least 1")
        if self.length % _SMALL_TILE:
            raise ValueError(f"length={self.length} is not a multiple of {_SMALL_TILE}, a tile's side")


@dataclass(frozen=True)
class MeasuredSharding:
    """Measurements of one sequence's sharding."""

    imbalance: float
    """The greatest rank's cost divided by the mean, in the tiles of the sharding."""
    imbalance_small_tiles: float
    """The imbalance in tiles of half their side."""
    num_spans: int
    """Spans of neighbouring tokens, over all ranks."""
    parted: float
    """Share of the documents shorter than a chunk that lie on more than one rank."""
    seconds: float


def random_sequence(
    length: int, draw: Callable[[np.random.Generator], float], rng: np.random.Generator
) -> PackedSequence:
    """A sequence of documents of random lengths; the last document is cut, and padding follows.

    >>> ids, positions = random_sequence(6, lambda rng: 4, np.random.default_rng())
    >>> ids.tolist(), positions.tolist()
    ([2, 2, 2, 2, 1, 1], [0, 1, 2, 3, 0, 1])
    """
    lengths, left = [], length - int(rng.integers(0, int(_LARGEST_PADDING * length) + 1))
    padding = length - left
    while left > 0:
        lengths.append(min(max(1, int(draw(rng))), left))
        left -= lengths[-1]
    ids = np.repeat(np.arange(len(lengths), 0, -1, dtype=np.int32), lengths)
    positions = np.concatenate([np.arange(each, dtype=np.int32) for each in lengths])
    return np.pad(ids, (0, padding)), np.pad(positions, (0, padding))


def measure_sharding(sequence: PackedSequence, masks: dict[Mask, float], num_ranks: int) -> MeasuredSharding:
    """Shards a sequence, and measures the result."""
    ids, positions = sequence
    begun = time.perf_counter()
    token_order = shard_sequence("balanced", len(ids), num_ranks, masks=masks, segment_ids=ids, positions=positions)
    seconds = time.perf_counter() - begun
    chunk_size = default_chunk_size(len(ids), num_ranks)

    def imbalance_of(side: int) -> float:
        costs = chunk_costs(masks, len(ids), side, segment_ids=ids, positions=positions)
        return imbalance(costs[token_order[::side] // side].reshape(num_ranks, -1))

    return MeasuredSharding(
        imbalance_of(chunk_size),
        imbalance_of(min(_SMALL_TILE, chunk_size)),
        num_spans=sum(1 + int((np.diff(rank_tokens) != 1).sum()) for rank_tokens in token_order.reshape(num_ranks, -1)),
        parted=_parted(ids, token_order, num_ranks),
        seconds=seconds,
    )


def _parted(ids: Int[np.ndarray, " T"], token_order: Int[np.ndarray, " T"], num_ranks: int) -> float:
    """The share of the documents shorter than a chunk that lie on more than one rank."""
    ranks = np.empty(len(ids), np.int64)
    ranks[token_order] = np.repeat(np.arange(num_ranks), len(ids) // num_ranks)
    starts = np.flatnonzero(np.diff(ids, prepend=ids[0] + 1))
    is_short = np.diff(starts, append=len(ids)) < default_chunk_size(len(ids), num_ranks)
    is_parted = np.minimum.reduceat(ranks, starts) < np.maximum.reduceat(ranks, starts)
    return float(is_parted[is_short].mean()) if is_short.any() else 0.0


def measure(arguments: ShardingArguments) -> Iterator[dict[str, Any]]:
    """A result for each distribution and number of ranks, of JSON's types."""
    rng, masks = np.random.default_rng(arguments.seed), MASKS[arguments.masks]
    for distribution in arguments.distributions:
        sharded: dict[int, list[MeasuredSharding]] = collections.defaultdict(list)
        for _ in range(arguments.num_sequences):
            sequence = random_sequence(arguments.length, DISTRIBUTIONS[distribution], rng)
            for num_ranks in arguments.ranks:
                sharded[num_ranks].append(measure_sharding(sequence, masks, num_ranks))
        for num_ranks, measured in sharded.items():
            yield {
                "distribution": distribution,
                "masks": arguments.masks,
                "length": arguments.length,
                "num_ranks": num_ranks,
                "num_sequences": len(measured),
                "imbalance_mean": statistics.mean(each.imbalance for each in measured),
                "imbalance_max": max(each.imbalance for each in measured),
                "imbalance_small_tiles_mean": statistics.mean(each.imbalance_small_tiles for each in measured),
                "imbalance_small_tiles_max": max(each.imbalance_small_tiles for each in measured),
                "num_spans_median": statistics.median(each.num_spans for each in measured),
                "short_documents_parted": statistics.mean(each.parted for each in measured),
                "seconds_median": statistics.median(each.seconds for each in measured),
            }


def main(arguments: ShardingArguments) -> None:
    """Measures, appends the results and prints the table."""
    common = {
        "seed": arguments.seed,
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
        "python": platform.python_version(),
        **installed_versions(("numpy",)),
        "date": datetime.date.today().isoformat(),
    }
    columns = ("documents", "ranks", "greatest ÷ mean", "worst", "small tiles", "worst", "spans", "parted", "ms")
    table = Table(
        *columns, title=f"{arguments.num_sequences} sequences each of {arguments.length:,} tokens, {arguments.masks}"
    )
    for result in measure(arguments):
        table.add_row(
            result["distribution"],
            str(result["num_ranks"]),
            f"{result['imbalance_mean']:.4f}",
            f"{result['imbalance_max']:.4f}",
            f"{result['imbalance_small_tiles_mean']:.4f}",
            f"{result['imbalance_small_tiles_max']:.4f}",
            f"{result['num_spans_median']:,.0f}",
            f"{result['short_documents_parted']:.1%}",
            f"{1e3 * result['seconds_median']:.1f}",
        )
        if arguments.output is not None:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            with arguments.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result | common) + "\n")
    console = Console()
    (console if console.is_terminal else Console(width=130)).print(table)


if __name__ == "__main__":
    with reader_may_leave():
        main(read_arguments(ShardingArguments))
