"""What it costs to ask a model one question about a long context, and to ask it many.

    python -m experiments.benchmarks.shared_context --output shared_context.jsonl

The model has Qwen3-0.6B's shape and random parameters. The context is read once; answers are greedy. Beside it: the
forward pass of training over as many tokens, loss included.
"""

from __future__ import annotations

import datetime
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.command_line import read_arguments
from kernels import CausalMask
from layers import GPTConfig
from trainer.config import TrainConfig
from trainer.data import BatchShare
from trainer.data.packing import empty_sequence
from trainer.evaluate.decoding import ContextDecoder
from trainer.hardware import installed_versions
from trainer.step.functions import make_step_functions
from trainer.step.global_batch import make_global_batch
from trainer.step.sharding import batch_sharding, make_mesh
from trainer.terminal.streams import reader_may_leave


@dataclass(frozen=True)
class SharedContextArguments:
    """Times one question about a context, and many."""

    length: int = 131_072
    """Tokens of the context, a question and its answer."""
    num_questions: int = 100
    """Questions that are asked side by side."""
    prompt_length: int = 32
    """Tokens of a question."""
    answer_length: int = 24
    """Tokens of an answer. Each question gets as many."""
    num_layers: int = 28
    """Layers of the model."""
    width: int = 1024
    """Width of the model; its heads and its MLP have those of Qwen3-0.6B in proportion."""
    vocab_size: int = 151_936
    """Tokens of the model's vocabulary."""
    num_repeats: int = 3
    """Times that each is measured, after once to compile; the median counts."""
    output: Path | None = None
    """File that the JSON line is appended to."""


def measure(arguments: SharedContextArguments) -> dict[str, Any]:
    """Seconds of a forward pass, and of one question and many about a context; and the bytes of the caches."""
    model = GPTConfig(
        vocab_size=arguments.vocab_size,
        num_layers=arguments.num_layers,
        width=arguments.width,
        num_heads=arguments.width // 64,
        num_kv_heads=arguments.width // 128,
        head_dim=128,
        mlp_width=3 * arguments.width,
        mlp="swiglu",
        qk_norm="per_head",
        masks=(CausalMask(),),
        rope_base=1e6,
    )
    config = TrainConfig("shared", model, num_steps=200, sequence_length=arguments.length)
    functions = make_step_functions(config, make_mesh(config.mesh))
    params = functions.init_state().params
    rng = np.random.default_rng(0)
    row: dict[str, Any] = {"forward_s": _forward_seconds(arguments, functions, params)}
    context = rng.integers(0, arguments.vocab_size, _context_length(arguments)).astype(np.int32)
    laid_out = None
    for name, num_questions in (("one_question", 1), ("many_questions", arguments.num_questions)):
        decoder = ContextDecoder(
            model,
            length=arguments.length,
            shortest=len(context),
            num_questions=num_questions,
            longest_prompt=arguments.prompt_length,
            longest_answer=arguments.answer_length,
            vocab_size=arguments.vocab_size,
        )
        if laid_out is None:
            laid_out = decoder.lay_out(params)
            del params
        prompts = rng.integers(0, arguments.vocab_size, (num_questions, arguments.prompt_length)).astype(np.int32)
        ask = functools.partial(decoder.answer, laid_out, context, list(prompts))
        row |= {f"{name}_s": _median_seconds(ask, arguments.num_repeats), f"{name}_cache_bytes": decoder.cache_bytes}
        del decoder, ask  # and with them the caches
    return row | {"num_questions": arguments.num_questions, "length": arguments.length}


def _context_length(arguments: SharedContextArguments) -> int:
    return arguments.length - arguments.prompt_length - arguments.answer_length


def _forward_seconds(arguments: SharedContextArguments, functions: Any, params: Any) -> float:
    sequence = empty_sequence(arguments.length)
    sequence["weights"][:], sequence["segment_ids"][:] = 1, 1
    sequence["positions"][:] = np.arange(arguments.length)
    share = BatchShare({name: array[None] for name, array in sequence.items()}, (0,), (np.array([arguments.length]),))
    batch = make_global_batch(share, batch_sharding(functions.mesh))
    return _median_seconds(lambda: jax.block_until_ready(functions.eval_step(params, batch, 0)), arguments.num_repeats)


def _median_seconds(run: Callable[[], Any], num_repeats: int) -> float:
    run()
    seconds = []
    for _ in range(num_repeats):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return float(np.median(seconds))


def main(command_line: Sequence[str]) -> int:
    """Measures, prints the ratios and returns the exit status."""
    arguments = read_arguments(SharedContextArguments, command_line)
    row = measure(arguments) | {"device": jax.devices()[0].device_kind}
    row |= {"versions": installed_versions(("jax", "jaxlib")), "date": datetime.date.today().isoformat()}
    if arguments.output is not None:
        with arguments.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    print(
        f"{row['length']:,} tokens: forward pass {row['forward_s']:.2f} s, one question {row['one_question_s']:.2f} s, "
        f"{row['num_questions']} questions {row['many_questions_s']:.2f} s, "
        f"{row['many_questions_s'] / row['one_question_s']:.2f} × one; "
        f"caches {row['many_questions_cache_bytes'] / 1e9:.2f} GB"
    )
    return 0


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(sys.argv[1:]))
