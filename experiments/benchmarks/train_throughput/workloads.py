"""The named training workloads: a config, the documents in its sequences, and how many steps are timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from experiments import gpt_1b_32k, gpt_32k
from kernels import LocalMask
from layers import GPTConfig, RopeScaling
from trainer.config import TrainConfig


@dataclass(frozen=True)
class Workload:
    """One sequence to a step, of random tokens: throughput doesn't depend on what they are."""

    model: str
    """Key of MODELS."""
    sequence_length: int
    document_length: int | None = None
    """Median length of packed documents, kept apart; None: a sequence is one document."""
    num_batches: int = 1
    """Batches that the steps cycle through. A window should take each equally often."""
    remat: str | None = None
    """None: the experiment's own."""
    num_windows: int = 5
    """Timed windows, of which the median counts."""
    steps_per_window: int = 4

    def config(self) -> TrainConfig:
        """The config of the trained model."""
        base = MODELS[self.model]()
        return dataclasses.replace(
            base,
            sequence_length=self.sequence_length,
            batch_size=1,
            gradient_accumulation=1,
            model=base.model if self.remat is None else dataclasses.replace(base.model, remat=self.remat),
            data=dataclasses.replace(base.data, keep_documents_apart=self.document_length is not None),
        )

    def batch(self, vocab_size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """A batch as `trainer.data` makes them, of fresh random tokens."""
        tokens = rng.integers(0, vocab_size, (1, self.sequence_length + 1), np.int32)
        segment_ids, positions = pack(self.document_lengths(rng))
        return {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "weights": np.ones((1, self.sequence_length), np.float32),
            "segment_ids": segment_ids[None],
            "positions": positions[None],
        }

    def document_lengths(self, rng: np.random.Generator) -> list[int]:
        """Lengths that add up to the sequence's, log-normal with deviation 0.5 around the median; the last is cut."""
        if self.document_length is None:
            return [self.sequence_length]
        lengths: list[int] = []
        while (left := self.sequence_length - sum(lengths)) > 0:
            lengths.append(min(left, max(1, round(self.document_length * rng.lognormal(0.0, 0.5)))))
        return lengths


def pack(lengths: list[int]) -> tuple[Int[np.ndarray, " T"], Int[np.ndarray, " T"]]:
    """Segment ids, counted down to 1, and positions in the document of documents laid one after another.

    >>> pack([2, 3])
    (array([2, 2, 1, 1, 1], dtype=int32), array([0, 1, 0, 1, 2], dtype=int32))
    """
    segment_ids = np.repeat(np.arange(len(lengths), 0, -1, dtype=np.int32), lengths)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    return segment_ids, positions


def _model(config: GPTConfig) -> Callable[[], TrainConfig]:
    return lambda: TrainConfig(name="throughput", num_steps=1000, model=config)


_LLAMA_1B_SIZES = GPTConfig(
    vocab_size=128_256, num_layers=16, width=2048, num_heads=32, num_kv_heads=8, head_dim=64, mlp_width=8192
)
_QWEN3_4B_SIZES = GPTConfig(
    vocab_size=151_936, num_layers=36, width=2560, num_heads=32, num_kv_heads=8, head_dim=128, mlp_width=9728
)


def _gpt2(page: Callable[[], TrainConfig], **changes: Any) -> Callable[[], TrainConfig]:
    """A page's model with GPT-2's MLP: two matrices around a GELU, of four times the width."""

    def config() -> TrainConfig:
        base = page()
        model = dataclasses.replace(base.model, mlp="gelu", mlp_width=4 * base.model.width, **changes)
        return dataclasses.replace(base, model=model)

    return config


# The pages'; the same with GPT-2's MLP, as nanoGPT has it; as the config.json of Llama-3.2-1B, Llama-3.1-8B and
# Qwen3-4B have it, and GPTs of the same sizes that are plain otherwise.
MODELS: dict[str, Callable[[], TrainConfig]] = {
    "gpt_32k": gpt_32k.gpt2_small,
    "gpt_1b_32k": gpt_1b_32k.gpt_1b,
    "124m": _gpt2(gpt_32k.gpt2_small),
    "124m_window": _gpt2(gpt_32k.gpt2_small, masks=(LocalMask(4095, 0),)),
    "1b": _gpt2(gpt_1b_32k.gpt_1b),
    "llama_1b": _model(
        dataclasses.replace(
            _LLAMA_1B_SIZES,
            mlp="swiglu",
            rope_base=500_000.0,
            rope_scaling=RopeScaling(kind="llama3", factor=32.0, original_context_length=8192),
            norm_epsilon=1e-5,
        )
    ),
    "plain_llama_1b": _model(_LLAMA_1B_SIZES),
    "llama_8b": _model(
        GPTConfig(
            vocab_size=128_256,
            num_layers=32,
            width=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            mlp_width=14_336,
            mlp="swiglu",
            tie_embeddings=False,
            rope_base=500_000.0,
            rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_context_length=8192),
            norm_epsilon=1e-5,
        )
    ),
    "qwen3_4b": _model(dataclasses.replace(_QWEN3_4B_SIZES, mlp="swiglu", rope_base=1e6, qk_norm="per_head")),
    "plain_qwen3_4b": _model(_QWEN3_4B_SIZES),
}

WORKLOADS = {
    # The pages in experiments, by their names.
    "gpt_32k": Workload("gpt_32k", 32_768),
    "gpt_1b_32k": Workload("gpt_1b_32k", 32_768, num_windows=3, steps_per_window=2),
    "gpt_128k": Workload("gpt_1b_32k", 131_072, remat="save_attention", num_windows=2, steps_per_window=1),
    # With GPT-2's MLP.
    "124m_32k": Workload("124m", 32_768),
    "1b_32k": Workload("1b", 32_768, num_windows=3, steps_per_window=2),
    "124m_32k_packed": Workload(
        "124m",
        32_768,
        document_length=4096,
        num_batches=8,
        steps_per_window=8,
    ),
    "124m_131k_packed": Workload(
        "124m", 131_072, document_length=4096, num_batches=4, num_windows=3, steps_per_window=4
    ),
    "1b_131k_packed": Workload(
        "1b",
        131_072,
        document_length=4096,
        remat="save_attention",
        num_windows=2,
        steps_per_window=2,
    ),
    "llama_1b_32k": Workload("llama_1b", 32_768, remat="save_attention", num_windows=3, steps_per_window=2),
    "plain_llama_1b_32k": Workload("plain_llama_1b", 32_768, remat="save_attention", num_windows=3, steps_per_window=2),
    "qwen3_4b_32k": Workload("qwen3_4b", 32_768, num_windows=3, steps_per_window=1),
    "plain_qwen3_4b_32k": Workload("plain_qwen3_4b", 32_768, num_windows=3, steps_per_window=1),
    # Of parameters and optimizer state in float32: for several devices.
    "llama_8b_32k": Workload("llama_8b", 32_768, remat="save_attention", num_windows=2, steps_per_window=1),
    "llama_8b_131k": Workload("llama_8b", 131_072, remat="save_attention", num_windows=2, steps_per_window=1),
    "124m_131k": Workload("124m", 131_072, num_windows=3, steps_per_window=1),
    "124m_131k_window": Workload("124m_window", 131_072, num_windows=3, steps_per_window=4),
    "1b_131k": Workload("1b", 131_072, remat="save_attention", num_windows=2, steps_per_window=1),
    "1b_1m": Workload("1b", 1_048_576, num_windows=1, steps_per_window=1),
    "124m_1m": Workload("124m", 1_048_576, remat="save_attention", num_windows=1, steps_per_window=1),
}
