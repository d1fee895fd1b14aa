"""A GPT on packed documents, 32,768 tokens to a sequence.

Hypothesis: with kernels that skip what a mask excludes, a 32k context needs neither a T×T mask nor a large
machine: the same page trains a GPT-2-sized model on an accelerator and a small one on two CPU cores.

Command:
    python -m trainer --config experiments/gpt_32k.py

Hardware and expected numbers:
    Accelerator: 124M parameters (123.6M: GPT-2 small's sizes, 12 layers, width 768, 12 heads, 50,304 vocabulary, with a
    SwiGLU of 2,048 features instead of its MLP of 3,072, of as many parameters), every layer global. One H200
    (JAX 0.11.2, 2026-11-29) takes 179,400 tokens/s and 12.7 GB where each sequence is one document, the most work that
    there can be: `python -m experiments.benchmarks.train_throughput --workloads gpt_32k`. The results are in
    experiments/benchmarks/results/train_throughput_h200.jsonl.
    CPU: 0.6M parameters, 3 layers of which the last is global and the others see 1,024 tokens. See
    experiments/benchmarks/results/gpt_32k_cpu.json for a run on two cores: seconds, memory and losses.

Data: the Python standard library's own sources, as bytes. For your own see `data` in trainer/config/sections.py.
"""

from kernels import CausalMask, LocalMask
from layers import GPTConfig
from trainer.config import CheckpointConfig, EvaluationConfig, LossConfig, OptimizerConfig, TrainConfig
from trainer.hardware import expected_platform


def get_config() -> TrainConfig:
    """The accelerator's config, or the small one where only CPUs are to be seen."""
    return _small() if expected_platform() == "cpu" else gpt2_small()


def gpt2_small() -> TrainConfig:
    """The accelerator's config."""
    # At this size a GPU has memory for all activations. A loop over the layers would copy them to its stack and back.
    on_gpu = expected_platform() == "gpu"
    return TrainConfig(
        name="gpt_32k",
        description="A GPT on long packed documents, meant for one accelerator",
        model=GPTConfig(mlp="swiglu", mlp_width=2048, scan_layers=not on_gpu, remat="none" if on_gpu else "full"),
        num_steps=1000,
        batch_size=4,
        gradient_accumulation=4,
        optimizer=OptimizerConfig(learning_rate=6e-4, num_warmup_steps=50),
        loss=LossConfig(chunk_size=8192 if on_gpu else 2048),
    )


def _small() -> TrainConfig:
    window = LocalMask(1023, 0)
    return TrainConfig(
        name="gpt_32k",
        description="No accelerator here: a GPT small enough for CPU cores",
        model=GPTConfig(
            vocab_size=320,
            num_layers=3,
            width=128,
            num_heads=2,
            num_kv_heads=1,
            head_dim=32,
            mlp_width=384,
            mlp="swiglu",
            masks=(window, window, CausalMask()),
            remat="none",
            compute_dtype="float32",
        ),
        num_steps=56,
        optimizer=OptimizerConfig(learning_rate=4e-3, num_warmup_steps=8),
        loss=LossConfig(chunk_size=8192),
        evaluation=EvaluationConfig(every_num_steps=28, num_sequences=4),
        checkpoint=CheckpointConfig(every_num_steps=28),
        log_every_num_steps=4,
    )
