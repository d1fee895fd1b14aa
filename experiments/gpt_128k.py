"""A GPT of 1.3B parameters on packed documents, 131,072 tokens to a sequence, split over two GPUs.

Hypothesis: a sequence that is split over its tokens costs no more than the work that it holds. Where each GPU has the
same to do and receives the keys that it lacks, two GPUs train at nearly twice the speed of one; `fsdp`, which splits
sequences and not tokens, needs two sequences of this length to have work for both.

Command:
    python -m trainer --config experiments/gpt_128k.py

Hardware and expected numbers:
    Two H200s of one host: the model of experiments/gpt_1b_32k.py, 1.3B parameters (1,336M), every layer global. Whether
    the step fits: `python -m trainer.compile --config experiments/gpt_128k.py --topology h200:2` says 48.9 GB on each
    GPU. One sequence to a step, of one document, takes 5.82 s: 22,500 tokens/s, 53.1 % MFU, 30.3 GB on each GPU, 1.89
    times the speed of one of the two (11,900 tokens/s, 56.1 GB; JAX 0.11.2, 2026-11-29):
    `python -m experiments.benchmarks.train_throughput --workloads gpt_128k --mesh.context 2 --seed 7`. The
    rows are in experiments/benchmarks/results/train_meshes_h200.jsonl.
    More GPUs: `--mesh.context 8` splits each sequence further, `--mesh.data 2 --gradient-accumulation 1` takes two
    sequences at a time, on four GPUs.
    124M parameters at this length: `python -m trainer --config experiments/gpt_32k.py --sequence-length 131072
    --batch-size 2 --gradient-accumulation 2 --mesh.context 2`.
    One device: refused, with the number that there is. `--mesh.context 1` trains on it, at half the speed.

Data: the Python standard library's own sources, as bytes. For your own see `data` in trainer/config/sections.py.
"""

import dataclasses

from experiments import gpt_1b_32k
from trainer.config import MeshConfig, TrainConfig
from trainer.errors import UserMistake
from trainer.hardware import expected_platform


def get_config() -> TrainConfig:
    """The config of two GPUs.

    Raises:
      UserMistake: there are only CPUs to be seen.
    """
    if expected_platform() == "cpu":
        raise UserMistake(
            "experiments/gpt_128k.py trains 1.3B parameters on 131,072 tokens and needs two accelerators, but only "
            "CPUs are to be seen; run experiments/gpt_32k.py, which has a version for them, or see what it would take "
            "with: python -m trainer.compile --config experiments/gpt_128k.py --topology h200:2"
        )
    return gpt_1b_128k()


def gpt_1b_128k() -> TrainConfig:
    """The config, whatever this machine is."""
    base = gpt_1b_32k.gpt_1b()
    return dataclasses.replace(
        base,
        name="gpt_128k",
        description="A large GPT on very long sequences, meant to be split over accelerators",
        sequence_length=131_072,
        # As many tokens to a step as gpt_1b_32k.
        batch_size=2,
        gradient_accumulation=2,
        # A GPU has room for the attention kernel's outputs, which take longest to recompute, and not for the rest.
        model=dataclasses.replace(base.model, remat="save_attention"),
        mesh=MeshConfig(context=2),
    )
