"""Eight billion parameters on one GPU: a pretrained model's context, extended by adapters of rank 16 on all matrices.

Hypothesis: low-rank adapters and norms are enough for a longer context (LongLoRA, arXiv:2309.12307), so that a model
whose float32 state alone is 128 GB trains on one H200. Its matrices stay as they are, in bfloat16. The phases are those
of experiments/extend_context.py: 32,768 tokens to a sequence, then 131,072. LongLoRA trains the embedding, too:
--lora.embeddings True.

Command:
    python -m trainer --config experiments/extend_8b_one_gpu.py --init-from models/Llama-3.1-8B

Hardware and expected numbers:
    One H200. The first loss is the pretrained model's. Whether a model fits:
    `python -m trainer.compile --config experiments/extend_8b_one_gpu.py --init-from DIR --topology h200:1`, which needs
    the folder's config.json alone. Of Llama-3.1-8B's it says 32.1 GB for the first phase and 77.3 GB for the second, of
    112.6, 16.2 GB of them parameters and 0.3 GB the optimizer's (JAX 0.11.2, 2026-11-29).

    The run hasn't been timed. `python -m experiments.benchmarks.adapters --length 131072` times a step of this shape
    with random parameters, beside the same step with its norms alone to train.

`python -m trainer.export --workdir runs/extended_8b --output DIR` merges the adapters into the base; --adapters True
writes them alone, for `peft`.

Data: the Python standard library's own sources, of which few are as long as a sequence; a long context is learned from
long documents. For your own see `data` in trainer/config/sections.py.
"""

import dataclasses

from experiments import extend_context
from layers import LoRAConfig
from trainer.config import TrainConfig


def get_config(init_from: str = "models/pretrained", num_steps: int = 1000, learning_rate: float = 1e-4) -> TrainConfig:
    """The config of a pretrained model in two phases.

    Args:
      init_from, num_steps, learning_rate: as of experiments/extend_context.py. Adapters take a larger rate.
    """
    return dataclasses.replace(
        extend_context.get_config(init_from, num_steps, learning_rate),
        name="extended_8b",
        description="Adapters of a pretrained model, trained on sequences that become longer; for one H200",
        lora=LoRAConfig(rank=16, alpha=32.0),
    )
