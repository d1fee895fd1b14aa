"""Attention over several devices against one: each exchange, forward and backward, interleaved in one process.

    python -m experiments.benchmarks.context_attention --cases 16x128_131k packed_131k --output context_attention.jsonl

Efficiency is the time of one device divided by the number of devices and by the time of all: 100 % is as fast as can
be. `error` is the largest difference from one device's output and gradients, relative to the largest value. What the
exchange takes is read off a trace, beside what the cost model says of it: the bytes that a device receives, and the
exposed seconds, in which no kernel attends. Those of one device, which has no exchange, come off the trace's. Needs two
accelerators or more.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from experiments.benchmarks.forward_and_backward import ForwardAndBackward
from experiments.benchmarks.traced_exchange import WITHOUT_GRAPHS, trace_exchange
from experiments.benchmarks.train_throughput.workloads import pack
from kernels import CausalMask, LocalMask, Mask, dot_product_attention
from kernels.call import make_call
from kernels.context import Deal, Exchange, MeshLayout, attend_over_mesh, choose_exchange, deal_tokens
from trainer.errors import UserMistake
from trainer.process.broken_pipe import reader_may_leave
from trainer.process.versions import installed_versions


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
CONTENDERS: tuple[tuple[Exchange, Deal], ...] = (
    ("gather", "in_order"),
    ("gather", "zigzag"),
    ("gather", "by_cost"),
    ("peer", "zigzag"),
    ("peer", "by_cost"),
    ("ring", "zigzag"),
    ("ring", "by_cost"),
    ("halo", "in_order"),
    ("heads", "in_order"),
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


def measure(name: str, case: AttentionShape, arguments: ContextArguments) -> list[dict[str, Any]]:
    """One row for each contender that serves the case."""
    devices, rng = jax.devices(), np.random.default_rng()
    shapes = [case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads]
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), len(shapes))
    arrays = [
        jax.random.normal(key, (1, case.length, heads, case.head_dim), jnp.bfloat16)
        for key, heads in zip(keys, shapes, strict=True)
    ]
    segment_ids = None
    if case.documents is not None:
        lengths: list[int] = []
        while (left := case.length - sum(lengths)) > 0:
            lengths.append(min(left, max(1, round(case.documents * rng.lognormal(0.0, 1.0)))))
        segment_ids = pack(lengths)[0]
    ids = None if segment_ids is None else jnp.asarray(segment_ids[None])

    def on_one(query, key, value):
        return dot_product_attention(
            query, key, value, case.mask, query_segment_ids=ids, key_value_segment_ids=ids, device=devices[0]
        )

    with jax.default_device(devices[0]):
        one = ForwardAndBackward(on_one, arrays[:3], arrays[3], WITHOUT_GRAPHS)
    expected = jax.tree.leaves(one.results)
    traced_one = trace_exchange(one.run, one.program)

    mesh = jax.make_mesh((1, 1, len(devices)), ("batch", "heads", "context"), (AxisType.Auto,) * 3)
    contenders: dict[tuple[Exchange, Deal], ForwardAndBackward] = {}
    errors, refusals, traces = {}, {}, {}
    for exchange, deal in CONTENDERS:
        if deal == "by_cost" and case.documents is None:
            continue
        if arguments.exchanges is not None and exchange not in arguments.exchanges:
            continue
        masks = {case.mask: 1.0}
        places = jnp.asarray(deal_tokens(deal, case.length, len(devices), masks=masks, segment_ids=segment_ids))
        layout = MeshLayout(mesh, ("batch",), "context", "heads", deal)
        sharding = NamedSharding(mesh, PartitionSpec("batch", "context"))

        def dealt(x, places=places, sharding=sharding):
            return None if x is None else jax.device_put(x[:, places], sharding)

        given = {"segment_ids": dealt(ids), "places": dealt(jnp.arange(case.length, dtype=jnp.int32)[None])}

        def on_mesh(query, key, value, layout=layout, exchange=exchange, given=given):
            return attend_over_mesh(query, key, value, case.mask, layout, exchange=exchange, **given)

        dealt_arrays = [dealt(x) for x in arrays]
        try:
            contender = ForwardAndBackward(on_mesh, dealt_arrays[:3], dealt_arrays[3], WITHOUT_GRAPHS)
        except ValueError as refusal:
            refusals[exchange, deal] = str(refusal)
            continue
        errors[exchange, deal] = max(
            float(_largest_difference(found, dealt(right)))
            for found, right in zip(jax.tree.leaves(contender.results), expected, strict=True)
        )
        traced = trace_exchange(contender.run, contender.program)
        if traced is not None and traced_one is not None:
            of_call = make_call(
                *dealt_arrays[:3],
                case.mask,
                query_segment_ids=given["segment_ids"],
                key_value_segment_ids=given["segment_ids"],
                device=devices[0],
            )[1]
            split = layout.split(case.length)
            cost = choose_exchange(layout.call_of_a_device(of_call), split, exchange).costs[exchange]
            traces[exchange, deal] = {
                "traced": traced._asdict(),
                "exposed_by_exchange_s": traced.exposed_s - traced_one.exposed_s / len(devices),
                "predicted": {
                    "received_bytes": sum(cost.received_bytes),
                    "exposed_s": cost.exposed_seconds,
                    "seconds": cost.seconds,
                },
            }
        contender.results = None
        contenders[exchange, deal] = contender
    one.results, expected = None, []
    for _ in range(arguments.num_rounds):
        for contender in (one, *contenders.values()):
            contender.measure(arguments.sample_ms)

    rows = []
    common = {"case": name, "num_devices": len(devices), "device": devices[0].device_kind}
    common |= {"versions": installed_versions(("jax", "jaxlib")), "date": datetime.date.today().isoformat()}
    for (exchange, deal), contender in contenders.items():
        row = {**common, "exchange": exchange, "deal": deal, "error": errors[exchange, deal]}
        row["temporary_bytes"] = contender.temporary_bytes
        row |= traces.get((exchange, deal), {})
        for index, direction in enumerate(("forward", "backward")):
            ours, theirs = ([seconds[index] for seconds in each.seconds] for each in (contender, one))
            row[f"{direction}_s"], row[f"one_{direction}_s"] = statistics.median(ours), statistics.median(theirs)
            ratios = [b / a / len(devices) for a, b in zip(ours, theirs, strict=True)]
            row[f"{direction}_efficiency"] = statistics.median(ratios)
        both = [sum(b) / sum(a) / len(devices) for a, b in zip(contender.seconds, one.seconds, strict=True)]
        rows.append(row | {"efficiency": statistics.median(both)})
    for (exchange, deal), reason in refusals.items():
        rows.append({**common, "exchange": exchange, "deal": deal, "refused": reason})
    return rows


@jax.jit
def _largest_difference(found: jax.Array, right: jax.Array) -> jax.Array:
    """Relative to the largest value that is right."""
    found, right = found.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.abs(found - right).max() / jnp.abs(right).max()


def main(command_line: Sequence[str]) -> int:
    """Measures, prints the table and returns the exit status."""
    arguments = tyro.cli(ContextArguments, args=list(command_line))
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
        table = Table("exchange", "deal", "forward ms", "backward ms", "efficiency f / b / both", "GB held", "error")
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
                row["deal"],
                f"{1e3 * row['forward_s']:.2f}",
                f"{1e3 * row['backward_s']:.2f}",
                efficiency,
                f"{row['temporary_bytes'] / 1e9:.2f}",
                f"{row['error']:.4f}",
            )
        console.print(table)
    return 0


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(sys.argv[1:]))
