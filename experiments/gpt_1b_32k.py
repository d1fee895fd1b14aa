"""A GPT of 1.3B parameters on packed documents, 32,768 tokens to a sequence, on one accelerator.

Hypothesis: two techniques make 32k affordable at 124M parameters: attention that skips tiles which its mask excludes,
and a loss without [tokens, vocabulary] logits. They carry over to a model ten times the size: it trains on one GPU.

Command:
    python -m trainer --config experiments/gpt_1b_32k.py

Hardware and expected numbers:
    An accelerator: 1.3B parameters (1,336M: 24 layers, width 2048, 16 heads of 128, a SwiGLU of 5,632 features, 50,304
    vocabulary), every layer global. One H200 (JAX 0.11.2, 2026-11-29) takes 32,200 tokens/s and 73.1 GB where each
    sequence is one document, the most work that there can be:
    `python -m experiments.benchmarks.train_throughput --workloads gpt_1b_32k`. The results are in
    experiments/benchmarks/results/train_throughput_h200.jsonl.
    There is no small version of this page: without an accelerator it refuses, and experiments/gpt_32k.py has one.

Data: the Python standard library's own sources, as bytes. For your own see `data` in trainer/config/sections.py.
"""

import dataclasses

from experiments import gpt_32k
from trainer.config import OptimizerConfig, TrainConfig
from trainer.errors import UserMistake
from trainer.hardware import expected_platform


def get_config() -> TrainConfig:
    """The config of an accelerator.

    Raises:
      UserMistake: there are only CPUs to be seen.
    """
    if expected_platform() == "cpu":
        raise UserMistake(
            "experiments/gpt_1b_32k.py trains 1.3B parameters and needs an accelerator, but only CPUs are to be seen; "
            "run experiments/gpt_32k.py, which has a version for them, or install JAX for your accelerator"
        )
    return gpt_1b()


def gpt_1b() -> TrainConfig:
    """The config, whatever this machine is."""
    base = gpt_32k.gpt2_small()
    return dataclasses.replace(
        base,
        name="gpt_1b_32k",
        description="A large GPT on long packed documents, meant for one accelerator",
        model=dataclasses.replace(
            base.model, num_layers=24, width=2048, num_heads=16, num_kv_heads=16, head_dim=128, mlp_width=5632
        ),
        batch_size=8,
        gradient_accumulation=8,
        optimizer=OptimizerConfig(learning_rate=2e-4, num_warmup_steps=50),
    )
