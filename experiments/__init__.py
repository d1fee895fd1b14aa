"""Experiments: one readable page each. Run one with `python -m trainer --config experiments/NAME.py`."""

from flax_longcontext import require_ours

require_ours("kernels", "layers", "trainer", importer=__name__)
