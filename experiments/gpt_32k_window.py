"""experiments/gpt_32k.py with one thing changed: no layer is global, all see the last 1,024 tokens.

Hypothesis: the one global layer takes most of a step's attention and, this early in training, adds little to the loss.

Command:
    python -m trainer --config experiments/gpt_32k_window.py
    python -m trainer --config experiments/gpt_32k_window.py:left=511

Hardware and expected numbers: those of the base, in less time.
"""

import dataclasses

from experiments import gpt_32k
from kernels import LocalMask
from trainer.config import TrainConfig


def get_config(left: int = 1023) -> TrainConfig:
    """The base with its masks replaced.

    Args:
      left: tokens before its own that a token sees.
    """
    base = gpt_32k.get_config()
    name = "gpt_32k_window" if left == 1023 else f"gpt_32k_window_{left}"
    return dataclasses.replace(base, name=name, model=dataclasses.replace(base.model, masks=(LocalMask(left, 0),)))
