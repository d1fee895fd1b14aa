"""Attention over several devices against one: each exchange, forward and backward, interleaved in one process.

    python -m experiments.benchmarks.context_attention --cases 16x128_131k packed_131k --output context_attention.jsonl

Efficiency is the time of one device divided by the number of devices and by the time of all: 100 % is as fast as can
be. `error` is the largest difference from one device's output and gradients, relative to the largest value.
Needs two accelerators or more.
"""

from __future__ import annotations

import datetime
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Int
from rich.table import Table

from experiments.benchmarks.attention.cases import Case, make_problem
from experiments.benchmarks.command_line import append_rows, read_arguments, require_known, table_console
from experiments.benchmarks.forward_and_backward import ForwardAndBackward
from kernels import CausalMask, LocalMask, dot_product_attention
from kernels.context import Exchange, MeshLayout, SequenceSharding, attend_over_mesh, shard_sequence
from trainer.hardware import installed_versions
from trainer.step.functions import WITHOUT_CUDA_GRAPHS
from trainer.terminal.streams import reader_may_leave

CASES = {
    "16x128_131k": Case(1, 131_072, 16, 16, 128, CausalMask()),
    "16x128_32k": Case(1, 32_768, 16, 16, 128, CausalMask()),
    "32_8x128_131k": Case(1, 131_072, 32, 8, 128, CausalMask()),
    "12x64_131k": Case(1, 131_072, 12, 12, 64, CausalMask()),
    "12x64_32k": Case(1, 32_768, 12, 12, 64, CausalMask()),
    "packed_131k": Case(1, 131_072, 16, 16, 128, CausalMask(), document_length=4096, document_spread=1.0),
    "window_131k": Case(1, 131_072, 16, 16, 128, CausalMask() & LocalMask(4095, 0)),
}
CONTENDERS: tuple[tuple[Exchange, SequenceSharding], ...] = (
    ("all_gather", "contiguous"),
    ("all_gather", "zigzag"),
    ("all_gather", "balanced"),
    ("peer", "zigzag"),
    ("peer", "balanced"),
    ("ring", "zigzag"),
    ("ring", "balanced"),
    ("halo", "contiguous"),
    ("all_to_all", "contiguous"),
)


@dataclass(frozen=True)
class ContextArguments:
    """Measures attention over all devices against one of them, in bfloat16."""

    cases: tuple[str, ...] = tuple(CASES)
    """Names from CASES."""
    exchanges: tuple[Exchange, ...] | None = None
    """None: all that serve a case."""
    num_rounds: int = 5
    """Rounds, of which the median counts."""
    sample_ms: float = 150.0
    """Least time of a sample."""
    output: Path | None = None
    """File that the JSON lines are appended to."""

    def __post_init__(self):
        require_known(self.cases, CASES, "cases")


def measure(name: str, case: Case, arguments: ContextArguments) -> list[dict[str, Any]]:
    """One row for each contender that serves the case."""
    devices = jax.devices()
    problem = make_problem(case)
    *arrays, cotangent = (problem.arrays[name] for name in (*case.inputs, "d_output"))
    # Id 0 is padding's.
    ids = None if problem.segment_ids is None else problem.segment_ids + 1
    segment_ids = None if ids is None else np.asarray(ids[0])

    def on_one(query, key, value):
        return dot_product_attention(
            query, key, value, case.mask, query_segment_ids=ids, key_value_segment_ids=ids, device=devices[0]
        )

    with jax.default_device(devices[0]):
        one = ForwardAndBackward(on_one, arrays, cotangent, WITHOUT_CUDA_GRAPHS)

    mesh = jax.make_mesh((1, 1, len(devices)), ("batch", "heads", "context"), (AxisType.Auto,) * 3)
    common = {"case": name, "num_devices": len(devices), "device": devices[0].device_kind}
    common |= {"versions": installed_versions(("jax", "jaxlib")), "date": datetime.date.today().isoformat()}
    rows: list[dict[str, Any]] = []
    contenders: list[tuple[dict[str, Any], ForwardAndBackward]] = []
    for exchange, sequence_sharding in CONTENDERS:
        if sequence_sharding == "balanced" and ids is None:
            continue
        if arguments.exchanges is not None and exchange not in arguments.exchanges:
            continue
        token_order = shard_sequence(
            sequence_sharding, case.length, len(devices), masks={case.mask: 1.0}, segment_ids=segment_ids
        )
        layout = MeshLayout(mesh, ("batch",), "context", "heads", sequence_sharding)
        row = {**common, "exchange": exchange, "sequence_sharding": sequence_sharding}
        try:
            timed, error = compile_exchange(
                case, layout, exchange, jnp.asarray(token_order), (*arrays, cotangent), ids, one.results
            )
        except ValueError as refusal:
            rows.append({**row, "refused": str(refusal)})
        else:
            contenders.append((row | {"error": error, "temporary_bytes": timed.temporary_bytes}, timed))
    one.results = None
    for _ in range(arguments.num_rounds):
        for timed in (one, *(timed for _, timed in contenders)):
            timed.measure(arguments.sample_ms)
    return [*(row | times_beside(timed, one, len(devices)) for row, timed in contenders), *rows]


