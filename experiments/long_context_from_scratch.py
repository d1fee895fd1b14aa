"""A long-context model from nothing: 12M parameters on bytes, 2,048 → 16,384 → 131,072 tokens in one command.

Hypothesis: a model finds a number in 131,072 tokens after 250 steps at that length, if it has learned to find numbers
in short texts before, and its state is carried through phases of rising length and RoPE base.

Command:
    python -m trainer --config experiments/long_context_from_scratch.py

Hardware and expected numbers:
    One H200 (JAX 0.11.2, 2026-11-29): 5 min 30 s, of which steps 190 s, evaluations 39 s, compiling 28 s, documents
    and their tokens 70 s. Questions answered exactly, teacher-forced, over ten depths (20 of each kind and length):

        tokens           2,048   16,384   65,536   131,072
        step 1,500        100%       0%       0%        0%    single needles
                           95%       0%       0%        0%    multi-key needles
        step 1,800        100%     100%       0%        0%    single needles
                          100%     100%       0%        0%    multi-key needles
        step 2,050        100%     100%      95%      100%    single needles
                          100%     100%     100%      100%    multi-key needles

    Loss of the last 512 tokens of long documents, given so many:

        step 1,500       0.182    4.581    5.286              nats per token
        step 2,050       0.185    0.150    0.031

    Validation loss on all sources: 0.578 nats at step 500, 0.437 at 1,000, 0.363 at 1,500, 0.209 at 1,800, 0.219 at
    2,050, where the longest documents are new. Decoded greedily by `python -m trainer.evaluate --lengths 128k --tasks
    niah_single niah_multikey --examples 20 --seed 7`: 100% of single needles at each depth, 90% to 100% of multi-key
    ones. The rows are in experiments/benchmarks/results/long_context_h200_*.jsonl.

Data: Python's own sources, and documents made from them with needles and questions (`retrieval_documents.py`).
"""

from experiments.retrieval_documents import make_files
from layers import GPTConfig
from trainer.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LossConfig,
    OptimizerConfig,
    Phase,
    SourceConfig,
    TrainConfig,
)

TASKS = ("niah_single", "niah_multikey")


def get_config() -> TrainConfig:
    """Three phases, evaluated at the end of each."""
    return TrainConfig(
        name="long_context_from_scratch",
        description="A small model that learns to find what lies far back, meant for a GPU",
        model=GPTConfig(
            vocab_size=320,
            num_layers=6,
            width=384,
            num_heads=6,
            num_kv_heads=6,
            mlp_width=1024,
            mlp="swiglu",
            remat="none",
            scan_layers=False,
        ),
        num_steps=2050,
        sequence_length=2048,
        batch_size=64,
        phases=(
            Phase(num_steps=1500, sources=sources(python=0.3, short=0.6, long=0.1)),
            Phase(
                num_steps=300,
                sequence_length=16_384,
                batch_size=8,
                rope_base=5e5,
                optimizer=schedule(5e-4, 10),
                sources=sources(python=0.2, short=0.3, long=0.5),
            ),
            Phase(
                num_steps=250,
                sequence_length=131_072,
                batch_size=2,
                gradient_accumulation=2,
                rope_base=8e6,
                optimizer=schedule(3e-4, 10),
                sources=sources(python=0.1, short=0.15, long=0.25, longest=0.5),
            ),
        ),
        data=DataConfig(sources=sources(python=0.3, short=0.6, long=0.1)),
        optimizer=schedule(2e-3, 50),
        loss=LossConfig(chunk_size=8192),
        evaluation=EvaluationConfig(
            every_num_steps=500, num_sequences=16, lengths=(2048, 16_384, 65_536, 131_072), tasks=TASKS
        ),
        checkpoint=CheckpointConfig(every_num_steps=500),
        log_every_num_steps=50,
    )


def schedule(learning_rate: float, num_warmup_steps: int) -> OptimizerConfig:
    """Warm-up, stable, decay."""
    return OptimizerConfig(learning_rate=learning_rate, num_warmup_steps=num_warmup_steps, schedule="wsd")


def sources(**weights: float) -> tuple[SourceConfig, ...]:
    """Python's sources, and documents with needles in Python and in noise, each by its share of the tokens."""
    lengths = {"short": (24_000, (1000, 1800)), "long": (3000, (4000, 15_000)), "longest": (400, (60_000, 127_000))}
    found = [SourceConfig("python", format="stdlib", weight=weights.get("python", 0.0))]
    for name, (num_documents, num_bytes) in lengths.items():
        files = [
            file
            for noise in (False, True)
            for file in make_files(name, TASKS, num_documents // 2, num_bytes, 4, noise=noise)
        ]
        found.append(SourceConfig(name, tuple(files), "jsonl", weight=weights.get(name, 0.0)))
    return tuple(found)
