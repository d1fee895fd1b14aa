"""The step of a model with adapters, beside the same step with its norms alone to train.

    python -m experiments.benchmarks.adapters --length 32768 --output adapters.jsonl

The model has Llama-3.1-8B's shape and random parameters. Frozen matrices cost a forward product and one for the
gradients of its inputs; what adapters of rank 16 on all of them cost beyond that is the difference of the two steps.
Both hold the same frozen parameters, which go from one state to the other, and take turns in one process.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.command_line import read_arguments
from layers import GPTConfig, LoRAConfig, RopeScaling
from trainer.config import OptimizerConfig, TrainConfig
from trainer.data import BatchShare
from trainer.data.packing import empty_sequence
from trainer.hardware import installed_versions
from trainer.step.frozen import join_frozen, split_frozen, without_adapters
from trainer.step.functions import StepFunctions, make_step_functions
from trainer.step.global_batch import make_global_batch
from trainer.step.sharding import batch_sharding, make_mesh
from trainer.terminal.streams import reader_may_leave


@dataclass(frozen=True)
class AdaptersArguments:
    """Times steps with adapters and without."""

    length: int = 32_768
    """Tokens of the one sequence in a step."""
    num_rounds: int = 4
    """Steps of each kind that count, after one that doesn't; the median counts."""
    rank: int = 16
    """Rank of the adapters."""
    num_layers: int = 32
    """Layers of the model."""
    width: int = 4096
    """Width of the model; its heads and its MLP have those of Llama-3.1-8B in proportion."""
    vocab_size: int = 128_256
    """Tokens of the model's vocabulary."""
    output: Path | None = None
    """File that the JSON line is appended to."""


class _NormsAlone(LoRAConfig):
    """Freezes as adapters do, and has none."""

    def matrices(self, model: GPTConfig) -> tuple[str, ...]:
        return ()


def measure(arguments: AdaptersArguments) -> dict[str, Any]:
    """Seconds of both steps and the bytes that each needs."""
    model = GPTConfig(
        vocab_size=arguments.vocab_size,
        num_layers=arguments.num_layers,
        width=arguments.width,
        num_heads=arguments.width // 128,
        num_kv_heads=arguments.width // 512,
        head_dim=128,
        mlp_width=arguments.width * 7 // 2,
        mlp="swiglu",
        tie_embeddings=False,
        norm_epsilon=1e-5,
        rope_base=500_000.0,
        rope_scaling=RopeScaling("llama3", 8.0, original_context_length=8192),
        remat="full",
    )
    configs = {"adapters": LoRAConfig(rank=arguments.rank), "norms_alone": _NormsAlone(rank=arguments.rank)}
    functions: dict[str, Any] = {name: _functions(model, lora, arguments.length) for name, lora in configs.items()}
    batch = _batch(arguments, functions["adapters"])
    row: dict[str, Any] = {"length": arguments.length, "rank": arguments.rank}
    steps: dict[str, Any] = {}
    for name, each in functions.items():
        steps[name] = each.train_step.lower(each.abstract_state, each.abstract_batch).compile()
        memory = steps[name].memory_analysis()
        in_and_out = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        row[f"{name}_bytes"] = in_and_out + memory.temp_size_in_bytes
    # One copy of the frozen parameters. Each state has its own of those that train.
    trained, frozen = split_frozen(configs["adapters"], functions["adapters"].init_state().params)
    held = {"adapters": trained, "norms_alone": jax.tree.map(lambda leaf: leaf.copy(), without_adapters(trained))}
    rests = {
        name: jax.tree.map(
            lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
            each.abstract_state._replace(params=()),
        )
        for name, each in functions.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(1 + arguments.num_rounds):
        for name, step in steps.items():
            # The step takes the parameters over, and gives them back.
            state = rests[name]._replace(params=join_frozen(held[name], frozen))
            begun = time.perf_counter()
            state, _ = jax.block_until_ready(step(state, batch))
            seconds[name].append(time.perf_counter() - begun)
            held[name], frozen = split_frozen(configs[name], state.params)
            rests[name] = state._replace(params=())
    return row | {f"{name}_s": float(np.median(each[1:])) for name, each in seconds.items()}


def _functions(model: GPTConfig, lora: LoRAConfig, length: int) -> StepFunctions:
    config = TrainConfig(
        "adapters",
        model,
        num_steps=100,
        sequence_length=length,
        lora=lora,
        optimizer=OptimizerConfig(learning_rate=1e-4, num_warmup_steps=10),
    )
    return make_step_functions(config, make_mesh(config.mesh))


def _batch(arguments: AdaptersArguments, functions: StepFunctions) -> Any:
    rng, sequence = np.random.default_rng(), empty_sequence(arguments.length)
    for name in ("tokens", "targets"):
        sequence[name][:] = rng.integers(0, arguments.vocab_size, arguments.length)
    sequence["weights"][:], sequence["segment_ids"][:] = 1, 1
    sequence["positions"][:] = np.arange(arguments.length)
    share = BatchShare({name: array[None] for name, array in sequence.items()}, (0,), (np.array([arguments.length]),))
    return make_global_batch(share, batch_sharding(functions.mesh))


def main(command_line: Sequence[str]) -> int:
    """Measures, prints the ratio and returns the exit status."""
    arguments = read_arguments(AdaptersArguments, command_line)
    row = measure(arguments) | {"device": jax.devices()[0].device_kind}
    row |= {"versions": installed_versions(("jax", "jaxlib")), "date": datetime.date.today().isoformat()}
    if arguments.output is not None:
        with arguments.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    print(
        f"{row['length']:,} tokens: {row['length'] / row['adapters_s']:,.0f} tokens/s with adapters, "
        f"{row['norms_alone_s'] / row['adapters_s']:.3f} × those with norms alone; "
        f"{row['adapters_bytes'] / 1e9:.1f} GB"
    )
    return 0


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(sys.argv[1:]))