def compile_exchange(
    case: Case,
    layout: MeshLayout,
    exchange: Exchange,
    token_order: Int[jax.Array, " T"],
    arrays: Sequence[jax.Array],
    ids: Int[jax.Array, "1 T"] | None,
    expected: Any,
) -> tuple[ForwardAndBackward, float]:
    """An exchange's programs, and the error of their results.

    Args:
      case: the shape.
      layout: of the arrays on the mesh.
      exchange: how ranks get at their keys.
      token_order: of the tokens in the order of the ranks.
      arrays: query, key, value and the output's gradient, in the sequence's order.
      ids: of the documents.
      expected: one device's output and gradients.

    Raises:
      ValueError: the exchange can't serve the case.
    """
    sharding = NamedSharding(layout.mesh, PartitionSpec("batch", "context"))

    def sharded(x: jax.Array) -> jax.Array:
        return jax.device_put(x[:, token_order], sharding)

    sharded_ids = None if ids is None else sharded(ids)
    sharded_order = sharded(jnp.arange(case.length, dtype=jnp.int32)[None])

    def on_mesh(query, key, value):
        return attend_over_mesh(
            query, key, value, case.mask, layout, segment_ids=sharded_ids, token_order=sharded_order, exchange=exchange
        )

    query, key, value, cotangent = map(sharded, arrays)
    timed = ForwardAndBackward(on_mesh, (query, key, value), cotangent, WITHOUT_CUDA_GRAPHS)
    results = zip(jax.tree.leaves(timed.results), jax.tree.leaves(expected), strict=True)
    error = max(float(_largest_difference(found, sharded(right))) for found, right in results)
    timed.results = None
    return timed, error


def times_beside(timed: ForwardAndBackward, one: ForwardAndBackward, num_devices: int) -> dict[str, float]:
    """Medians of both sides' seconds, and of the efficiency."""
    row: dict[str, float] = {}
    for index, direction in enumerate(("forward", "backward")):
        ours, theirs = ([seconds[index] for seconds in each.seconds] for each in (timed, one))
        row[f"{direction}_s"], row[f"one_{direction}_s"] = statistics.median(ours), statistics.median(theirs)
        ratios = [b / a / num_devices for a, b in zip(ours, theirs, strict=True)]
        row[f"{direction}_efficiency"] = statistics.median(ratios)
    both = [sum(b) / sum(a) / num_devices for a, b in zip(timed.seconds, one.seconds, strict=True)]
    return row | {"efficiency": statistics.median(both)}


@jax.jit
def _largest_difference(found: jax.Array, right: jax.Array) -> jax.Array:
    """Relative to the largest value that is right."""
    found, right = found.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.abs(found - right).max() / jnp.abs(right).max()


def main(arguments: ContextArguments) -> int:
    """Measures, prints the table and returns the exit status."""
    devices = jax.devices()
    if len(devices) < 2 or devices[0].platform == "cpu":
        print(f"error: needs two accelerators or more, got {len(devices)} {devices[0].platform}", file=sys.stderr)
        return 2
    for name in arguments.cases:
        rows = measure(name, CASES[name], arguments)
        append_rows(arguments.output, rows)
        columns = ("forward ms", "backward ms", "efficiency f / b / both", "GB held", "error")
        table = Table("exchange", "sequence_sharding", *columns, title=name)
        for row in rows:
            if "refused" in row:
                continue
            efficiencies = ("forward_efficiency", "backward_efficiency", "efficiency")
            table.add_row(
                row["exchange"],
                row["sequence_sharding"],
                f"{1e3 * row['forward_s']:.2f}",
                f"{1e3 * row['backward_s']:.2f}",
                " / ".join(f"{row[key]:.1%}" for key in efficiencies),
                f"{row['temporary_bytes'] / 1e9:.2f}",
                f"{row['error']:.4f}",
            )
        table_console().print(table)
    return 0


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(read_arguments(ContextArguments)))
