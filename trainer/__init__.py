"""Trains the GPT of `layers` from one config: `python -m trainer --config experiments/gpt_32k.py`.

`train.py` shows a whole run from top to bottom; read it first.
"""

from flax_longcontext import require_ours, warn_of_neighbours

require_ours("kernels", "layers", importer=__name__)
warn_of_neighbours(__name__)
