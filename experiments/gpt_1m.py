"""A GPT of 1.3B parameters on one sequence of 1,048,576 tokens, split over two GPUs.

Hypothesis: the length of a sequence is bounded by the host's memory, not the GPUs'. All that grows with it on a GPU is
one layer's activations; the layers' inputs and what their attention gave, 206 GB together, wait in the host's memory
for the backward pass, which so exchanges no keys for the forward pass again.

Command:
    python -m trainer --config experiments/gpt_1m.py

Hardware and expected numbers:
    Two H100s or H200s of one host with 256 GB of memory: the model of experiments/gpt_1b_32k.py, 1.3B parameters
    (1,336M), every layer global; parameters and optimizer state split over both.
    `python -m trainer.compile --config experiments/gpt_1m.py --topology h200:2` says ahead of time what a step takes.
    That is 63 GB on each GPU, and for each 104 GB of the host's memory. On two H200s (JAX 0.11.2, 2026-11-29, with
    `--num-steps 1 --optimizer.num-warmup-steps 0`, XLA_PYTHON_CLIENT_MEM_FRACTION=0.94 and
    XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=100) compiling takes 68 s and the first step 6 min 25 s,
    the pinning of the host's memory included: 2,720 tokens/s, 43.6 % MFU, loss 10.73. The row is in
    experiments/benchmarks/results/train_meshes_h200.jsonl.
    One device: refused, with the number that there is.

Data: the Python standard library's own sources, as bytes, as one text: a million tokens of it are all before a token,
whichever document they are of. For your own see `data` in trainer/config/sections.py.
"""

import dataclasses

from experiments import gpt_128k
from trainer.config import EvaluationConfig, TrainConfig
from trainer.errors import UserMistake
from trainer.hardware import expected_platform


def get_config() -> TrainConfig:
    """The config of two GPUs.

    Raises:
      UserMistake: there are only CPUs to be seen.
    """
    if expected_platform() == "cpu":
        raise UserMistake(
            "experiments/gpt_1m.py trains 1.3B parameters on 1,048,576 tokens and needs two accelerators, but only "
            "CPUs are to be seen; run experiments/gpt_32k.py, which has a version for them, or see what it would take "
            "with: python -m trainer.compile --config experiments/gpt_1m.py --topology h200:2"
        )
    return gpt_1b_1m()


def gpt_1b_1m() -> TrainConfig:
    """The config, whatever this machine is."""
    base = gpt_128k.gpt_1b_128k()
    return dataclasses.replace(
        base,
        name="gpt_1m",
        description="A large GPT on one very long sequence, meant to be split over accelerators",
        sequence_length=1_048_576,
        batch_size=1,
        gradient_accumulation=1,
        num_steps=100,
        optimizer=dataclasses.replace(base.optimizer, num_warmup_steps=10),
        # One layer's activations are all that a GPU has room for. A loop over the layers lets XLA reuse them.
        model=dataclasses.replace(base.model, remat="offload_attention", scan_layers=True),
        data=dataclasses.replace(base.data, keep_documents_apart=False),
        evaluation=EvaluationConfig(every_num_steps=50, num_sequences=1),
    )
