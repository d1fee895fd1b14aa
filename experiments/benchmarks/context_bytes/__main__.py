"""Bytes that attention over the context axis moves, against the least: by mask, devices and exchange.

The least is that of exchanges that leave queries where they are. `heads` moves queries, too, and may need less.

    python -m experiments.benchmarks.context_bytes --output context_bytes.jsonl

The attention of one layer of the 1.3B model (16 heads of 128, bfloat16), forward and backward, is compiled ahead of
time for each topology, and the collectives of the compiled programs are counted. No device is needed but the compiler.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.command_line import read_arguments
from experiments.benchmarks.compile_time.sweep import describe_failure
from experiments.benchmarks.context_bytes.least import count_hops, count_missing_keys, least_bytes
from experiments.benchmarks.context_bytes.measure import BytesCase, topology_of
from experiments.benchmarks.sequence_sharding import DISTRIBUTIONS, PackedSequence, random_sequence
from kernels import parse_mask
from kernels.context import SequenceSharding, shard_sequence
from kernels.context.choose_exchange import EXCHANGES
from trainer.errors import UserMistake
from trainer.hardware import installed_versions
from trainer.terminal.streams import reader_may_leave
from trainer.terminal.units import format_bytes

Row = dict[str, Any]
"""A case's fields and those of its measurement; what depends on documents; versions."""

WORKLOADS = {
    "causal": ("CausalMask()", False),
    "window": ("LocalMask(4095, 0)", False),
    "packed": ("CausalMask()", True),
}
"""Masks, and whether sequences are packed: with documents of log-normal length, median 4,000."""

_CHOSEN = "chosen"
_HEADS, _HEAD_DIM, _ITEMSIZE = 16, 128, 2
_DOCUMENTS = DISTRIBUTIONS["log-normal, median 4,000"]
_NUM_DRAWN_BATCHES = 16


@dataclass(frozen=True)
class ContextMesh:
    """A topology, the number of its devices that share a sequence, and the sequence's tokens."""

    topology: str
    num_ranks: int
    length: int

    @staticmethod
    def parse(text: str) -> ContextMesh:
        """Reads TOPOLOGY/RANKS/TOKENS.

        Raises:
          UserMistake: it is none.
        """
        try:
            topology, num_ranks, length = text.split("/")
            return ContextMesh(topology, int(num_ranks), int(length))
        except ValueError:
            raise UserMistake(
                f"{text!r} is no case; expected TOPOLOGY/RANKS/TOKENS, such as v5p:2x2x2/8/131072"
            ) from None


@dataclass(frozen=True)
class BytesArguments:
    """Counts the bytes on the wire of attention over several devices."""

    cases: tuple[str, ...] = (
        "v5p:2x2x2/8/131072",
        "v5p:4x4x4/16/1048576",
        "v5p:4x4x4/64/1048576",
        "v6e:16x16/256/1048576",
    )
    """TOPOLOGY/RANKS/TOKENS: the ranks share a sequence of TOKENS tokens, other devices hold further sequences.
    local: this machine's devices, as a topology."""
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    """Keys of WORKLOADS."""
    exchanges: tuple[str, ...] = (_CHOSEN, "all_gather")
    """all_gather, peer and a halo that GPUs read (which count as if all of their keys came from other devices), halo,
    ring, all_to_all; chosen: by `kernels.context`."""
    sequence_sharding: SequenceSharding | None = None
    """contiguous, zigzag or balanced; None: chosen by `kernels.context`."""
    limit_s: float = 1800.0
    """Seconds for a case, after which its compilation is stopped."""
    seed: int = 0
    """Seed of the documents' lengths."""
    output: Path | None = None
    """File that the JSON lines are appended to, each as soon as it is measured."""

    def __post_init__(self):
        for name, given, known in (
            ("workloads", self.workloads, WORKLOADS),
            ("exchanges", self.exchanges, (_CHOSEN, *EXCHANGES)),
        ):
            if unknown := sorted(set(given) - set(known)):
                raise UserMistake(f"unknown {name} {', '.join(unknown)}; expected some of {', '.join(known)}")

    def bytes_cases(self) -> Iterator[tuple[str, BytesCase]]:
        """Each case and the name of its workload."""
        for mesh in map(ContextMesh.parse, self.cases):
            for name in self.workloads:
                for exchange in self.exchanges:
                    mask, packed = WORKLOADS[name]
                    chosen = None if exchange == _CHOSEN else exchange
                    yield (
                        name,
                        BytesCase(
                            **asdict(mesh),
                            mask=mask,
                            packed=packed,
                            exchange=chosen,
                            sequence_sharding=self.sequence_sharding,
                        ),
                    )


def main(arguments: BytesArguments) -> int:
    """Measures, writes and prints; returns the exit status."""
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    rows: list[Row] = []
    status = 0
    try:
        cases = list(arguments.bytes_cases())
        for _, case in cases:
            if (topology := topology_of(case)) is not None:
                topology.require_compiler()
        for name, case in cases:
            row = run_case(name, case, arguments.limit_s, np.random.default_rng(arguments.seed))
            rows.append(row)
            if arguments.output is not None:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                with arguments.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            console.print(describe(row), markup=False, soft_wrap=True)
    except UserMistake as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        console.print("stopped; this is what was measured")
        status = 130
    if measured := [row for row in rows if "message" not in row]:
        console.print(make_table(measured))
    return status


