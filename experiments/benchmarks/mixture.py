"""A mixture of experts against one MLP of the same FLOPs, forward and backward, interleaved in one process.

    python -m experiments.benchmarks.mixture --cases qwen3_30b gpt_oss_20b --output mixture.jsonl

The mixture's time has everything: router, sorting, copies of tokens, grouped matmuls and their sums. Parameters are
stored in bfloat16, so that neither side's has their conversion. The dense MLP is as wide as all experts of a token.
Tokens are random, and so the router spreads them nearly evenly; `busiest` is the largest expert's share over the mean.
"""

from __future__ import annotations

import datetime
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.table import Table

from experiments.benchmarks.command_line import append_rows, read_arguments, require_known, table_console
from experiments.benchmarks.forward_and_backward import ForwardAndBackward
from kernels import Target
from kernels.experts import GroupedMatmul, GroupedMatmulChoice, choose_grouped_matmul
from layers import MoEConfig
from layers.mlp import MLP
from layers.moe import MoE
from trainer.hardware import installed_versions
from trainer.terminal.streams import reader_may_leave


@dataclass(frozen=True)
class MixtureShape:
    """Sizes of a layer, and tokens of a call."""

    width: int
    num_experts: int
    num_experts_per_token: int
    expert_width: int
    num_tokens: int = 32_768


CASES = {
    "qwen3_30b": MixtureShape(2048, 128, 8, 768),
    "gpt_oss_20b": MixtureShape(2880, 32, 4, 2880),
    "mixtral_8x7b": MixtureShape(4096, 8, 2, 14_336, num_tokens=16_384),
    "smoke": MixtureShape(64, 4, 2, 32, num_tokens=256),
}
MEASURED = tuple(name for name in CASES if name != "smoke")


@dataclass(frozen=True)
class MixtureArguments:
    """Measures mixtures of experts against dense MLPs, in bfloat16."""

    cases: tuple[str, ...] = MEASURED
    """Names from CASES."""
    implementation: GroupedMatmul | None = None
    """Implementation of the experts' matmuls; None: the fastest that has been checked on the device."""
    num_rounds: int = 7
    """Rounds, of which the median counts."""
    sample_ms: float = 150.0
    """Least time of a sample."""
    output: Path | None = None
    """File that the JSON lines are appended to."""

    def __post_init__(self):
        require_known(self.cases, CASES, "cases")


def programs(layer: MoE | MLP, inputs: jax.Array, cotangent: jax.Array) -> ForwardAndBackward:
    """A layer's, differentiated in its parameters and inputs."""
    graphdef, params = nnx.split(layer)

    def forward(params: nnx.State, inputs: jax.Array) -> jax.Array:
        outputs = nnx.merge(graphdef, params)(inputs)
        return outputs[0] if isinstance(outputs, tuple) else outputs

    timed = ForwardAndBackward(forward, (params, inputs), cotangent)
    timed.results = None
    return timed


def measure(name: str, choice: GroupedMatmulChoice, arguments: MixtureArguments) -> dict[str, Any]:
    """The row of a case."""
    case = CASES[name]
    config = MoEConfig(case.num_experts, case.num_experts_per_token, case.expert_width)
    rngs = nnx.Rngs(time.time_ns() % 2**31)
    mixture = MoE(case.width, config, kind="swiglu", param_dtype="bfloat16", implementation=choice.name, rngs=rngs)
    hidden_width = case.num_experts_per_token * case.expert_width
    dense = MLP(case.width, hidden_width, kind="swiglu", param_dtype="bfloat16", rngs=rngs)
    inputs, cotangent = (
        jax.random.normal(key, (1, case.num_tokens, case.width), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(time.time_ns() % 2**31))
    )
    load = nnx.jit(lambda layer, inputs: layer(inputs)[1].choices)(mixture, inputs)
    contenders = [programs(layer, inputs, cotangent) for layer in (mixture, dense)]
    for _ in range(arguments.num_rounds):
        for contender in contenders:
            contender.measure(arguments.sample_ms)
    row: dict[str, Any] = {"case": name, "grouped_matmul": choice.name, "device": jax.devices()[0].device_kind}
    row |= {"versions": installed_versions(("jax", "jaxlib", "flax")), "date": datetime.date.today().isoformat()}
    row["busiest"] = float(load.max() / load.mean())
    ours, theirs = (contender.seconds for contender in contenders)
    for index, direction in enumerate(("forward", "backward")):
        row[f"{direction}_s"] = statistics.median(seconds[index] for seconds in ours)
        row[f"dense_{direction}_s"] = statistics.median(seconds[index] for seconds in theirs)
    row["over_dense"] = statistics.median(sum(a) / sum(b) for a, b in zip(ours, theirs, strict=True))
    flops = 18 * case.num_tokens * case.num_experts_per_token * case.width * case.expert_width
    row["tflops_per_s"] = flops / (row["forward_s"] + row["backward_s"]) / 1e12
    return row


def main(arguments: MixtureArguments) -> int:
    """Measures, prints the table and returns the exit status."""
    try:
        choices = {
            name: choose_grouped_matmul(
                "bfloat16", (CASES[name].width, CASES[name].expert_width), Target.of(), arguments.implementation
            )
            for name in arguments.cases
        }
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = Table("case", "forward ms", "backward ms", "dense, both", "times the dense", "TFLOP/s", "busiest")
    for name in arguments.cases:
        row = measure(name, choices[name], arguments)
        append_rows(arguments.output, [row])
        table.add_row(
            name,
            f"{1e3 * row['forward_s']:.2f} ({1e3 * row['dense_forward_s']:.2f})",
            f"{1e3 * row['backward_s']:.2f} ({1e3 * row['dense_backward_s']:.2f})",
            f"{1e3 * (row['dense_forward_s'] + row['dense_backward_s']):.2f}",
            f"{row['over_dense']:.3f}",
            f"{row['tflops_per_s']:.0f}",
            f"{row['busiest']:.2f}",
        )
    table_console().print(table)
    return 0


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(read_arguments(MixtureArguments)))
