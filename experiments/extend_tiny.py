"""A context extended eightfold on two CPU cores: a model of two layers learns at 64 tokens, then at 512.

Hypothesis: attention that has learned to find a word within 64 tokens fails at 512, and finds it there after a second
phase with longer sequences and a larger RoPE base. Without that phase it goes on failing.

Command:
    python -m trainer --config experiments/extend_tiny.py
    python -m trainer --config experiments/extend_tiny.py:extend=False

Hardware and expected numbers:
    Two CPU cores (JAX 0.10.2, 2026-11-29), both commands at once: some 3 minutes each, and a minute for the
    first one's documents. Words found, teacher-forced, over ten depths (40 questions a length):

        tokens                        64    128    256    512
        step 400                    100%    55%    25%    10%
        step 650                    100%   100%   100%   100%    with the phase of 512 tokens
        step 650                    100%    55%    30%    18%    without it

Data: lines of a key and a word in RULER's sentences, with questions behind them (`retrieval_documents.py`), as words.
"""

import json
from pathlib import Path

from experiments.retrieval_documents import FOLDER, make_files
from layers import GPTConfig
from trainer.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    Phase,
    SourceConfig,
    TrainConfig,
)
from trainer.evaluate.tasks import NOISE
from trainer.evaluate.tasks.words import ADJECTIVES, NOUNS
from trainer.files.atomic import write_atomically

TASKS = ("key_values",)
MODEL = GPTConfig(
    vocab_size=512,
    num_layers=2,
    width=128,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    mlp_width=256,
    mlp="swiglu",
    rope_base=100.0,
    remat="none",
    scan_layers=False,
    compute_dtype="float32",
)


def get_config(extend: bool = True) -> TrainConfig:
    """Two phases, or as many steps at the first length."""
    longer = Phase(
        sequence_length=512, batch_size=8, rope_base=1e4, optimizer=schedule(1e-3, 5), sources=sources(short=1, long=3)
    )
    same = Phase(optimizer=schedule(1e-3, 5))
    return TrainConfig(
        name="extend_tiny",
        description="A tiny model whose context is extended, meant for CPU cores",
        model=MODEL,
        num_steps=650,
        sequence_length=64,
        batch_size=64,
        phases=(Phase(num_steps=400), longer if extend else same),
        data=DataConfig(sources=sources(short=1, long=0), tokenizer=make_tokenizer(), end_of_document_token="<end>"),
        optimizer=schedule(3e-3, 50),
        evaluation=EvaluationConfig(
            every_num_steps=400, num_sequences=16, lengths=(64, 128, 256, 512), tasks=TASKS, num_examples=4
        ),
        checkpoint=CheckpointConfig(every_num_steps=400),
        log_every_num_steps=50,
    )


def schedule(learning_rate: float, num_warmup_steps: int) -> OptimizerConfig:
    """Warm-up, stable, decay."""
    return OptimizerConfig(learning_rate=learning_rate, num_warmup_steps=num_warmup_steps, schedule="wsd", beta2=0.98)


def sources(short: float, long: float) -> tuple[SourceConfig, ...]:
    """Documents of up to 64 tokens and of up to 512, by their shares of the tokens."""
    files = {
        "short": (
            make_files("tiny", TASKS, 20_000, (60, 260), 1, noise=True)
            + make_files("tiny", TASKS, 20_000, (90, 260), 3, noise=True)
            + make_files("tiny", TASKS, 20_000, (140, 250), 6, noise=True)
        ),
        "long": make_files("tiny", TASKS, 3000, (600, 2200), 8, noise=True)
        + make_files("tiny", TASKS, 3000, (900, 2000), 30, noise=True),
    }
    weights = {"short": short, "long": long}
    return tuple(SourceConfig(name, files[name], "jsonl", weight=weights[name]) for name in files)


def make_tokenizer() -> str:
    """A tokenizer of whole words, so that two layers suffice: a key is a token, and its word the next one."""
    words = ["<end>", "<unknown>", *(f"{noun}:" for noun in NOUNS), *ADJECTIVES, *sorted(set(NOISE.split()))]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    end = {"id": 0, "content": "<end>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "added_tokens": [end | flags],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unknown>"},
    }
    path = Path(FOLDER).expanduser() / "tiny_tokenizer.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content))
    return str(path)
