"""experiments/gpt_32k.py with one thing changed: no layer is global, all see the last 1,024 tokens.

Hypothesis: the one global layer takes most of a step's attention and, this early in training, adds little to the loss.

Command:
    python -m trainer --config experiments/gpt_32k_window.py

Hardware and expected numbers: those of the base, in less time.
"""

import dataclasses

from experiments import gpt_32k
from kernels import LocalMask
from trainer.config import TrainConfig


def get_config() -> TrainConfig:
    """The base with its masks replaced."""
    base = gpt_32k.get_config()
    return dataclasses.replace(
        base, name="gpt_32k_window", model=dataclasses.replace(base.model, masks=(LocalMask(1023, 0),))
    )