def run_case(workload: str, case: BytesCase, limit_s: float, rng: np.random.Generator) -> Row:
    """Measures a case in a process of its own, and sets the least beside it.

    Returns:
      The row; with a `message` and no figures if there are none: refused, failed or stopped at the limit.
    """
    row: Row = {"workload": workload, **asdict(case), **installed_versions(("jax", "libtpu"))}
    row["date"] = datetime.date.today().isoformat()
    command = [sys.executable, "-m", "experiments.benchmarks.context_bytes.measure", json.dumps(asdict(case))]
    topology = topology_of(case)
    environment = os.environ | ({} if topology is None else topology.environment())
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return row | {"message": f"stopped at {limit_s:g} s"}
    if done.returncode:
        return row | {"message": describe_failure(done.returncode, done.stderr).removeprefix("error: ")}
    row |= json.loads(done.stdout.splitlines()[-1])
    num_drawn = _NUM_DRAWN_BATCHES * row["num_sequences"] if case.packed else 0
    drawn = [random_sequence(case.length, _DOCUMENTS, rng) for _ in range(num_drawn)]
    if any(row["trip_bytes"]):
        row["mean_hops"] = mean_hops(case, [ids for ids, _ in drawn], row["num_sequences"])
        # Of hops, which are one fewer, a ring makes one outside of its loops.
        trip_bytes = [(row["mean_hops"] - 2) * each for each in row["trip_bytes"]]
        row |= {
            "forward_bytes": row["forward_bytes"] + trip_bytes[0],
            "backward_bytes": row["backward_bytes"] + trip_bytes[1],
        }
    return row | least_of(case, row["sequence_sharding"], drawn[:_NUM_DRAWN_BATCHES])


def mean_hops(case: BytesCase, segment_ids: Sequence[Int[np.ndarray, " T"]], num_sequences: int) -> float:
    """Number of hops of a ring, the mean over batches of `num_sequences` sequences: as many as any sequence needs."""
    hops = np.array([count_hops(ids, case.num_ranks) for ids in segment_ids]).reshape(-1, num_sequences)
    return float(np.maximum(hops.max(1), 2).mean())


def least_of(case: BytesCase, sequence_sharding: SequenceSharding, drawn: Sequence[PackedSequence]) -> Row:
    """The fewest bytes that ranks need, mean and greatest over the ranks; the mean over packed sequences, if drawn."""
    mask = parse_mask(case.mask)
    counts = []
    for ids, positions in drawn if case.packed else [(None, None)]:
        documents: dict[str, Any] = {"segment_ids": ids, "positions": positions}
        token_order = shard_sequence(sequence_sharding, case.length, case.num_ranks, masks={mask: 1.0}, **documents)
        missing = count_missing_keys(mask, token_order, case.num_ranks, **documents)
        counts.append((missing.mean(), missing.max()))
    mean, greatest = (least_bytes(float(count), _HEADS, _HEAD_DIM, _ITEMSIZE) for count in np.mean(counts, axis=0))
    return {"least_mean_bytes": mean, "least_greatest_bytes": greatest}


def describe(row: Row) -> str:
    """A case in one line."""
    head = f"{row['workload']}, {row['topology']}, {row['num_ranks']} ranks, {row['length']:,} tokens"
    if "message" in row:
        return f"{head}, {row['exchange'] or 'chosen'}: {row['message']}"
    moved = format_bytes(row["forward_bytes"] + row["backward_bytes"])
    return f"{head}, {row['exchange']}, {row['sequence_sharding']}: {moved} a layer and device"


def make_table(rows: Sequence[Row]) -> Table:
    """Bytes that a device receives in a layer, and how many times the least that is."""
    table = Table(
        "mask", "topology", "ranks", "tokens", "exchange", "sharding", "forward", "backward", "least (busiest rank)",
        "×", "least (mean)", "×", "temporaries",
    )  # fmt: skip
    for row in rows:
        moved = row["forward_bytes"] + row["backward_bytes"]
        least = [sum(row[f"least_{which}_bytes"]) for which in ("greatest", "mean")]
        against = [text for each in least for text in (format_bytes(each), f"{moved / each:.2f}" if each else "–")]
        table.add_row(
            row["workload"],
            row["topology"],
            str(row["num_ranks"]),
            f"{row['length']:,}",
            row["exchange"],
            row["sequence_sharding"].replace("_", " "),
            format_bytes(row["forward_bytes"]),
            format_bytes(row["backward_bytes"]),
            *against,
            format_bytes(row["temporaries"]),
        )
    return table


if __name__ == "__main__":
    with reader_may_leave():
        try:
            parsed = read_arguments(BytesArguments, description=__doc__)
        except UserMistake as mistake:
            print(f"error: {mistake}", file=sys.stderr)
            sys.exit(2)
        sys.exit(main(parsed))
