"""Attention over several devices against one: each exchange, forward and backward, interleaved in one process.

    python -m experiments.benchmarks.context_attention --cases 16x128_131k packed_131k --output context_attention.jsonl

Efficiency is the time of one device divided by the number of devices and by the time of all: 100 % is as fast as can
be. `error` is the largest difference from one device's output and gradients, relative to the largest value. What the
exchange takes is read off a trace: the bytes that a device receives, beside those expected, and the exposed seconds, in
which no kernel attends. What one device has of these, which has no exchange, and what the first one
waits for others, comes off the trace's. Needs two accelerators or more.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Int
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.command_line import read_arguments
from experiments.benchmarks.forward_and_backward import ForwardAndBackward
from experiments.benchmarks.traced_exchange import TracedExchange, trace_exchange
from experiments.benchmarks.train_throughput.workloads import pack
from kernels import CausalMask, LocalMask, Mask, dot_product_attention
from kernels.call import make_call
from kernels.context import Exchange, MeshLayout, SequenceSharding, attend_over_mesh, exchange_cost, shard_sequence
from trainer.errors import UserMistake
from trainer.hardware import installed_versions
from trainer.step.functions import WITHOUT_CUDA_GRAPHS
from trainer.terminal.streams import reader_may_leave


@dataclass(frozen=True)
class AttentionShape:
    """A shape. `documents`: the median length of packed ones, log-normal with a deviation of 1; None: one."""

    length: int
    num_heads: int = 16
    num_kv_heads: int = 16
    head_dim: int = 128
    mask: Mask = CausalMask()  # noqa: RUF009  (frozen)
    documents: int | None = None


CASES = {
    "16x128_131k": AttentionShape(131_072),
    "16x128_32k": AttentionShape(32_768),
    "32_8x128_131k": AttentionShape(131_072, num_heads=32, num_kv_heads=8),
    "12x64_131k": AttentionShape(131_072, num_heads=12, num_kv_heads=12, head_dim=64),
    "12x64_32k": AttentionShape(32_768, num_heads=12, num_kv_heads=12, head_dim=64),
    "packed_131k": AttentionShape(131_072, documents=4096),
    "window_131k": AttentionShape(131_072, mask=CausalMask() & LocalMask(4095, 0)),
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


class Contender(NamedTuple):
    """An exchange beside one device.

    Attributes:
      timed: its programs.
      error: the largest difference from one device's output and gradients, relative to the largest value.
      traced: what the exchange takes, beside the expected bytes; empty where the profiler sees no GPU.
    """

    timed: ForwardAndBackward
    error: float
    traced: dict[str, Any]


def measure(name: str, case: AttentionShape, arguments: ContextArguments) -> list[dict[str, Any]]:
    """One row for each contender that serves the case."""
    devices = jax.devices()
    *arrays, cotangent = draw_arrays(case)
    segment_ids = draw_segment_ids(case, np.random.default_rng())
    ids = None if segment_ids is None else jnp.asarray(segment_ids[None])

    def on_one(query, key, value):
        return dot_product_attention(
            query, key, value, case.mask, query_segment_ids=ids, key_value_segment_ids=ids, device=devices[0]
        )

    with jax.default_device(devices[0]):
        one = ForwardAndBackward(on_one, arrays, cotangent, WITHOUT_CUDA_GRAPHS)
    traced_one = trace_exchange(one.run, one.program)

    mesh = jax.make_mesh((1, 1, len(devices)), ("batch", "heads", "context"), (AxisType.Auto,) * 3)
    contenders: dict[tuple[Exchange, SequenceSharding], Contender] = {}
    refusals: dict[tuple[Exchange, SequenceSharding], str] = {}
    for exchange, sequence_sharding in CONTENDERS:
        if sequence_sharding == "balanced" and case.documents is None:
            continue
        if arguments.exchanges is not None and exchange not in arguments.exchanges:
            continue
        token_order = shard_sequence(
            sequence_sharding, case.length, len(devices), masks={case.mask: 1.0}, segment_ids=segment_ids
        )
        layout = MeshLayout(mesh, ("batch",), "context", "heads", sequence_sharding)
        try:
            contenders[exchange, sequence_sharding] = compile_contender(
                case, layout, exchange, jnp.asarray(token_order), (*arrays, cotangent), ids, one.results, traced_one
            )
        except ValueError as refusal:
            refusals[exchange, sequence_sharding] = str(refusal)
    one.results = None
    for _ in range(arguments.num_rounds):
        for timed in (one, *(contender.timed for contender in contenders.values())):
            timed.measure(arguments.sample_ms)

    rows = []
    common = {"case": name, "num_devices": len(devices), "device": devices[0].device_kind}
    common |= {"versions": installed_versions(("jax", "jaxlib")), "date": datetime.date.today().isoformat()}
    for (exchange, sequence_sharding), contender in contenders.items():
        row = {**common, "exchange": exchange, "sequence_sharding": sequence_sharding, "error": contender.error}
        row |= {"temporary_bytes": contender.timed.temporary_bytes, **contender.traced}
        rows.append(row | times_beside(contender.timed, one, len(devices)))
    for (exchange, sequence_sharding), reason in refusals.items():
        rows.append({**common, "exchange": exchange, "sequence_sharding": sequence_sharding, "refused": reason})
    return rows


def draw_arrays(case: AttentionShape) -> list[jax.Array]:
    """Query, key, value and the output's gradient, on the first device."""
    num_heads = [case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads]
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), len(num_heads))
    return [
        jax.random.normal(key, (1, case.length, heads, case.head_dim), jnp.bfloat16)
        for key, heads in zip(keys, num_heads, strict=True)
    ]


