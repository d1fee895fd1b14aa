"""experiments/gpt_32k.py cut to two steps, to see that an installation works.

Command:
    python -m trainer --config experiments/smoke.py

Hardware and expected numbers: any; 24 s on two CPU cores (JAX 0.10.2, 2026-11-29). With
GPT-2's MLP it took 32 s on an H200 (JAX 0.11.2, 2026-11-21).
The losses mean nothing.
"""

import dataclasses

from experiments import gpt_32k
from trainer.config import TrainConfig


def get_config() -> TrainConfig:
    """The base with a schedule of two steps."""
    base = gpt_32k.get_config()
    schedule = dataclasses.replace(base.optimizer, num_warmup_steps=1)
    return dataclasses.replace(base, name="smoke", num_steps=2, optimizer=schedule)