def draw_segment_ids(case: AttentionShape, rng: np.random.Generator) -> Int[np.ndarray, " T"] | None:
    """Segment ids of documents of log-normal lengths; None: one document."""
    if case.documents is None:
        return None
    lengths: list[int] = []
    while (left := case.length - sum(lengths)) > 0:
        lengths.append(min(left, max(1, round(case.documents * rng.lognormal(0.0, 1.0)))))
    return pack(lengths)[0]


def compile_contender(
    case: AttentionShape,
    layout: MeshLayout,
    exchange: Exchange,
    token_order: Int[jax.Array, " T"],
    arrays: Sequence[jax.Array],
    ids: Int[jax.Array, "1 T"] | None,
    expected: Any,
    traced_one: TracedExchange | None,
) -> Contender:
    """An exchange's programs, compared with one device's results and traced.

    Args:
      case: the shape.
      layout: of the arrays on the mesh.
      exchange: how ranks get at their keys.
      token_order: of the tokens in the order of the ranks.
      arrays: query, key, value and the output's gradient, in the row's order.
      ids: of the documents.
      expected: one device's output and gradients.
      traced_one: the same of one device.

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
    timed.results, traced = None, trace_exchange(timed.run, timed.program)
    if traced is None or traced_one is None:
        return Contender(timed, error, {})
    _, call = make_call(
        query,
        key,
        value,
        case.mask,
        query_segment_ids=sharded_ids,
        key_value_segment_ids=sharded_ids,
        device=layout.mesh.devices.flat[0],
    )
    of_a_device, split = layout.call_of_a_device(call), layout.split(case.length)
    cost, num_devices = exchange_cost(exchange, of_a_device, split, remat=False), layout.mesh.size
    row = {
        "traced": traced._asdict(),
        "exposed_s": traced.exposed_s - traced.waiting_s - traced_one.exposed_s / num_devices,
        "predicted_received_bytes": sum(cost.received_bytes),
    }
    return Contender(timed, error, row)


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


def _beside_the_model(row: dict[str, Any]) -> tuple[str, str]:
    """The traced bytes and time, and in parentheses the expected bytes."""
    if "traced" not in row:
        return "", ""
    received, exposed = row["traced"]["received_bytes"], row["exposed_s"]
    return (
        f"{received / 1e6:.0f} ({row['predicted_received_bytes'] / 1e6:.0f})",
        f"{1e3 * exposed:.2f}",
    )


@jax.jit
def _largest_difference(found: jax.Array, right: jax.Array) -> jax.Array:
    """Relative to the largest value that is right."""
    found, right = found.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.abs(found - right).max() / jnp.abs(right).max()


def main(command_line: Sequence[str]) -> int:
    """Measures, prints the table and returns the exit status."""
    arguments = read_arguments(ContextArguments, command_line)
    try:
        if unknown := sorted(set(arguments.cases) - set(CASES)):
            raise UserMistake(f"unknown cases {', '.join(unknown)}; expected some of {', '.join(CASES)}")
        if len(jax.devices()) < 2 or jax.devices()[0].platform == "cpu":
            raise UserMistake(f"needs two accelerators or more, got {len(jax.devices())} {jax.devices()[0].platform}")
    except UserMistake as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    console = Console(width=140)
    for name in arguments.cases:
        rows = measure(name, CASES[name], arguments)
        columns = (
            "forward ms",
            "backward ms",
            "efficiency f / b / both",
            "GB held",
            "error",
            "MB received",
            "exposed ms",
        )
        table = Table("exchange", "sequence_sharding", *columns)
        table.title = name
        for row in rows:
            if arguments.output is not None:
                with arguments.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            if "refused" in row:
                continue
            efficiency = " / ".join(
                f"{row[key]:.1%}" for key in ("forward_efficiency", "backward_efficiency", "efficiency")
            )
            table.add_row(
                row["exchange"],
                row["sequence_sharding"],
                f"{1e3 * row['forward_s']:.2f}",
                f"{1e3 * row['backward_s']:.2f}",
                efficiency,
                f"{row['temporary_bytes'] / 1e9:.2f}",
                f"{row['error']:.4f}",
                *_beside_the_model(row),
            )
        console.print(table)
    return 0


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(sys.argv[1:]))
